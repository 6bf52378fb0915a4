"""Numbers with their nouns, as a person reads them. Pure."""

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``0 losses``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """``rank 0``, ``ranks 0, 2``."""
    return f"{noun if len(numbers) == 1 else noun + 's'} {', '.join(map(str, numbers))}"


def there(count: int, wanted: int | None, noun: str) -> str:
    """How many of those that are ``wanted`` have come; more may. None: nobody has said how many."""
    if wanted is None:
        return f"{counted(count, noun)} {'is' if count == 1 else 'are'} there"
    if count > wanted:
        return f"{counted(count, noun)} are there, {wanted} would do"
    return f"{count} of {counted(wanted, noun)} {'is' if wanted == 1 else 'are'} there"
