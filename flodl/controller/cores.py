"""What was asked of a launch becomes the core that decides for the run."""

from flodl.core.job import JobCore, JobSettings
from flodl.core.liveness import LivenessSettings
from flodl.core.plain import PlainCore, PlainSettings
from flodl.core.window import JoinSettings
from flodl.launch.plan import HostKind, RunSpec


def core_of(spec: RunSpec, opened_s: float) -> JobCore | PlainCore:
    """The core of such a run, whose join window opened at ``opened_s`` (monotonic seconds)."""
    live = spec.liveness
    liveness = LivenessSettings(live.heartbeat_s, live.suspect_s, live.dead_s, live.startup_s)
    if spec.plain is not None:
        restarts = spec.plain.max_restarts
        return PlainCore(PlainSettings(_join_settings(spec), liveness, restarts, spec.stop_timeout_s), opened_s)
    settings = JobSettings(_join_settings(spec), liveness, has_head=True, stop_grace_s=spec.stop_timeout_s)
    return JobCore(settings, opened_s)


def _join_settings(spec: RunSpec) -> JoinSettings:
    join = spec.join
    return JoinSettings(
        tuple(host.name for host in spec.hosts),
        join.min_rank_start,
        join.target_ranks,
        {host.name: host.ranks for host in spec.hosts if host.ranks},
        join.join_timeout_s,
        join.max_join_timeout_s,
        join.elastic,
        join.start,
        frozenset(host.name for host in spec.hosts if host.kind is HostKind.MANAGED),
    )
