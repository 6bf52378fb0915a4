"""The last act: state, dismissal, the leave of hosts and head."""

from itertools import count

from flodl.core.actions import ReceiveState, SendHead, SendHost, StopHead, WatchHead
from flodl.core.ending import Ending
from flodl.core.finale import KILL_MARGIN_S, STATE_TIMEOUT_S, Finale
from flodl.core.growth import Growth
from flodl.core.liveness import Liveness, LivenessSettings
from flodl.core.membership import Membership
from flodl.core.training import Training
from flodl.messages import (
    CadenceSettings,
    Device,
    FinishRank,
    Layout,
    Mode,
    RunEnded,
    SendState,
    Settings,
    StateSent,
    StopHost,
)

NOW_S = 50.0
GRACE_S = 30.0


class Stage:
    """Two live ranks on one host whose training is over."""

    def __init__(self, has_head: bool = True) -> None:
        self.membership, self.ending = Membership(), Ending()
        for _ in range(2):
            self.membership.mark_ready(self.membership.spawn("a", Device("cpu", 0)).rank)
        self.membership.admit((0, 1))
        settings = Settings(10, 2, 1, 0, CadenceSettings(Mode.CPU_SYNC))
        growth = Growth(self.membership, Liveness(LivenessSettings()), count(7))
        self.training = Training(settings, Layout(1, 0, 0), False, self.membership, 300.0, NOW_S, count(7), growth)
        self.finale = Finale(self.ending, self.membership, has_head, GRACE_S, count(7))
        self.finale.begin()

    def is_collecting(self, now_s: float = NOW_S) -> bool:
        return self.finale.is_collecting(self.training, now_s)


def test_owner_is_asked_for_the_state_once() -> None:
    stage = Stage()
    assert stage.is_collecting()
    assert stage.finale.collect(stage.training, NOW_S) == [SendHost("a", SendState(0, 7, False))]
    assert stage.finale.collect(stage.training, NOW_S) == []
    assert stage.finale.on_state_sent("a", StateSent(0, 7, 99, "")) == [ReceiveState("a", 0, 7, 99)]
    assert stage.is_collecting()
    stage.finale.on_state_stored("/state", "")
    assert not stage.is_collecting()


def test_state_of_a_rank_that_was_not_asked_is_not_received() -> None:
    stage = Stage()
    assert stage.finale.on_state_sent("a", StateSent(0, 7, 99, "")) == []
    stage.finale.collect(stage.training, NOW_S)
    assert stage.finale.on_state_sent("a", StateSent(1, 7, 99, "")) == []


def test_another_rank_is_asked_when_the_first_is_lost() -> None:
    stage = Stage()
    stage.finale.collect(stage.training, NOW_S)
    stage.membership.bury(0, "killed")
    stage.finale.lose((0,))
    assert stage.finale.collect(stage.training, NOW_S) == [SendHost("a", SendState(1, 8, False))]
    stage.finale.lose((0,))
    assert stage.finale.collect(stage.training, NOW_S) == []


def test_nobody_left_means_nothing_to_wait_for_and_nobody_to_ask() -> None:
    stage = Stage()
    for rank in (0, 1):
        stage.membership.bury(rank, "killed")
    assert not stage.is_collecting()
    assert stage.finale.collect(stage.training, NOW_S) == []


def test_state_that_cannot_be_sent_or_stored_fails_the_run() -> None:
    for stage, error in ((Stage(), "could not be sent: full"), (Stage(), "could not be stored: full")):
        stage.finale.collect(stage.training, NOW_S)
        if "sent" in error:
            assert stage.finale.on_state_sent("a", StateSent(0, 7, 0, "full")) == []
        else:
            stage.finale.on_state_stored("", "full")
        assert not stage.is_collecting()
        assert (stage.ending.status, stage.ending.message) == ("failed", f"the final state {error}")
        assert stage.finale.dismiss(NOW_S)[-1] == SendHead(RunEnded("failed", f"the final state {error}", "", 0, 1))


def test_state_is_not_wanted_without_a_head_or_after_its_end() -> None:
    assert not Stage(has_head=False).is_collecting()
    stage = Stage()
    stage.finale.head_code = 137
    assert not stage.is_collecting()


def test_state_is_given_up_after_its_time() -> None:
    stage = Stage()
    assert stage.finale.next_deadline_s() is None
    stage.finale.collect(stage.training, NOW_S)
    assert stage.finale.next_deadline_s() == NOW_S + STATE_TIMEOUT_S
    assert stage.is_collecting(NOW_S + STATE_TIMEOUT_S - 0.1)
    assert not stage.is_collecting(NOW_S + STATE_TIMEOUT_S)


def test_dismissal_tells_live_ranks_and_the_head_where_the_state_lies() -> None:
    stage = Stage()
    stage.finale.on_state_stored("/state", "")
    stage.membership.bury(0, "killed")
    assert stage.finale.dismiss(NOW_S) == [
        SendHost("a", FinishRank(1, "training is complete")),
        SendHead(RunEnded("completed", "", "/state", 0)),
    ]
    assert stage.finale.is_head_told
    assert stage.finale.next_deadline_s() == NOW_S + GRACE_S + KILL_MARGIN_S


def test_hosts_are_released_once_when_no_rank_is_left() -> None:
    stage = Stage()
    stage.finale.dismiss(NOW_S)
    assert stage.finale.release_hosts(["a"], NOW_S) == []
    for rank in (0, 1):
        stage.membership.finish(rank)
    assert stage.finale.release_hosts(["a", "b"], NOW_S + 1) == [
        SendHost("a", StopHost("training is complete", GRACE_S)),
        SendHost("b", StopHost("training is complete", GRACE_S)),
    ]
    assert stage.finale.next_deadline_s() == NOW_S + 1 + GRACE_S + KILL_MARGIN_S
    assert stage.finale.release_hosts(["a", "b"], NOW_S + 2) == []
    assert stage.finale.await_head() == []
    assert stage.finale.next_deadline_s() is None
    assert not stage.finale.is_late(1e9)


def test_ranks_that_do_not_finish_in_time_are_stopped_with_their_hosts() -> None:
    stage = Stage()
    stage.finale.dismiss(NOW_S)
    late_s = NOW_S + GRACE_S + KILL_MARGIN_S
    assert stage.finale.release_hosts(["a"], late_s) == [SendHost("a", StopHost("training is complete", GRACE_S))]
    assert not stage.finale.is_late(late_s)


def test_head_that_stands_still_is_watched_once_where_somebody_waits_for_the_end() -> None:
    stage = Stage()
    stage.ending.stop(143, "stopped by fdl stop")
    assert stage.finale.await_head() == [WatchHead(GRACE_S)]
    assert stage.finale.await_head() == []
    assert Stage().finale.watch_head() == [WatchHead(GRACE_S)]
    assert Stage(has_head=False).finale.watch_head() == []


def test_stop_of_everything_ends_the_head_too_and_tells_it_once() -> None:
    stage = Stage()
    stage.ending.stop(130, "stopped by ctrl-c")
    assert stage.finale.stop_all(["a"], NOW_S, 0.0) == [
        SendHost("a", StopHost("stopped by ctrl-c", 0.0)),
        SendHead(RunEnded("stopped", "stopped by ctrl-c", "", 0, 130)),
        StopHead(0.0),
    ]
    assert stage.finale.release_hosts(["a"], NOW_S) == []
    stage.finale.head_code = 143
    assert stage.finale.stop_all([], NOW_S, 5.0) == []
    assert stage.finale.next_deadline_s() == NOW_S + 5.0 + KILL_MARGIN_S
