"""Words for what a script gave us.

Those for an exception fit a message: encodable, bounded, whatever its ``__str__`` does.
"""

from typing import Any, Final

import torch

MAX_CHARS: Final = 32_768
"""The end of a longer text is left out; the whole of it is in the rank's log."""


def describe(error: BaseException) -> str:
    """``ValueError: text``; only the class where the text cannot be had."""
    name = type(error).__name__
    try:
        return encodable(f"{name}: {error}")[:MAX_CHARS]
    except Exception:  # noqa: BLE001  # a __str__ that raises must not hide the error itself
        return name


def describe_value(value: Any) -> str:
    """What a function of the script returned: a tensor by its shape, anything else by its type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def encodable(text: str) -> str:
    """``text`` with lone surrogates escaped."""
    return text.encode(errors="backslashreplace").decode()
