"""From a job to the shell of this process's role."""

import os
import sys
from collections.abc import Sequence
from typing import assert_never

from flodl.config.gpus import GpuInfo, probe_gpus
from flodl.spec import context
from flodl.spec.handle import TrainHandle
from flodl.spec.job import TrainingJob
from flodl.trainer.role import HeadRole, Promoted, RankRole, Solo, refuse_wrong_place, take_role


def start(job: TrainingJob) -> TrainHandle:
    """Take this process's role and hand the job to its shell. Each shell is imported where it is needed."""
    refuse_wrong_place()
    context.refuse_running()
    role = take_role(job.config.cluster, os.environ, os.getpid(), _visible_gpus)
    saves_to = job.config.save_path
    handle = TrainHandle(job.config.metrics_fn, job.config.eval_result_fn)
    try:
        match role:
            case RankRole(ticket):
                from flodl.rank.main import run_rank

                context.enter(context.Role.RANK, int(ticket["rank"]), int(ticket["world_size"]), saves_to)
                run_rank(ticket, job)
            case HeadRole(ticket):
                from flodl.head.main import run_head

                context.enter(context.Role.HEAD, save_path=saves_to)
                run_head(ticket, job, handle)
            case Promoted(cluster):
                from flodl.head.main import run_head
                from flodl.launch.promote import promote

                context.enter(context.Role.HEAD, save_path=saves_to)
                run_head(promote(cluster), job, handle)
            case Solo():
                from flodl.rank.solo import run_solo

                context.enter(context.Role.SOLO, save_path=saves_to)
                run_solo(job, handle)
            case _:
                assert_never(role)
    except BaseException:
        context.leave()
        raise
    return handle


def _visible_gpus() -> Sequence[GpuInfo]:
    """This machine's, with a word where it seems to have some and offers none."""
    probe = probe_gpus()
    if probe.is_surprising and sys.stderr is not None:
        sys.stderr.write(f"flodl: warning: no GPU was found here, so this process trains alone: {probe.reason}\n")
    return probe.gpus
