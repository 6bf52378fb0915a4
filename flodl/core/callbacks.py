"""The script's functions that run on one rank behind an epoch: who runs them, and what came of it.

States of a call: *asked* of the elected rank, or *due* while nobody can be asked → answered. Invariants: a call is
asked of one rank at a time, while that rank's model can show the consensus; when the rank dies, it is asked of the next
one that can; an answer counts once. A call that fails is told, and training goes on. It runs nothing itself.
"""

from collections.abc import Collection

from flodl.core.actions import JobAction, Record, SendHead, SendHost, Severity
from flodl.core.elche import ElChe
from flodl.core.election import Election
from flodl.core.membership import Membership
from flodl.ids import RankId
from flodl.messages import EvalDone, EvalReport, RunEval, Settings


class Callbacks:
    """See the module docstring. ``elche`` says who is the fastest when somebody is elected."""

    def __init__(self, settings: Settings, membership: Membership, elche: ElChe) -> None:
        self._settings, self._membership, self._elche = settings, membership, elche
        self._election = Election(settings.callback_rank)
        self._evals: dict[int, RankId | None] = {}

    @property
    def owner(self) -> RankId | None:
        """The rank that runs the calls, and provides the final state; None when nobody is alive."""
        return self._election.elect(self._membership.live, self._elche.ms_per_batch)

    @property
    def are_pending(self) -> bool:
        """True while a call has not been answered."""
        return bool(self._evals)

    def close_epoch(self, epoch: int) -> None:
        """The epoch is complete: what is to follow it is due."""
        if self._settings.eval_samples:
            self._evals[epoch] = None

    def lose(self, ranks: Collection[RankId]) -> None:
        """These are gone; what was asked of them is due again."""
        self._evals |= {epoch: None for epoch, rank in self._evals.items() if rank in ranks}

    def ask(self) -> list[JobAction]:
        """Every rank can show the consensus now: ask the owner for what is due."""
        owner = self.owner
        due = [epoch for epoch, rank in self._evals.items() if rank is None]
        if owner is None:
            return []
        self._evals |= dict.fromkeys(due, owner)
        return [SendHost(self._membership[owner].host, RunEval(owner, epoch)) for epoch in due]

    def on_eval(self, message: EvalDone) -> list[JobAction]:
        """The evaluation is answered."""
        if message.epoch not in self._evals:
            return []
        del self._evals[message.epoch]
        if message.error:
            detail = f"eval_fn failed on rank {message.rank} after epoch {message.epoch}: {message.error}"
            return [Record("eval_failed", Severity.WARNING, detail, {"epoch": message.epoch, "rank": message.rank})]
        detail = f"epoch {message.epoch + 1}: eval {message.value:.6g}"
        fields = {"epoch": message.epoch, "value": message.value, "rank": message.rank}
        return [
            Record("eval", Severity.INFO, detail, fields),
            SendHead(EvalReport(message.epoch, message.value)),
        ]
