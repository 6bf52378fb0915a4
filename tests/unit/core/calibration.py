"""A closed loop around the cadence: devices of known speeds do what is planned, and what it cost goes back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flodl.core.actions import Record
from flodl.core.cadence import Cadence
from flodl.messages import CadenceSettings, WindowDone

EPOCH_BATCHES = 1_000_000


@dataclass(frozen=True)
class Devices:
    """What rounds cost: ``ms`` per batch of each rank, ``averaging_ms`` per round, both by the number of the round.

    ``divergence`` by the round's number and its longest window; ``rate`` is the learning rate.
    """

    ms: Callable[[int], Mapping[int, float]]
    averaging_ms: Callable[[int], float]
    divergence: Callable[[int, int], float] = lambda version, k_max: 0.01
    rate: Callable[[int], float] = lambda version: 0.1


@dataclass(frozen=True)
class Line:
    """One round: what was planned, proposed, said and committed."""

    version: int
    counts: Mapping[int, int]
    fields: Mapping[str, object]

    def __str__(self) -> str:
        fields = self.fields
        counts = " ".join(f"{count:4d}" for count in self.counts.values())
        overhead, note = fields["overhead"], str(fields["nudge"] or fields["note"])
        asked = "unknown" if overhead is None else f"{overhead:.4f}"
        return (
            f"{self.version:5d}  {fields['phase']:6}  {counts}  {asked:>8}  {fields['divergence']:10.4f}"
            f"  {fields['anchor']:6d} → {fields['proposed_anchor']:<4d}  {fields['verdict']:15}"
            f"  {fields['committed_anchor']:9d}  {'settled' if fields['settled'] else '-':7}  {note}"
        ).rstrip()


HEADER = "round  phase   counts …  overhead  divergence  proposed       verdict          committed  settled  note"


class Calibration:
    """The cadence of ``devices``, round after round."""

    def __init__(self, settings: CadenceSettings, devices: Devices) -> None:
        self.devices = devices
        self.cadence = Cadence(settings, list(devices.ms(1)))
        self.version = 0

    def round(self) -> Line:
        self.version += 1
        devices, cadence = self.devices, self.cadence
        counts, ms = cadence.elche.plan(EPOCH_BATCHES), devices.ms(self.version)
        reports = {
            rank: WindowDone(
                rank, self.version - 1, count, count, 1.0, True, ms[rank], ms[rank], ms[rank] * count, {},
                devices.rate(self.version),
            )
            for rank, count in counts.items()
        }  # fmt: skip
        divergence = devices.divergence(self.version, max(counts.values()))
        actions = cadence.observe(self.version, reports, devices.averaging_ms(self.version), divergence, 0.0)
        cadence.elche.check()
        (story,) = [action for action in actions if isinstance(action, Record) and action.event == "cadence"]
        return Line(self.version, counts, story.fields)

    def run(self, rounds: int) -> list[Line]:
        return [self.round() for _ in range(rounds)]


def steady(ms: Mapping[int, float], averaging_ms: float) -> Devices:
    """Devices that always cost the same."""
    return Devices(lambda version: ms, lambda version: averaging_ms)
