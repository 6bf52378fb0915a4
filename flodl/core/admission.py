"""May these ranks train together? One pure question, answered with what differs, where, and what to do about it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from flodl.core.counted import counted
from flodl.core.membership import Member, Membership
from flodl.messages import HeadReady, HostHello, RankReady, Settings

SAME_BUILD = (
    "Every process must build the same model, optimizer, dataset and settings: "
    "look for code that depends on the rank, the host or the time before Trainer.run"
)
SAME_SCRIPT = "Every host must have the same script: copy the project there anew"
ONE_KIND = (
    "A collective mode averages over devices of one kind: take a cpu_* mode, or leave out the hosts of the other kind"
)
ONE_TORCH = "A collective mode needs one torch (major.minor) everywhere: install the same, or take a cpu_* mode"

_KINDS = {"cpu": "CPU", "cuda": "NVIDIA GPU", "rocm": "AMD GPU"}
_SCRIPT = "script"


@dataclass(frozen=True, slots=True)
class _Difference:
    """One thing that is not alike, and what to do."""

    text: str
    remedy: str


def disagreement(reports: Sequence[RankReady], members: Membership, head: HeadReady | None) -> str:
    """Why this cohort is refused, naming what differs and between whom; empty when all agree.

    ``reports`` are in rank order, the first is the measure; ``members`` knows their hosts and devices. The head is
    compared where it knows the same things.
    """
    first = reports[0]
    for other in reports[1:]:
        differing = _between(first, other, members)
        if differing:
            return _refusal(f"{_who(first, members)} and {_who(other, members)}", differing)
    if head is not None:
        differing = _from_head(first, head)
        if differing:
            return _refusal(f"{_who(first, members)} and the head", differing)
    return _too_small(first.settings, len(reports))


def fits_head(report: RankReady, head: HeadReady | None) -> bool:
    """Whether this rank trains what the head wants trained; without a head it does."""
    return head is None or not _from_head(report, head)


def miscounted_ratios(settings: Settings, world_size: int) -> str:
    """Why ``partition_ratios`` do not fit the ranks; empty when they do."""
    ratios = settings.cadence.partition_ratios
    if ratios is None or len(ratios) == world_size:
        return ""
    have = f"{counted(len(ratios), 'ratio')} for {counted(world_size, 'rank')}"
    return f"partition_ratios has {have}; give one per rank, in rank order"


def torch_skew(members: Iterable[Member]) -> str:
    """Which hosts have another torch than the others, where that is so; a mode that is not collective bears it."""
    hosts: dict[str, dict[str, None]] = {}
    for member in members:
        if member.torch:
            hosts.setdefault(_minor(member.torch), {})[f"{member.host} has {member.torch}"] = None
    return "" if len(hosts) < 2 else "; ".join(text for texts in hosts.values() for text in texts)


def shut_off(settings: Settings, hosts: Iterable[HostHello]) -> str:
    """Why ``hosts`` that come through a tunnel may not take part: in a collective mode hosts reach each other.
    Empty when all may.
    """
    mode = settings.cadence.mode
    if not mode.is_collective:
        return ""
    return beyond_tunnels(f"mode {mode}", hosts, "take a cpu mode, or leave the tunnel out")


def beyond_tunnels(what: str, hosts: Iterable[HostHello], remedy: str) -> str:
    """Why ``what``, in which hosts reach each other, cannot have all of these; empty when none has only a tunnel."""
    tunnelled = [hello.host for hello in hosts if hello.tunnelled]
    if not tunnelled:
        return ""
    return (
        f"{what} needs connections from host to host, and the tunnel of {', '.join(tunnelled)} leads to the "
        f"controller only: {remedy}"
    )


def _who(report: RankReady, members: Membership) -> str:
    return f"rank {report.rank} on {members[report.rank].host}"


def _refusal(who: str, differing: Sequence[_Difference]) -> str:
    remedies = dict.fromkeys(each.remedy for each in differing)
    return f"{who} do not agree on: {'; '.join(each.text for each in differing)}. {'. '.join(remedies)}"


def _between(mine: RankReady, other: RankReady, members: Membership) -> list[_Difference]:
    found = _settings(mine.settings, other.settings) + _fingerprint(mine.fingerprint, other.fingerprint)
    unlike = _unlike(members[mine.rank], members[other.rank]) if mine.settings.cadence.mode.is_collective else []
    if not unlike and mine.backend != other.backend:
        unlike = [_Difference(f"averaging backend ({mine.backend} against {other.backend})", ONE_KIND)]
    return found + unlike


def _unlike(mine: Member, other: Member) -> list[_Difference]:
    """What a collective group cannot bear."""
    found = []
    if mine.device.kind != other.device.kind:
        kinds = [_KINDS.get(member.device.kind, member.device.kind) for member in (mine, other)]
        found.append(_Difference(f"kind of device ({kinds[0]} against {kinds[1]})", ONE_KIND))
    if mine.torch and other.torch and _minor(mine.torch) != _minor(other.torch):
        found.append(_Difference(f"torch ({mine.torch} against {other.torch})", ONE_TORCH))
    return found


def _from_head(report: RankReady, head: HeadReady) -> list[_Difference]:
    known = {name: value for name, value in report.fingerprint.items() if name in head.fingerprint}
    return _settings(report.settings, head.settings) + _fingerprint(known, head.fingerprint)


def _settings(mine: Settings, other: Settings) -> list[_Difference]:
    found = []
    for field in fields(Settings):
        a, b = getattr(mine, field.name), getattr(other, field.name)
        if a == b or field.name == "checkpoint":  # the head's counts, and only the controller acts on it
            continue
        if field.name == "cadence":
            found += [
                f"{part.name} ({getattr(a, part.name)} against {getattr(b, part.name)})"
                for part in fields(a)
                if getattr(a, part.name) != getattr(b, part.name)
            ]
        else:
            found.append(f"{field.name} ({a} against {b})")
    return [_Difference(text, SAME_BUILD) for text in found]


def _fingerprint(mine: Mapping[str, str], other: Mapping[str, str]) -> list[_Difference]:
    return [
        _Difference(
            f"{name} ({mine.get(name, 'absent')} against {other.get(name, 'absent')})",
            SAME_SCRIPT if name == _SCRIPT else SAME_BUILD,
        )
        for name in sorted({*mine, *other})
        if mine.get(name) != other.get(name)
    ]


def _minor(version: str) -> str:
    """Major and minor of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _too_small(settings: Settings, ranks: int) -> str:
    if settings.dataset_size >= ranks:
        callback_rank = settings.callback_rank
        if callback_rank is not None and callback_rank >= ranks:
            return f"epoch_callback_policy names rank {callback_rank}, but the highest rank is {ranks - 1}"
        return ""
    return (
        f"the dataset has {counted(settings.dataset_size, 'sample')} for {counted(ranks, 'rank')}: "
        f"every rank needs at least one; use at most {counted(settings.dataset_size, 'rank')}"
    )
