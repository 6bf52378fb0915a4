"""May these ranks train together? One pure question, answered with what differs and where."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from flodl.messages import HeadReady, HostHello, RankReady, Settings


def disagreement(reports: Sequence[RankReady], head: HeadReady | None) -> str:
    """Why this cohort is refused, naming what differs and between whom; empty when all agree.

    ``reports`` are in rank order; the first is the measure. The head is compared where it knows the same things.
    """
    first = reports[0]
    for other in reports[1:]:
        differing = _settings(first.settings, other.settings) + _fingerprint(first.fingerprint, other.fingerprint)
        if first.backend != other.backend:
            differing.append(f"averaging backend ({first.backend} against {other.backend})")
        if differing:
            return _refusal(f"rank {first.rank} and rank {other.rank}", differing)
    if head is not None:
        differing = _settings(first.settings, head.settings) + _fingerprint(
            {name: value for name, value in first.fingerprint.items() if name in head.fingerprint}, head.fingerprint
        )
        if differing:
            return _refusal(f"rank {first.rank} and the head", differing)
    return _too_small(first.settings, len(reports))


def miscounted_ratios(settings: Settings, world_size: int) -> str:
    """Why ``partition_ratios`` do not fit the ranks; empty when they do."""
    ratios = settings.cadence.partition_ratios
    if ratios is None or len(ratios) == world_size:
        return ""
    return f"partition_ratios has {len(ratios)} ratio(s) for {world_size} rank(s); give one per rank, in rank order"


def shut_off(settings: Settings, hosts: Iterable[HostHello]) -> str:
    """Why ``hosts`` that come through a tunnel may not take part: in a collective mode hosts reach each other.
    Empty when all may.
    """
    mode, tunnelled = settings.cadence.mode, [hello.host for hello in hosts if hello.tunnelled]
    if not mode.is_collective or not tunnelled:
        return ""
    return (
        f"mode {mode} needs connections from host to host, and the tunnel of {', '.join(tunnelled)} leads to the "
        "controller only: take a cpu mode, or leave the tunnel out"
    )


def _refusal(who: str, differing: Sequence[str]) -> str:
    return (
        f"{who} do not agree on: {'; '.join(differing)}. "
        "Every process must build the same model, optimizer, dataset and settings: "
        "look for code that depends on the rank, the host or the time before Trainer.run"
    )


def _settings(mine: Settings, other: Settings) -> list[str]:
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
    return found


def _fingerprint(mine: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [
        f"{name} ({mine.get(name, 'absent')} against {other.get(name, 'absent')})"
        for name in sorted({*mine, *other})
        if mine.get(name) != other.get(name)
    ]


def _too_small(settings: Settings, ranks: int) -> str:
    if settings.dataset_size >= ranks:
        callback_rank = settings.callback_rank
        if callback_rank is not None and callback_rank >= ranks:
            return (
                f"epoch_callback_policy names rank {callback_rank}, but there are only {ranks} ranks (0 … {ranks - 1})"
            )
        return ""
    return (
        f"the dataset has {settings.dataset_size} sample(s) for {ranks} ranks: "
        f"every rank needs at least one; use at most {settings.dataset_size} rank(s)"
    )
