"""The daemon's half: processes, words, its part of a CPU-plane round, and leaving."""

import pytest

from flodl.core.actions import (
    CancelStream,
    EmptyInbox,
    HoldPort,
    HostAction,
    KillRankTree,
    Leave,
    Record,
    SendController,
    SendRank,
    ShipLogs,
    SpawnRank,
    StreamState,
    StreamSum,
    TerminateRank,
)
from flodl.core.events import (
    ControllerDropped,
    ControllerSaid,
    HostEvent,
    LogsShipped,
    PortHeld,
    RankEnded,
    RankSaid,
    Signalled,
    Stalled,
    StateLanded,
    SumReturned,
    Ticked,
)
from flodl.core.host import HostCore, HostSettings, HostState, Measured
from flodl.core.preemption import DAEMON
from flodl.errors import InvariantViolation
from flodl.ids import RankId, RoundKey
from flodl.messages import (
    Admitted,
    Beat,
    CloseRound,
    Commit,
    ContributionWritten,
    Device,
    Heard,
    HostStopped,
    KillRank,
    Layout,
    LeaveWanted,
    LoadState,
    MinReached,
    OpenRound,
    PickPort,
    PlainGroup,
    PortPicked,
    RankAlive,
    RankBeat,
    RankError,
    RankExited,
    RankFinished,
    RankHello,
    RankSignalled,
    RankSpec,
    ReduceSlice,
    ResultReady,
    SliceReduced,
    SpawnRanks,
    StateLoaded,
    StateSent,
    StopHost,
    StopRanks,
    StopWanted,
    ToDaemon,
)

KEY = RoundKey(1, 4, 1)
STALE = RoundKey(1, 4, 2)
LAYOUT = Layout(8, 0, 0)
SPECS = tuple(RankSpec(rank, slot, Device("cpu", slot)) for slot, rank in enumerate((4, 5)))


class Host:
    """A HostCore at 100 s with ranks 4 and 5; beats are left out of what it answers."""

    def __init__(self, ranks: bool = True, is_walk_in: bool = False) -> None:
        settings = HostSettings("a", 1.0, on_disconnect_s=120.0, stop_grace_s=30.0, is_walk_in=is_walk_in)
        self.core = HostCore(settings, 100.0)
        self.core.handle(Ticked(), 100.0)
        if ranks:
            self.hear(SpawnRanks(6, SPECS))

    def post(self, event: HostEvent, now_s: float = 100.5) -> list[HostAction]:
        actions = self.core.handle(event, now_s)
        self.core.check()
        return [a for a in actions if not (isinstance(a, SendController) and isinstance(a.message, Beat))]

    def hear(self, message: ToDaemon, now_s: float = 100.5) -> list[HostAction]:
        return self.post(ControllerSaid(message), now_s)

    def open(self, ranks: tuple[RankId, ...] = (4, 5), hosts: int = 1) -> list[HostAction]:
        return self.hear(OpenRound(KEY, ranks, LAYOUT, hosts))

    def load(self, rank: RankId, transfer: int = 7) -> list[HostAction]:
        return self.hear(LoadState(rank, transfer))

    def loaded(self, rank: RankId, transfer: int = 7) -> list[HostAction]:
        return self.post(RankSaid(rank, StateLoaded(rank, transfer, "")))

    def write(self, rank: RankId, key: RoundKey = KEY) -> list[HostAction]:
        return self.post(RankSaid(rank, ContributionWritten(rank, key)))

    def reduce(self, rank: RankId, key: RoundKey = KEY) -> list[HostAction]:
        return self.post(RankSaid(rank, SliceReduced(rank, key)))


SLICES: list[HostAction] = [
    SendRank(4, ReduceSlice(4, KEY, 0, 2, (0, 1))), SendRank(5, ReduceSlice(5, KEY, 1, 2, (0, 1))),
]  # fmt: skip
READY: list[HostAction] = [SendRank(4, ResultReady(4, KEY)), SendRank(5, ResultReady(5, KEY))]


# --------------------------------------------------------------------------------------------------------------- words
def test_ranks_are_spawned_as_told() -> None:
    host = Host(ranks=False)
    assert host.hear(SpawnRanks(6, SPECS)) == [SpawnRank(SPECS[0], 6, 2), SpawnRank(SPECS[1], 6, 2)]
    assert host.core.snapshot() == {"host": "a", "state": "serving", "ranks": {4: 0, 5: 0}, "running": (4, 5)}


def test_words_for_a_rank_pass_through_and_for_a_stranger_go_nowhere() -> None:
    host = Host()
    assert host.hear(Admitted(5, 6, (4, 5))) == [SendRank(5, Admitted(5, 6, (4, 5)))]
    assert host.hear(Admitted(9, 6, (4, 5))) == []
    assert host.hear(Commit(5, KEY)) == [SendRank(5, Commit(5, KEY))]
    assert host.hear(Commit(9, KEY)) == []
    assert host.hear(Heard()) == []


def test_words_of_a_rank_pass_through() -> None:
    host = Host()
    for word in (MinReached(5, 3), RankError(4, "boom", ""), RankFinished(5), StateSent(4, 1, 0, "disk full")):
        assert host.post(RankSaid(word.rank, word)) == [SendController(word)]
    assert host.post(RankSaid(4, RankHello(4, 77))) == []


@pytest.mark.parametrize(("connection", "claimed"), [(4, 5), (9, 9)])
def test_rank_that_speaks_for_another_is_not_heard(connection: RankId, claimed: RankId) -> None:
    (note,) = Host().post(RankSaid(connection, RankFinished(claimed)))
    assert isinstance(note, Record)
    assert note.event == "stray"


def test_state_is_streamed_behind_its_announcement() -> None:
    said = StateSent(4, 7, 99, "")
    assert Host().post(RankSaid(4, said)) == [SendController(said), StreamState(4, 7, 99)]


def test_beat_tells_what_is_known_of_each_running_rank() -> None:
    host = Host()
    host.post(RankSaid(4, RankAlive(4, 17)), 100.6)
    host.post(RankEnded(5, 0, 9), 100.7)
    host.core.update_processes({4: Measured(77, 1 << 20, True), 9: Measured(5, 5)})
    assert host.core.next_deadline_s() == 101.0
    beat = RankBeat(4, True, 500, 17, 1 << 20, 77, True)
    assert host.core.handle(Ticked(), 101.1) == [SendController(Beat("a", (beat,)))]
    assert host.core.next_deadline_s() == 102.1


def test_rank_that_has_not_spoken_is_beaten_for_as_such() -> None:
    host = Host()
    (beat,) = host.core.handle(Ticked(), 101.0)
    assert beat == SendController(Beat("a", (RankBeat(4, False, 500, 0, 0), RankBeat(5, False, 500, 0, 0))))


# ---------------------------------------------------------------------------------------------------------------- ends
@pytest.mark.parametrize(("before", "by_us"), [("", False), ("finished", True), ("killed", True)])
def test_end_of_a_rank_is_reported_with_whether_it_was_expected(before: str, by_us: bool) -> None:
    host = Host()
    if before == "finished":
        host.post(RankSaid(4, RankFinished(4)))
    if before == "killed":
        assert host.hear(KillRank(4, "silent")) == [KillRankTree(4)]
    assert host.post(RankEnded(4, 3, 0)) == [SendController(RankExited(4, 3, 0, by_us))]
    assert host.post(RankEnded(4, 3, 0)) == []
    assert host.hear(KillRank(4, "silent")) == []


def test_end_or_kill_of_a_stranger_is_nothing() -> None:
    host = Host()
    assert host.post(RankEnded(9, 0, 0)) == []
    assert host.hear(KillRank(9, "silent")) == []


# ---------------------------------------------------------------------------------------------------------- plain runs
def test_ranks_of_a_plain_run_are_stopped_and_the_host_stays() -> None:
    host = Host()
    assert host.hear(StopRanks("rank 0 failed", 5.0)) == [TerminateRank(4), TerminateRank(5)]
    assert host.hear(StopRanks("rank 0 failed", 5.0)) == []
    assert host.post(RankEnded(4, 0, 15)) == [SendController(RankExited(4, 0, 15, by_us=True))]
    assert host.post(Ticked(), 105.4) == []
    assert host.post(Ticked(), 105.5) == [KillRankTree(5)]
    assert host.core.state is HostState.SERVING


def test_ranks_that_are_started_again_are_not_killed_for_those_before() -> None:
    host = Host()
    group = PlainGroup("127.0.0.1", 29400, 0, 1, 1, 3, ())
    host.hear(StopRanks("rank 0 failed", 5.0))
    host.post(RankEnded(4, 0, 15))
    host.post(RankEnded(5, 1, 0))
    assert host.hear(SpawnRanks(2, SPECS, group)) == [SpawnRank(spec, 2, 2, group) for spec in SPECS]
    assert host.post(Ticked(), 106.0) == []
    assert host.post(RankEnded(4, 1, 0), 106.0) == [SendController(RankExited(4, 1, 0, by_us=False))]


def test_host_that_stops_while_its_ranks_are_stopped_gives_them_no_more_time() -> None:
    host = Host()
    host.hear(StopRanks("rank 0 failed", 5.0))
    assert host.hear(StopHost("the end", 30.0)) == []
    assert host.hear(StopRanks("rank 0 failed", 1.0)) == []
    assert host.post(Ticked(), 105.5) == [KillRankTree(4), KillRankTree(5)]


def test_port_is_held_on_demand_and_told() -> None:
    host = Host(ranks=False)
    assert host.hear(PickPort(2, "10.0.0.2")) == [HoldPort(2, "10.0.0.2")]
    assert host.post(PortHeld(2, 29400, "10.0.0.1", True, "")) == [
        SendController(PortPicked("a", 2, 29400, "10.0.0.1", True, ""))
    ]


# -------------------------------------------------------------------------------------------------------------- states
def test_rank_is_told_to_load_once_the_state_has_landed_whichever_comes_first() -> None:
    host = Host()
    assert host.load(4) == []
    assert host.post(StateLanded(7)) == [SendRank(4, LoadState(4, 7))]
    assert host.load(5) == [SendRank(5, LoadState(5, 7))]
    assert host.post(StateLanded(7)) == []


def test_rank_waits_for_the_very_state_that_it_is_to_load() -> None:
    host = Host()
    host.load(4)
    assert host.post(StateLanded(6)) == []
    assert host.post(StateLanded(7)) == [SendRank(4, LoadState(4, 7))]


def test_later_word_to_load_takes_the_place_of_one_that_waits() -> None:
    host = Host()
    host.load(4)
    host.load(4, 8)
    assert host.post(StateLanded(7)) == []
    assert host.post(StateLanded(8)) == [SendRank(4, LoadState(4, 8))]


def test_rank_that_is_gone_or_a_stranger_waits_for_no_state() -> None:
    host = Host()
    host.load(4)
    host.post(RankEnded(4, 0, 9))
    host.load(4)
    host.load(9)
    assert host.post(StateLanded(7)) == []


def test_state_that_the_host_cannot_hold_is_what_its_ranks_could_not_load() -> None:
    host = Host()
    host.load(4)
    assert host.post(StateLanded(7, "too large")) == [SendController(StateLoaded(4, 7, "too large"))]
    assert host.load(5) == [SendController(StateLoaded(5, 7, "too large"))]


def test_inbox_is_emptied_when_every_rank_that_runs_has_loaded_what_lies_in_it() -> None:
    host = Host()
    assert host.loaded(4) == [SendController(StateLoaded(4, 7, ""))]
    host.post(StateLanded(7))
    assert host.loaded(5, 6) == [SendController(StateLoaded(5, 6, ""))]
    assert host.loaded(5) == [SendController(StateLoaded(5, 7, "")), EmptyInbox(7)]
    assert host.loaded(5) == [SendController(StateLoaded(5, 7, ""))]


def test_inbox_is_not_kept_for_a_rank_that_came_before() -> None:
    host = Host()
    host.post(StateLanded(7))
    assert host.loaded(4) == [SendController(StateLoaded(4, 7, ""))]
    host.hear(Admitted(4, 6, (0, 4)))
    host.post(StateLanded(8))
    assert host.loaded(5, 8) == [SendController(StateLoaded(5, 8, "")), EmptyInbox(8)]


def test_inbox_is_not_kept_for_a_rank_that_is_gone() -> None:
    host = Host()
    host.post(StateLanded(7))
    host.loaded(4)
    assert host.post(RankEnded(5, 0, 9)) == [SendController(RankExited(5, 0, 9, by_us=False)), EmptyInbox(7)]


# ----------------------------------------------------------------------------------------------------------- CPU plane
def test_round_within_one_host_is_reduced_in_slices_and_announced() -> None:
    host = Host()
    assert host.open() == []
    assert host.write(5) == []
    assert host.write(4) == SLICES
    assert host.write(4) == []
    assert host.reduce(4) == []
    assert host.reduce(5) == READY


def test_sum_of_several_hosts_is_streamed_and_announced_when_it_returns() -> None:
    host = Host()
    host.open(hosts=2)
    host.write(4)
    host.write(5)
    host.reduce(4)
    assert host.reduce(5) == [StreamSum(KEY, LAYOUT)]
    assert host.post(SumReturned(STALE)) == []
    assert host.post(SumReturned(KEY)) == READY


def test_sum_is_streamed_in_the_form_that_the_round_asks_for() -> None:
    host = Host()
    host.hear(OpenRound(KEY, (4, 5), LAYOUT, 2, bf16=True))
    host.write(4)
    host.write(5)
    host.reduce(4)
    assert host.reduce(5) == [StreamSum(KEY, LAYOUT, bf16=True)]


def test_words_of_another_round_or_of_nobody_in_it_change_nothing() -> None:
    host = Host()
    assert host.write(4) == []
    assert host.post(SumReturned(KEY)) == []
    host.open(ranks=(4,))
    assert host.write(4, STALE) == []
    assert host.write(5) == []
    assert host.reduce(5) == []
    assert host.reduce(4, STALE) == []


def test_closed_round_is_cancelled_and_its_late_words_are_nothing() -> None:
    host = Host()
    host.open()
    assert host.hear(CloseRound(STALE)) == []
    assert host.hear(CloseRound(KEY)) == [CancelStream(KEY)]
    assert host.hear(CloseRound(KEY)) == []
    assert host.write(4) == []


def test_next_round_replaces_the_one_before() -> None:
    host = Host()
    host.open()
    assert host.hear(OpenRound(STALE, (4,), LAYOUT, 1)) == [CancelStream(KEY)]
    assert host.write(4) == []


def test_rank_outside_the_round_is_killed_before_the_shared_memory_is_read() -> None:
    host = Host()
    host.hear(Admitted(5, 6, (4, 5)))
    host.open(ranks=(4,))
    assert host.write(4) == [KillRankTree(5)]
    assert host.post(RankEnded(5, 0, 9)) == [
        SendController(RankExited(5, 0, 9, by_us=True)),
        SendRank(4, ReduceSlice(4, KEY, 0, 1, (0,))),
    ]


def test_newcomer_that_still_builds_its_model_is_no_danger_to_the_shared_memory() -> None:
    host = Host()
    host.hear(Admitted(4, 6, (0, 4)))
    host.open(ranks=(4,))
    assert host.write(4) == [SendRank(4, ReduceSlice(4, KEY, 0, 1, (0,)))]


@pytest.mark.parametrize("word", [RankFinished(5), RankError(5, "boom", "")])
def test_rank_that_is_leaving_by_itself_is_not_killed_for_a_round(word: RankFinished | RankError) -> None:
    host = Host()
    host.hear(Admitted(5, 6, (4, 5)))
    host.post(RankSaid(5, word))
    host.open(ranks=(4,))
    assert host.write(4) == [SendRank(4, ReduceSlice(4, KEY, 0, 1, (0,)))]


# ------------------------------------------------------------------------------------------------------------- leaving
def test_signal_of_somebody_else_is_the_wish_to_stop_and_ours_ends_the_rank() -> None:
    host = Host()
    assert host.post(RankSaid(4, RankSignalled(4, 15))) == [SendController(StopWanted("a", 4, 15))]
    assert host.post(Signalled(10)) == [SendController(StopWanted("a", DAEMON, 10))]
    host.hear(StopHost("enough", 30.0))
    assert host.post(RankSaid(4, RankSignalled(4, 15))) == [KillRankTree(4)]


def test_walk_in_that_is_told_to_go_asks_to_leave_and_its_ranks_still_speak_for_the_run() -> None:
    host = Host(is_walk_in=True)
    assert host.post(Signalled(15)) == [SendController(LeaveWanted("a", "SIGTERM to its daemon"))]
    assert host.post(Signalled(10)) == [SendController(LeaveWanted("a", "SIGUSR1 to its daemon"))]
    assert host.post(RankSaid(4, RankSignalled(4, 15))) == [SendController(StopWanted("a", 4, 15))]


def test_stop_terminates_then_kills_then_ships_logs_then_leaves() -> None:
    host = Host()
    assert host.hear(StopHost("done", 10.0), 110.0) == [TerminateRank(4), TerminateRank(5)]
    assert host.post(RankEnded(4, 0, 15), 111.0) == [SendController(RankExited(4, 0, 15, by_us=True))]
    assert host.core.next_deadline_s() is not None
    assert host.post(Ticked(), 119.9) == []
    assert host.post(Ticked(), 120.0) == [KillRankTree(5)]
    assert host.post(Ticked(), 121.0) == []
    assert host.post(RankEnded(5, 0, 9), 121.0) == [SendController(RankExited(5, 0, 9, by_us=True)), ShipLogs()]
    assert host.core.state is HostState.SHIPPING
    assert host.post(LogsShipped(), 122.0) == [SendController(HostStopped("a", "done")), Leave("done", 0)]
    assert host.post(Ticked(), 123.0) == []
    assert host.core.next_deadline_s() is None


def test_harder_stop_shortens_the_grace_and_a_softer_one_does_not() -> None:
    host = Host()
    host.hear(StopHost("stop", 30.0), 110.0)
    assert host.hear(StopHost("abort", 0.0), 111.0) == [KillRankTree(4), KillRankTree(5)]
    assert host.hear(StopHost("again", 0.0), 112.0) == []
    host = Host()
    host.hear(StopHost("stop", 5.0), 110.0)
    host.hear(StopHost("stop", 60.0), 111.0)
    assert host.post(Ticked(), 115.0) == [KillRankTree(4), KillRankTree(5)]


def test_rank_that_is_leaving_by_itself_is_not_terminated_but_killed_when_late() -> None:
    host = Host()
    host.post(RankSaid(4, RankFinished(4)))
    host.post(RankSaid(5, RankError(5, "boom", "")))
    assert host.hear(StopHost("done", 10.0), 110.0) == []
    assert host.post(Ticked(), 120.0) == [KillRankTree(4), KillRankTree(5)]


def test_stop_cancels_the_open_round() -> None:
    host = Host()
    host.open()
    assert host.hear(StopHost("done", 10.0))[0] == CancelStream(KEY)


def test_host_without_ranks_ships_its_logs_at_once() -> None:
    host = Host(ranks=False)
    assert host.post(LogsShipped()) == []
    assert host.hear(StopHost("refused", 0.0)) == [ShipLogs()]


def test_nothing_is_spawned_once_the_host_is_stopping() -> None:
    host = Host()
    host.hear(StopHost("done", 10.0))
    assert host.hear(SpawnRanks(6, SPECS)) == []


def test_lost_controller_stops_the_ranks_once_with_an_error() -> None:
    host = Host()
    note, *stops = host.post(ControllerDropped("reset"), 110.0)
    assert isinstance(note, Record)
    assert note.detail == "the controller is gone (reset): stopping this host's ranks"
    assert stops == [TerminateRank(4), TerminateRank(5)]
    assert host.post(ControllerDropped("reset"), 111.0) == []
    assert host.post(Ticked(), 140.0) == [KillRankTree(4), KillRankTree(5)]
    host.post(RankEnded(4, 0, 9), 140.0)
    host.post(RankEnded(5, 0, 9), 140.0)
    assert host.post(LogsShipped(), 141.0)[-1] == Leave("the controller is gone (reset)", 1)


def test_silent_controller_is_gone_after_its_limit() -> None:
    host = Host()
    host.hear(Heard(), 200.0)
    assert host.post(Ticked(), 319.9) == []
    note, *_ = host.post(Ticked(), 320.0)
    assert isinstance(note, Record)
    assert "has been silent for 120 s" in note.detail


def test_time_in_which_the_daemon_did_not_run_is_not_the_controllers_silence() -> None:
    host = Host()
    assert host.post(Stalled(300.0), 500.0) == []
    assert host.core.state is HostState.SERVING


def test_next_wake_is_the_earliest_of_beat_kill_and_silence() -> None:
    core = HostCore(HostSettings("a", heartbeat_s=1000.0, on_disconnect_s=120.0, stop_grace_s=30.0), 100.0)
    core.handle(Ticked(), 100.0)
    assert core.next_deadline_s() == 220.0
    core.handle(ControllerSaid(SpawnRanks(1, SPECS)), 110.0)
    assert core.next_deadline_s() == 230.0
    core.handle(ControllerSaid(StopHost("done", 10.0)), 120.0)
    assert core.next_deadline_s() == 130.0


def test_host_that_would_leave_with_ranks_running_is_a_bug() -> None:
    host = Host()
    host.core.state = HostState.SHIPPING
    with pytest.raises(InvariantViolation, match=r"host a is shipping with ranks \(4, 5\) running"):
        host.core.check()


def test_state_that_waits_for_a_rank_that_has_ended_is_a_bug() -> None:
    host = Host()
    host.load(4)
    host.core._ranks[4].is_running = False
    with pytest.raises(InvariantViolation, match=r"host a: a state waits for ranks \(4,\), which have ended"):
        host.core.check()
