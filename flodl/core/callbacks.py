"""The script's functions that run on one rank behind an epoch: who runs them, and what came of it.

States of a call: *asked* of the elected rank, or *due* while nobody can be asked → answered. Invariants: a call is
asked of one rank at a time, while that rank's model can show the consensus; when the rank dies, it is asked of the next
one that can; an answer counts once. A call that fails is told, and training goes on. It runs nothing itself.
"""

from collections.abc import Collection
from typing import TypeAlias

from flodl.core.actions import JobAction, Record, SendHead, SendHost, Severity
from flodl.core.elche import ElChe
from flodl.core.election import Election
from flodl.core.membership import Membership
from flodl.core.saving import is_due
from flodl.ids import RankId
from flodl.messages import CallbackDone, CallbackKind, EvalDone, EvalReport, RunCallback, RunEval, Settings

_Call: TypeAlias = tuple[CallbackKind | None, int]
"""What is called, and behind which epoch; None is the evaluation."""


class Callbacks:
    """See the module docstring. ``elche`` says who is the fastest when somebody is elected. ``last_eval`` is the latest
    evaluation's value with its epoch's number, None before the first.
    """

    def __init__(self, settings: Settings, membership: Membership, elche: ElChe) -> None:
        self._settings, self._membership, self._elche = settings, membership, elche
        self._election = Election(settings.callback_rank)
        self._calls: dict[_Call, RankId | None] = {}
        self.last_eval: tuple[int, float] | None = None

    @property
    def owner(self) -> RankId | None:
        """The rank that runs the calls, and provides the final state; None when nobody is alive."""
        return self._election.elect(self._membership.live, self._elche.ms_per_batch)

    @property
    def are_pending(self) -> bool:
        """True while a call has not been answered."""
        return bool(self._calls)

    def close_epoch(self, epoch: int) -> None:
        """The epoch is complete: what is to follow it is due."""
        settings = self._settings
        kinds: list[CallbackKind | None] = [None] if settings.eval_samples else []
        if settings.has_epoch_fn:
            kinds.append(CallbackKind.EPOCH)
        if settings.has_checkpoint_fn and is_due(settings.checkpoint, epoch):
            kinds.append(CallbackKind.CHECKPOINT)
        self._calls |= {(kind, epoch): None for kind in kinds}

    def lose(self, ranks: Collection[RankId]) -> None:
        """These are gone; what was asked of them is due again."""
        self._calls |= {call: None for call, rank in self._calls.items() if rank in ranks}

    def ask(self) -> list[JobAction]:
        """Every rank can show the consensus now: ask the owner for what is due."""
        owner = self.owner
        if owner is None:
            return []
        due = [call for call, rank in self._calls.items() if rank is None]
        self._calls |= dict.fromkeys(due, owner)
        host = self._membership[owner].host
        return [SendHost(host, _order(owner, kind, epoch)) for kind, epoch in due]

    def on_eval(self, message: EvalDone) -> list[JobAction]:
        """The evaluation is answered; what another rank than the asked one says is too late."""
        epoch, rank = message.epoch, message.rank
        if not self._answer((None, epoch), rank):
            return []
        if message.error:
            return [_failed("eval_failed", "eval_fn", epoch, rank, message.error)]
        detail = f"epoch {epoch + 1}: eval {message.value:.6g}"
        fields = {"epoch": epoch, "value": message.value, "rank": rank}
        self.last_eval = (epoch, message.value)
        return [Record("eval", Severity.INFO, detail, fields), SendHead(EvalReport(epoch, message.value))]

    def on_done(self, message: CallbackDone) -> list[JobAction]:
        """The call is answered; by the asked rank, as above."""
        kind, epoch, rank = message.kind, message.epoch, message.rank
        if not self._answer((kind, epoch), rank):
            return []
        if message.error:
            return [_failed("callback_failed", kind, epoch, rank, message.error)]
        detail = f"epoch {epoch + 1}: {kind} has run on rank {rank}"
        return [Record("called_back", Severity.INFO, detail, {"kind": str(kind), "epoch": epoch, "rank": rank})]

    def _answer(self, call: _Call, rank: RankId) -> bool:
        if self._calls.get(call) != rank:
            return False
        del self._calls[call]
        return True


def _order(rank: RankId, kind: CallbackKind | None, epoch: int) -> RunEval | RunCallback:
    return RunEval(rank, epoch) if kind is None else RunCallback(rank, kind, epoch)


def _failed(event: str, name: str, epoch: int, rank: RankId, error: str) -> Record:
    detail = f"{name} failed on rank {rank} after epoch {epoch + 1}: {error}"
    return Record(event, Severity.WARNING, detail, {"epoch": epoch, "rank": rank})
