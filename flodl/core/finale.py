"""The last act of a run: the state goes to the head, then ranks, hosts and head leave.

States: *finishing* (evaluations are answered, the final state is collected) → *ending*: ranks are dismissed or stopped,
hosts are told to stop once no rank is left, and whoever does not leave in time is given up by the caller. Invariants:
the head and the hosts are told once, or again with an order that is harder; every wait has a deadline but that for the
head's own code behind ``join()``. It does not decide how the run ended (``core.ending``).
"""

from collections.abc import Iterable, Iterator

from flodl.core import ending as end
from flodl.core.actions import Failure, JobAction, ReceiveState, SendHead, SendHost, StopHead, WatchHead
from flodl.core.membership import Membership
from flodl.core.training import Training
from flodl.ids import HostName, RankId
from flodl.messages import FinishRank, RunEnded, SendState, StateSent, StopHost

STATE_TIMEOUT_S = 600.0
"""The final state must reach the controller's disk in this time: 10 GB at 17 MB/s."""

KILL_MARGIN_S = 5.0
"""A host gets its stop grace and this much more before we call it lost."""


class Finale:
    """See the module docstring. ``head_code`` is the head's exit code, None while it runs, 0 without a head.

    ``epochs`` are complete; the caller counts them.
    """

    def __init__(
        self, ending: end.Ending, membership: Membership, has_head: bool, stop_grace_s: float, transfers: Iterator[int]
    ) -> None:
        self.head_code: int | None = None if has_head else 0
        self.is_head_told = False
        self.epochs = 0
        self._ending, self._membership = ending, membership
        self._has_head, self._stop_grace_s = has_head, stop_grace_s
        self._transfers = transfers
        self._state_from: RankId | None = None
        self._transfer = -1
        self._is_state_settled = not has_head
        self._state_path = ""
        self._are_hosts_told = False
        self._is_head_watched = False
        self._deadline_s: float | None = None

    def next_deadline_s(self) -> float | None:
        """When who has not answered is given up."""
        return self._deadline_s

    def is_late(self, now_s: float) -> bool:
        """True once the deadline has passed."""
        return self._deadline_s is not None and now_s >= self._deadline_s

    # ---------------------------------------------------------------------------------------------------- finishing
    def begin(self) -> None:
        """Training is over. The last evaluations take as long as they take; then the state has its deadline."""
        self._deadline_s = None

    def is_collecting(self, training: Training, now_s: float) -> bool:
        """True while there is something to wait for, and somebody to wait for it from."""
        wants_state = not self._is_state_settled and self.head_code is None
        is_busy = training.callbacks.are_pending or training.saving.is_pending or wants_state
        return is_busy and bool(self._membership.live) and not self.is_late(now_s)

    def collect(self, training: Training, now_s: float) -> list[JobAction]:
        """Ask for the state, once all evaluations are answered and the last checkpoint is made."""
        owner = training.callbacks.owner
        is_early = training.callbacks.are_pending or training.saving.is_pending  # a rank hands over one state at a time
        if is_early or self._state_from is not None or owner is None:
            return []
        self._state_from, self._transfer = owner, next(self._transfers)
        self._deadline_s = now_s + STATE_TIMEOUT_S
        return [SendHost(self._membership[owner].host, SendState(owner, self._transfer, whole=False))]

    def on_state_sent(self, host: HostName, message: StateSent) -> list[JobAction]:
        """The rank that was asked has handed the state over, or cannot."""
        if message.rank != self._state_from or message.transfer != self._transfer:
            return []
        if message.error:
            self._fail(f"the final state could not be sent: {message.error}", host, message.rank)
            return []
        return [ReceiveState(host, message.rank, message.transfer, message.size_bytes)]

    def on_state_stored(self, path: str, error: str) -> None:
        """The state lies on our disk, or cannot."""
        if error:
            self._fail(f"the final state could not be stored: {error}", "", -1)
        else:
            self._is_state_settled, self._state_path = True, path

    def judge_save(self, failure: str) -> None:
        """``failure`` says why the last checkpoint is not there: who asked for one must hear of it."""
        if failure:
            self._ending.fail(Failure(end.KIND_STATE, "", -1, failure, "", 1, 0), failure)

    def lose(self, ranks: tuple[RankId, ...]) -> None:
        """Another rank is asked for the state if one of these was."""
        if self._state_from in ranks:
            self._state_from = None

    def _fail(self, error: str, host: HostName, rank: RankId) -> None:
        self._is_state_settled = True
        self._ending.fail(Failure(end.KIND_STATE, host, rank, error, "", 1, 0), error)

    # ------------------------------------------------------------------------------------------------------- ending
    def dismiss(self, now_s: float) -> list[JobAction]:
        """The work is done: every rank may end, the head goes on behind ``join()``."""
        self._deadline_s = now_s + self._stop_grace_s + KILL_MARGIN_S
        reason = self._reason()
        live = self._membership.live
        finish: list[JobAction] = [SendHost(self._membership[r].host, FinishRank(r, reason)) for r in live]
        return finish + self._tell_head()

    def stop_all(self, hosts: Iterable[HostName], now_s: float, grace_s: float) -> list[JobAction]:
        """Everything ends within ``grace_s``, the head included."""
        actions = self._stop_hosts(hosts, now_s, grace_s) + self._tell_head()
        return actions + ([StopHead(grace_s)] if self.head_code is None else [])

    def release_hosts(self, hosts: Iterable[HostName], now_s: float) -> list[JobAction]:
        """Tell the hosts, once, when no rank is left on them or the ranks take too long."""
        if self._are_hosts_told or (self._membership.live and not self.is_late(now_s)):
            return []
        return self._stop_hosts(hosts, now_s, self._stop_grace_s)

    def await_head(self) -> list[JobAction]:
        """No host is left: what the head does now takes as long as it takes, if it does anything."""
        self._deadline_s = None
        return self.watch_head() if self._ending.is_decided else []

    def watch_head(self) -> list[JobAction]:
        """Somebody waits for the end: do not wait for a head that stands still."""
        if self._is_head_watched or self.head_code is not None:
            return []
        self._is_head_watched = True
        return [WatchHead(self._stop_grace_s)]

    def _stop_hosts(self, hosts: Iterable[HostName], now_s: float, grace_s: float) -> list[JobAction]:
        self._are_hosts_told = True
        self._deadline_s = now_s + grace_s + KILL_MARGIN_S
        return [SendHost(host, StopHost(self._reason(), grace_s)) for host in hosts]

    def _tell_head(self) -> list[JobAction]:
        if self.is_head_told or not self._has_head:
            return []
        self.is_head_told = True
        ending = self._ending
        return [SendHead(RunEnded(ending.status, ending.message, self._state_path, self.epochs, ending.exit_code))]

    def _reason(self) -> str:
        return self._ending.message or "training is complete"
