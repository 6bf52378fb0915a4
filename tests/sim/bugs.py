"""Bugs planted by patch, one at a time, to see that the simulation finds them."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from flodl.checkpoint import writer
from flodl.checkpoint.bundle import MODEL_SUFFIX, BundleMeta
from flodl.checkpoint.writer import BundleWriter, PartWriter
from flodl.core.actions import Adopt, RankAction, SendUp
from flodl.core.events import GroupSettled, SumReady
from flodl.core.formation import Formation
from flodl.core.host import HostCore, _OpenRound
from flodl.core.pool import Pool
from flodl.core.rank import RankCore, Stage
from flodl.core.rounds import Round
from flodl.ids import RankId, RoundKey, Span
from flodl.messages import GroupFormed, Reduced


def no_reclaim(patch: pytest.MonkeyPatch) -> None:
    """What a dead rank had is forgotten instead of returned."""

    def reclaim(self: Pool, rank: RankId) -> int:
        holding = self._holdings.get(rank)
        if holding is None:
            return 0
        for grant in holding.grants:
            self._merged.update(grant.spans)
        self._merged.update(holding.trained.spans)
        self._held_batches -= holding.batches
        del self._holdings[rank]
        return 0

    patch.setattr(Pool, "reclaim", reclaim)


def adopt_before_commit(patch: pytest.MonkeyPatch) -> None:
    """A sum is adopted when it is there, whether or not the round is ever published."""
    on_sum, on_commit = RankCore._on_sum, RankCore._on_commit

    def eager(self: RankCore, event: SumReady, now_s: float) -> list[RankAction]:
        actions = on_sum(self, event, now_s)
        return [*actions, Adopt(event.key, take_raw=False)] if self.stage is Stage.HOLDING else actions

    def without_adoption(self: RankCore, key: RoundKey) -> list[RankAction]:
        return [action for action in on_commit(self, key) if not isinstance(action, Adopt)]

    patch.setattr(RankCore, "_on_sum", eager)
    patch.setattr(RankCore, "_on_commit", without_adoption)


def double_merge(patch: pytest.MonkeyPatch) -> None:
    """What is merged goes back to the free samples as well, once per epoch."""

    def twice(self: Pool, rank: RankId) -> tuple[Span, ...]:
        spans = self._take_trained(rank)
        if spans and self._merged.samples == 0:
            self._free.update(spans[:1])
            spans = spans[1:]
        self._merged.update(spans)
        return spans

    patch.setattr(Pool, "merge", twice)


def stale_incarnation_accepted(patch: pytest.MonkeyPatch) -> None:
    """Keys are not compared: what belongs to an earlier incarnation or attempt counts for the current one."""

    def is_current(self: RankCore, key: RoundKey) -> bool:
        return self._round is not None

    def reduce(self: Round, report: Reduced) -> bool:
        if self.key is None or report.rank not in self._participants:
            return False
        self._reduced[report.rank] = report
        return True

    def current(self: HostCore, rank: RankId, key: RoundKey) -> _OpenRound | None:
        open_round = self._round
        return None if open_round is None or rank not in open_round.order.ranks else open_round

    def on_group(self: RankCore, event: GroupSettled) -> list[RankAction]:
        return [SendUp(GroupFormed(self.rank, event.incarnation, event.attempt, event.error))]

    def answer(self: Formation, rank: RankId, incarnation: int, attempt: int, error: str) -> None:
        original(self, rank, self.incarnation, self.attempt, error)

    original = Formation.answer
    patch.setattr(Formation, "answer", answer)
    patch.setattr(RankCore, "_on_group", on_group)
    patch.setattr(RankCore, "_is_current", is_current)
    patch.setattr(Round, "reduce", reduce)
    patch.setattr(HostCore, "_current", current)


def meta_before_payload(patch: pytest.MonkeyPatch) -> None:
    """The meta file is renamed into place while the parts that it names are still being written."""
    write, commit = PartWriter.write, BundleWriter.commit
    late: list[bytes] = []

    def write_later(self: PartWriter, data: bytes) -> None:
        self._digest.update(data)
        self.size_bytes += len(data)
        late.append(data)

    def commit_first(self: BundleWriter, *arguments: Any) -> BundleMeta:
        patch.setattr(PartWriter, "write", write)
        try:
            meta = commit(self, *arguments)
            fd = writer.os.open(self._stem.plain(MODEL_SUFFIX), os.O_WRONLY)
            try:
                for data in late:
                    writer.os.write(fd, data)
            finally:
                os.close(fd)
        finally:
            late.clear()
            patch.setattr(PartWriter, "write", write_later)
        return meta

    patch.setattr(PartWriter, "write", write_later)
    patch.setattr(BundleWriter, "commit", commit_first)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    bug.__name__: bug
    for bug in (
        no_reclaim,
        adopt_before_commit,
        double_merge,
        stale_incarnation_accepted,
        meta_before_payload,
    )
}
