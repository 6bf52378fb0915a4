"""What the losses of a run amount to: how many it may bear.

Invariants: only ranks that were admitted count; the measure is the world's size at its formation, whoever joins later.
It does not decide what a single loss means, nor how the run ends: JobCore does.
"""

from flodl.core.counted import counted


class Losses:
    """See the module docstring. ``count`` are lost since the formation."""

    def __init__(self) -> None:
        self.count = 0
        self._size = 0

    def begin(self, size: int) -> None:
        """So many ranks are admitted; losses before do not count."""
        self._size, self.count = size, 0

    def add(self, count: int) -> None:
        """So many more are lost."""
        self.count += count

    def verdict(self, limit: float | None) -> str:
        """Why these are too many for ``max_failure``, as the middle of a sentence; empty while the run bears them."""
        if limit is None or self.count < (limit if limit >= 1 else limit * self._size):
            return ""
        of = f"{limit:g}" if limit >= 1 else f"{limit:g} of {self._size}"
        return f"{counted(self.count, 'rank')} lost, and max_failure is {of}"
