"""Where the checkpoints of a run will go is tried before anybody trains: a run shall not find out at its first save.

States: *unasked* → *asked* → *tried*, or a ``refusal`` in words. A run that saves nothing is sound from the start.
What lies there and will be replaced is said, too. Invariants: the shell is asked once; a disk that does not answer is a
refusal, too. It touches no files.
"""

from flodl.core.actions import JobAction, Record, Severity, TryPlace
from flodl.core.events import PlaceTried
from flodl.messages import CheckpointSettings

PLACE_TIMEOUT_S = 60.0
"""Making one small file takes no longer on a disk that is worth saving to, even where it has to be mounted first."""


class Place:
    """See the module docstring. ``refusal`` says why nothing can be saved there; empty while it can."""

    def __init__(self) -> None:
        self.refusal = ""
        self._stem: str | None = None
        self._is_tried = False
        self._deadline_s: float | None = None

    @property
    def is_sound(self) -> bool:
        """True once a checkpoint can be written there, or none is wanted."""
        return self._is_tried and not self.refusal

    def next_deadline_s(self) -> float | None:
        """When waiting ends."""
        return self._deadline_s

    def ask(self, settings: CheckpointSettings, now_s: float) -> list[JobAction]:
        """Have the run's ``save_path`` tried, unless that is under way or it has none."""
        if self._stem is not None:
            return []
        stem = settings.save_path
        self._stem, self._is_tried = stem, not stem
        if not stem:
            return []
        self._deadline_s = now_s + PLACE_TIMEOUT_S
        return [TryPlace(stem, settings.resume_from)]

    def on_tried(self, event: PlaceTried) -> list[JobAction]:
        """What came of it."""
        self._is_tried, self.refusal, self._deadline_s = True, event.error, None
        if not event.holds:
            return []
        detail = f"{self._stem} holds {event.holds}; the first save replaces it"
        return [Record("checkpoint_there", Severity.WARNING, detail, {"path": self._stem or ""})]

    def tick(self, now_s: float) -> None:
        """A disk that hangs now would hang at the first save."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        self._deadline_s = None
        self.refusal = (
            f"save_path {self._stem} cannot be used: its disk has not taken a small file within {PLACE_TIMEOUT_S:g} s; "
            "see to the disk, or save elsewhere"
        )
