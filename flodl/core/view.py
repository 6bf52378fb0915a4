"""state.json: one run's state as plain values, read off JobCore. Pure; changes nothing."""

from collections.abc import Iterable
from typing import Any

from flodl.core.job import JobCore, Phase
from flodl.core.liveness import Pulse
from flodl.core.membership import Member, RankStatus
from flodl.core.plain import FROZEN, PlainCore, PlainPhase
from flodl.ids import RankId
from flodl.messages import Layout

SCHEMA = 1
"""The number of this shape; it grows when a key changes its meaning."""


def snapshot(core: JobCore | PlainCore, now_s: float) -> dict[str, Any]:
    """What ``fdl status --json`` prints, but for what only the shell knows (run id, name, outcome)."""
    return _plain_run(core, now_s) if isinstance(core, PlainCore) else _run(core, now_s)


def _plain_run(core: PlainCore, now_s: float) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "phase": str(core.phase),
        "plain": {
            "restarts": core.restarts.count,
            "max_restarts": core.settings.max_restarts,
            "uptime_s": core.uptime_s(now_s),
        },
        "hosts": _hosts(core, now_s),
        "ranks": [_plain_rank(core, member, now_s) for member in core.membership.all()],
        **_troubles(core),
        "join": _join(core, now_s),
        "waits_for": _awaited_by_plain(core),
    }


def _run(core: JobCore, now_s: float) -> dict[str, Any]:
    training = core.training
    first = next(iter(core.startup.ready.values()), None)
    view: dict[str, Any] = {
        "schema": SCHEMA,
        "phase": str(core.phase),
        "mode": None if first is None else str(first.settings.cadence.mode),
        "backend": None if first is None else first.backend,
        "incarnation": core.membership.incarnation,
        "model_bytes": None if first is None else _bytes(first.layout),
        "num_epochs": None if first is None else first.settings.num_epochs * first.settings.epoch_splits,
        "epoch_samples": None,
        "hosts": _hosts(core, now_s),
        "ranks": [_rank(core, member) for member in core.membership.all()],
        **_troubles(core),
        "join": _join(core, now_s),
        "waits_for": _awaited(core),
    }
    if training is not None:
        has_anchor = first is not None and not first.settings.cadence.mode.is_sync
        view |= {
            "version": training.version,
            "epoch": training.supply.epoch,
            "epoch_samples": training.supply.epoch_size,
            "samples_merged": training.supply.epoch_merged,
            "callback_rank": training.callbacks.owner,
            "lowest_loss": _metric(training.lowest_loss),
            "last_eval": _metric(training.callbacks.last_eval),
            "cadence": {
                "phase": training.elche.phase.name.lower(),
                "anchor": training.elche.anchor if has_anchor else None,
                "counts": {str(rank): count for rank, count in training.counts.items()},
                "divergence": training.cadence.divergence,
                "verdict": str(training.cadence.verdict),
                "settled": training.cadence.is_settled if has_anchor else None,
            },
        }
    return view


def _metric(found: tuple[int, float] | None) -> dict[str, Any] | None:
    """A value and the epoch that it is of; epochs count from 0."""
    return None if found is None else {"epoch": found[0], "value": found[1]}


def _join(core: JobCore | PlainCore, now_s: float) -> dict[str, Any] | None:
    """The join window while it is open; seconds from now. Once it can only be held ``closes_in_s`` is None."""
    window = core.startup.window
    if core.phase not in (Phase.WAITING, PlainPhase.WAITING):
        return None
    running_s, closes_at_s = core.running_s(now_s), window.closes_at_s
    return {
        "start": str(window.settings.start),
        "is_held": not window.fire_refusal(),
        "has_least": window.has_least,
        "ranks": window.rank_count,
        "least": window.least or None,
        "target": window.settings.target_ranks or None,
        "closes_in_s": None if closes_at_s is None else max(closes_at_s - running_s, 0.0),
        "fails_in_s": max(window.fails_at_s - running_s, 0.0),
    }


def _coming(core: JobCore) -> list[str]:
    """Whom a run that starts still waits for."""
    if core.phase is Phase.WAITING:
        return [f"host {absence.host}" for absence in core.startup.window.absences()]
    if core.phase is not Phase.STAGING:
        return []
    building = core.membership.with_status(RankStatus.SPAWNED)
    ranks = [f"rank {rank} on {core.membership[rank].host}" for rank in building]
    return ranks or ([] if core.startup.head_ready else ["the head"])


def _awaited(core: JobCore) -> list[str]:
    """Whom a run that starts or ends still waits for: ranks first, then hosts, then the head."""
    if not core.ending.is_decided and core.phase not in (Phase.FINISHING, Phase.ENDING):
        return _coming(core)
    ranks = core.membership.live
    if core.training is not None and core.phase is Phase.FINISHING:
        owner = core.training.callbacks.owner
        ranks = () if owner is None else (owner,)
    elif core.training is not None and core.phase is not Phase.ENDING:
        ranks = core.training.missing()
    return _named(core, ranks) or ["the head"]


def _awaited_by_plain(core: PlainCore) -> list[str]:
    """Whom a run that starts, is between two starts, or ends, waits for."""
    if core.phase is PlainPhase.WAITING:
        return [f"host {absence.host}" for absence in core.startup.window.absences()]
    if core.phase is PlainPhase.GATHERING:
        return [f"host {host}" for host in core.missing]
    is_stopping = core.phase in (PlainPhase.STOPPING, PlainPhase.ENDING)
    return _named(core, core.membership.live) if is_stopping else []


def _named(core: JobCore | PlainCore, ranks: Iterable[RankId]) -> list[str]:
    """These ranks, or, without any, the hosts."""
    named = [f"rank {rank} on {core.membership[rank].host}" for rank in ranks]
    return named or [f"host {host}" for host in core.hosts]


def _troubles(core: JobCore | PlainCore) -> dict[str, Any]:
    return {
        "absent": [
            {"host": absence.host, "stage": absence.stage, "reason": absence.reason}
            for absence in core.startup.window.absences()
        ],
        "losses": [{"host": loss.host, "rank": loss.rank, "error": loss.error} for loss in core.ending.losses],
        "ending": core.ending.status if core.ending.is_decided else None,
        "message": core.ending.message,
    }


def _bytes(layout: Layout) -> int:
    return layout.f32_count * 4 + layout.f64_count * 8 + layout.raw_bytes


def _hosts(core: JobCore | PlainCore, now_s: float) -> list[dict[str, Any]]:
    names = dict.fromkeys(
        (*core.startup.window.joined, *core.membership.hosts_of(m.rank for m in core.membership.all()))
    )
    found = []
    for name in names:
        hello = core.hosts.get(name) or core.startup.window.joined.get(name)
        pulse = core.liveness.host_pulse(name)
        state = str(pulse) if name in core.hosts and pulse is not None else "gone"
        is_draining = isinstance(core, JobCore) and core.leaving.is_draining(name)
        found.append(
            {
                "host": name,
                "state": "draining" if state == Pulse.ALIVE and is_draining else state,
                "ranks": list(core.membership.on_host(name)),
                "age_s": core.liveness.silence_s(name, core.running_s(now_s)),
                "address": "" if hello is None else hello.address,
                "tunnelled": hello is not None and hello.tunnelled,
                "python": "" if hello is None else hello.python,
                "torch": "" if hello is None else hello.torch,
                "cores": None if hello is None else hello.cores,
            }
        )
    return found


def _plain_rank(core: PlainCore, member: Member, now_s: float) -> dict[str, Any]:
    return {**_process(core, member), "uptime_s": core.lived_s(member.rank, now_s)}


def _rank(core: JobCore, member: Member) -> dict[str, Any]:
    training, beat = core.training, core.beats.get(member.rank)
    last = None if training is None else training.last.get(member.rank)
    steps, samples = (0, 0) if training is None else training.merged.get(member.rank, (0, 0))
    merged = 0 if training is None else sum(count for _, count in training.merged.values())
    return {
        **_process(core, member),
        "steps": steps if beat is None else max(steps, beat.steps),
        "rate": None if last is None else last.rate,
        "share": samples / merged if merged else None,
        "loss": None if last is None else last.loss,
        "count": None if training is None else training.counts.get(member.rank),
    }


def _process(core: JobCore | PlainCore, member: Member) -> dict[str, Any]:
    beat = core.beats.get(member.rank)
    state, reason = str(member.status), member.reason
    if member.status is RankStatus.LIVE and beat is not None and beat.is_frozen:
        state, reason = "frozen", FROZEN.format(pid=beat.pid)
    elif member.status is RankStatus.LIVE and core.liveness.rank_pulse(member.rank) is Pulse.SUSPECT:
        state = "suspect"
    return {
        "rank": member.rank,
        "host": member.host,
        "device": f"{member.device.kind}:{member.device.index}",
        "device_name": member.device.name,
        "state": state,
        "reason": reason,
        "pid": beat.pid if beat is not None and beat.pid else None,
        "rss_bytes": None if beat is None else beat.rss_bytes,
    }
