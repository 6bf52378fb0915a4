"""What a run has reported of itself, its snapshot and its outcome, as far as it can be shown: a file that was damaged,
or written by others, must fail nobody who looks at the run.
"""

import math
from typing import Any, Final

MAX_INTEGER: Final = 1 << 53
"""What every reader of JSON takes for the same number, and a float holds."""

LISTS: Final = ("hosts", "ranks", "absent", "losses")
"""Keys that hold a list of records wherever they hold something."""


def reported(data: object) -> dict[str, Any] | None:
    """The document in ``data`` (parsed JSON): lone surrogates are escaped, integers beyond ``MAX_INTEGER`` and numbers
    that are not finite are None. None where it is no object, or one of ``LISTS`` is no list of objects.
    """
    if not isinstance(data, dict) or not all(_are_records(data.get(key)) for key in LISTS):
        return None
    return {_text(key): _cleaned(value) for key, value in data.items()}


def _are_records(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, dict) for each in value))


def _cleaned(value: Any) -> Any:
    match value:
        case dict():
            return {_text(key): _cleaned(each) for key, each in value.items()}
        case list():
            return [_cleaned(each) for each in value]
        case str():
            return _text(value)
        case bool():
            return value
        case int():
            return value if abs(value) <= MAX_INTEGER else None
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
