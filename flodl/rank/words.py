"""What a script's exception says, in words that fit a message: encodable, bounded, whatever its ``__str__`` does."""

from typing import Final

MAX_CHARS: Final = 32_768
"""The end of a longer text is left out; the whole of it is in the rank's log."""


def describe(error: BaseException) -> str:
    """``ValueError: text``; only the class where the text cannot be had."""
    name = type(error).__name__
    try:
        return encodable(f"{name}: {error}")[:MAX_CHARS]
    except Exception:  # noqa: BLE001  # a __str__ that raises must not hide the error itself
        return name


def encodable(text: str) -> str:
    """``text`` with lone surrogates escaped."""
    return text.encode(errors="backslashreplace").decode()
