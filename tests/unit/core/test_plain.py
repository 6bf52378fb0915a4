"""A plain run from the join window to its outcome: starts, failures, restarts, lost hosts, stops and exit codes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flodl.core.actions import DropHost, EndRun, JobAction, Outcome, Record, RestoreHost, SendHost, Severity
from flodl.core.ending import KIND_EXIT, KIND_HOST, KIND_SIGNAL
from flodl.core.events import (
    DrainAsked,
    HeadExited,
    HostDropped,
    HostFailed,
    HostSaid,
    JobEvent,
    Stalled,
    StartAsked,
    StopAsked,
    Ticked,
)
from flodl.core.liveness import LivenessSettings
from flodl.core.plain import NO_DRAIN, PlainCore, PlainPhase, PlainSettings
from flodl.core.restarts import MAX_PORT_TRIES
from flodl.core.window import JoinSettings, StartRule
from flodl.errors import InvariantViolation
from flodl.messages import (
    Beat,
    Device,
    FromDaemon,
    Heard,
    HostHello,
    HostStopped,
    LeaveWanted,
    LogChunk,
    PickPort,
    PortPicked,
    RankBeat,
    RankExited,
    RankFinished,
    SpawnRanks,
    StopHost,
    StopRanks,
    StopWanted,
)
from tests.unit.core.cohort import hello

GRACE_S = 5.0
JOIN_S = 600.0


class Plain:
    """PlainCore with hosts a (rank 0) and b (ranks 1 and 2) that do what they are told; ``held`` orders wait."""

    def __init__(
        self, max_restarts: int = 0, hosts: dict[str, int] | None = None, min_rank_start: int = 0, **window: Any
    ) -> None:
        self.devices = {"a": 1, "b": 2} if hosts is None else hosts
        join = JoinSettings(tuple(self.devices), min_rank_start, max_join_timeout_s=JOIN_S, **window)
        self.core = PlainCore(PlainSettings(join, LivenessSettings(), max_restarts, GRACE_S), 0.0)
        self.now_s = 1.0
        self.held: set[type] = set()
        self.is_taken = False
        self.error = ""
        self.address = ""
        self.actions: list[JobAction] = []
        self.outcome: Outcome | None = None

    # --------------------------------------------------------------------------------------------------------- driving
    def post(self, event: JobEvent) -> list[JobAction]:
        """One event and all that follows from the answers."""
        seen = len(self.actions)
        inbox = [event]
        while inbox:
            actions = self.core.handle(inbox.pop(0), self.now_s)
            self.core.check()
            self.core.next_deadline_s()
            self.actions += actions
            for action in actions:
                inbox += self._answer(action)
        return self.actions[seen:]

    def say(self, message: FromDaemon, host: str = "") -> list[JobAction]:
        return self.post(HostSaid(host or self.core.membership[message.rank].host, message))  # type: ignore[union-attr]

    def exit(self, rank: int, code: int = 0, signal: int = 0, by_us: bool = False) -> list[JobAction]:
        return self.say(RankExited(rank, code, signal, by_us))

    def tick(self, now_s: float) -> list[JobAction]:
        self.now_s = now_s
        return self.post(Ticked())

    def run(self, *held: type) -> "Plain":
        """All hosts have come, and the ranks run unless orders are ``held``."""
        self.held |= set(held)
        for host, count in self.devices.items():
            self.say(hello(host, count), host)
        return self

    def stop(self, abort: bool = False) -> list[JobAction]:
        return self.post(StopAsked("test", abort, 130))

    def _answer(self, action: JobAction) -> Sequence[JobEvent]:
        if isinstance(action, EndRun):
            self.outcome = action.outcome
        if not isinstance(action, SendHost) or type(action.message) in self.held:
            return ()
        host = action.host
        match action.message:
            case PickPort(start, _):
                port = 0 if self.error else 29000 + start
                return (HostSaid(host, PortPicked(host, start, port, self.address, self.is_taken, self.error)),)
            case StopRanks():
                return self._ends(host)
            case StopHost(reason):
                return (*self._ends(host), HostSaid(host, HostStopped(host, reason)))
        return ()

    def _ends(self, host: str) -> tuple[HostSaid, ...]:
        live = self.core.membership.on_host(host, self.core.membership.live)
        return tuple(HostSaid(host, RankExited(rank, 0, 15, by_us=True)) for rank in live)

    # --------------------------------------------------------------------------------------------------------- reading
    def sent(self, kind: type) -> list[Any]:
        return [a.message for a in self.actions if isinstance(a, SendHost) and isinstance(a.message, kind)]

    def records(self, event: str) -> list[str]:
        return [action.detail for action in self.actions if isinstance(action, Record) and action.event == event]

    @property
    def restarts(self) -> list[int]:
        """The restart count of every start, as rank 0 was told it."""
        return [order.plain.restart for order in self.sent(SpawnRanks) if order.ranks[0].rank == 0]

    @property
    def ended(self) -> tuple[str, int]:
        assert self.outcome is not None, self.core.phase
        return self.outcome.status, self.outcome.exit_code


# -------------------------------------------------------------------------------------------------------- start to end
def test_run_goes_through_its_phases_and_ends_once() -> None:
    run = Plain()
    assert run.core.phase is PlainPhase.WAITING
    run.run(PickPort)
    assert run.core.phase is PlainPhase.STARTING
    assert run.sent(PickPort) == [PickPort(1, "")]
    run.say(PortPicked("a", 1, 29001, "", False, ""), "a")
    assert run.core.phase is PlainPhase.RUNNING
    assert run.records("spawning") == ["starting 3 ranks on 2 hosts"]
    assert [order.plain.master_port for order in run.sent(SpawnRanks)] == [29001, 29001]
    run.exit(0)
    run.exit(2)
    assert run.core.phase is PlainPhase.RUNNING
    run.exit(1)
    assert run.core.phase is PlainPhase.ENDED
    assert run.ended == ("completed", 0)
    assert run.core.next_deadline_s() is None
    assert run.post(Ticked()) == []


def test_ranks_of_one_host_meet_on_loopback() -> None:
    run = Plain(hosts={"a": 2}).run()
    (order,) = run.sent(SpawnRanks)
    assert (order.world_size, order.plain.master_addr, order.plain.group_world_size) == (2, "127.0.0.1", 1)


def test_rank_0_says_where_it_is_reached_when_only_its_host_knows() -> None:
    run = Plain()
    run.address = "10.0.0.9"
    run.say(HostHello("a", 7, "a", "127.0.0.1", (Device("cpu", 0),), 4, "3.11", "2.13", "0.1"), "a")
    run.say(hello("b", 2), "b")
    assert run.sent(PickPort) == [PickPort(1, "10.0.0.1")]
    assert {order.plain.master_addr for order in run.sent(SpawnRanks)} == {"10.0.0.9"}


def test_run_without_a_port_for_its_ranks_fails() -> None:
    run = Plain()
    run.error = "no address"
    run.run()
    assert run.ended == ("failed", 3)
    assert run.outcome is not None
    assert run.outcome.message == "host a: no port for the ranks to meet at: no address"


def test_beats_are_answered_and_kept() -> None:
    run = Plain().run()
    beat = Beat("b", (RankBeat(1, False, 3, 0, 77), RankBeat(0, False, 3, 0, 77), RankBeat(9, False, 3, 0, 77)))
    assert run.say(beat, "b") == [SendHost("b", Heard())]
    assert run.core.beats == {1: beat.ranks[0]}


def test_rank_that_a_signal_has_stopped_is_told_of_once_each_time() -> None:
    run = Plain().run()
    for is_frozen in (False, True, True, False, True):
        run.say(Beat("b", (RankBeat(1, False, 3, 0, 9, 77, is_frozen), RankBeat(2, False, 3, 0, 9, 78))), "b")
    told = "rank 1 is stopped by a signal; on its host, kill -CONT 77 lets it go on"
    assert run.records("rank_frozen") == [told, told]


def test_words_of_an_engine_and_of_a_head_mean_nothing() -> None:
    run = Plain().run()
    for event in (
        HostSaid("a", RankFinished(0)),
        HostSaid("a", LogChunk(0, "stdout", 0, b"x")),
        HeadExited(1, 0),
        DrainAsked("a", "test"),
        HostSaid("b", RankExited(0, 1, 0, False)),
        HostSaid("b", RankExited(9, 1, 0, False)),
        HostSaid("a", PortPicked("a", 1, 5, "", False, "")),
        HostDropped("x", "reset"),
    ):
        assert run.post(event) == []
    assert run.core.phase is PlainPhase.RUNNING


def test_rank_that_has_ended_ends_no_more() -> None:
    run = Plain().run()
    run.exit(0)
    assert run.exit(0, code=3) == []


# ------------------------------------------------------------------------------------------------------------ admission
def test_hosts_come_while_the_window_is_open_and_none_afterwards() -> None:
    run = Plain()
    assert run.core.refusal("a") == ""
    assert run.core.refusal("x") == ""
    assert "not in this run's roster" in Plain(is_elastic=False).core.refusal("x")
    run.run()
    assert run.core.refusal("c") == "a plain run keeps the ranks that it has started with"
    assert run.core.refusal("a") == "a plain run keeps the ranks that it has started with"
    assert not run.core.may_come_later("c")
    assert run.core.drain_refusal("a") == NO_DRAIN
    assert DropHost("c", run.core.refusal("c")) in run.say(hello("c"), "c")
    run.held.add(StopHost)
    run.stop()
    assert run.core.refusal("a") == "the run is ending"


def test_hosts_that_cannot_reach_each_other_are_not_started() -> None:
    run = Plain()
    run.say(hello("a"), "a")
    run.say(replace(hello("b", 2), tunnelled=True), "b")
    assert run.ended == ("failed", 2)
    assert run.outcome is not None
    assert "the tunnel of b leads to the controller only" in run.outcome.message
    assert run.sent(SpawnRanks) == []


def test_host_alone_may_come_through_a_tunnel() -> None:
    run = Plain(hosts={"a": 2})
    run.say(replace(hello("a", 2), tunnelled=True), "a")
    assert run.core.phase is PlainPhase.RUNNING


def test_held_window_of_a_plain_run_starts_when_a_person_says_so_with_the_walk_ins() -> None:
    run = Plain(start=StartRule.MANUAL)
    assert run.core.start_refusal().startswith("too few ranks: 0 of 2 hosts are there")
    for host, ranks in {"a": 1, "b": 2, "x": 1}.items():
        run.say(hello(host, ranks), host)
    assert run.records("window_held") == ["2 of 2 hosts are there; fdl start starts the run"]
    assert run.core.phase is PlainPhase.WAITING
    run.post(StartAsked("fdl start"))
    assert run.core.phase is PlainPhase.RUNNING
    assert len(run.core.membership) == 4
    assert run.core.start_refusal() == "the run is running: it does not wait to be started"


def test_plain_run_that_starts_without_some_of_the_roster_names_them() -> None:
    run = Plain(min_rank_start=1)
    run.say(hello("a"), "a")
    run.post(HostFailed("b", "auth", "permission denied", ""))
    assert run.records("degraded_start") == ["starting with 1 rank, without b (auth)"]


def test_host_with_devices_of_two_kinds_is_refused() -> None:
    run = Plain(hosts={"a": 2})
    mixed = HostHello("a", 7, "a", "10.0.0.1", (Device("cpu", 0), Device("cuda", 0, "G")), 4, "3.11", "2.13", "0.1")
    run.say(mixed, "a")
    assert "offers cpu and cuda devices" in run.records("join_refused")[0]
    assert run.ended == ("failed", 5)


def test_run_whose_hosts_do_not_come_fails_with_their_reasons() -> None:
    run = Plain()
    run.say(hello("a"), "a")
    run.post(HostFailed("b", "connect", "no route", "mend it"))
    assert run.ended == ("failed", 4)
    assert run.outcome is not None
    assert "host b: connect: no route" in run.outcome.message


def test_host_that_leaves_before_the_start_is_waited_for_no_more() -> None:
    run = Plain()
    run.say(hello("a"), "a")
    run.post(HostDropped("a", "reset"))
    assert run.records("host_lost") == ["a: connection lost: reset"]
    run.post(HostFailed("b", "connect", "no route", ""))
    assert run.ended == ("failed", 4)


def test_run_starts_with_enough_ranks_when_the_others_are_late() -> None:
    run = Plain(min_rank_start=2)
    run.say(hello("b", 2), "b")
    assert run.core.next_deadline_s() == 11.0
    run.core.liveness.forget_host("b")
    run.tick(301.0)
    (order,) = run.sent(SpawnRanks)
    assert (order.world_size, order.plain.group_world_size) == (2, 1)


# ------------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize(
    ("code", "signal", "kind", "error", "exit_code"),
    [(7, 0, KIND_EXIT, "exited with code 7", 7), (0, 9, KIND_SIGNAL, "ended by signal 9", 137)],
)
def test_rank_that_fails_stops_the_others_and_its_code_is_the_runs(
    code: int, signal: int, kind: str, error: str, exit_code: int
) -> None:
    run = Plain().run()
    actions = run.exit(1, code, signal)
    assert actions[0] == Record("rank_failed", Severity.CRITICAL, f"rank 1: {error}", {"rank": 1, "code": exit_code})
    assert actions[1:3] == [SendHost("a", StopRanks(error, GRACE_S)), SendHost("b", StopRanks(error, GRACE_S))]
    assert run.ended == ("failed", exit_code)
    assert run.outcome is not None
    assert run.outcome.failure is not None
    assert (run.outcome.failure.kind, run.outcome.failure.rank, run.outcome.failure.host) == (kind, 1, "b")
    assert (run.outcome.message, run.outcome.collateral) == (f"rank 1: {error}", 0)


def test_failure_that_follows_is_counted_and_not_said() -> None:
    run = Plain().run(StopRanks)
    run.exit(1, code=1)
    assert run.core.phase is PlainPhase.STOPPING
    assert run.exit(0, code=3) == []
    run.exit(2, signal=15, by_us=True)
    assert run.ended == ("failed", 1)
    assert run.outcome is not None
    assert run.outcome.collateral == 1


@pytest.mark.parametrize(("signal", "root"), [(9, 2), (11, 2), (6, 1)])
def test_crash_explains_the_failure_that_was_heard_of_first_unless_it_is_an_abort(signal: int, root: int) -> None:
    run = Plain().run(StopRanks)
    run.exit(1, code=1)
    run.exit(2, signal=signal)
    run.exit(0, signal=15, by_us=True)
    assert run.outcome is not None
    assert run.outcome.failure is not None
    assert (run.outcome.failure.rank, run.outcome.collateral) == (root, 1)


def test_rank_that_ends_well_while_the_others_are_stopped_has_finished() -> None:
    run = Plain().run(StopRanks)
    run.exit(1, code=1)
    run.exit(0)
    run.exit(2, signal=15, by_us=True)
    assert [str(member.status) for member in run.core.membership.all()] == ["finished", "dead", "dead"]
    assert run.ended == ("failed", 1)


def test_ranks_that_do_not_end_keep_nobody_waiting() -> None:
    run = Plain(max_restarts=3).run(StopRanks)
    run.exit(1, code=4)
    due_s = run.core.next_deadline_s()
    assert due_s is not None
    run.core.liveness = type(run.core.liveness)(LivenessSettings())
    assert run.core.next_deadline_s() == 1.0 + GRACE_S + 10.0
    run.tick(1.0 + GRACE_S + 10.0)
    assert run.restarts == [0]
    assert run.ended == ("failed", 4)


def test_rank_that_its_daemon_stopped_by_itself_ends_the_run() -> None:
    run = Plain(max_restarts=3).run()
    run.exit(1, signal=15, by_us=True)
    assert run.restarts == [0]
    assert run.ended == ("failed", 5)
    assert run.outcome is not None
    assert "stopped by its daemon" in run.outcome.message


# ------------------------------------------------------------------------------------------------------------- restarts
def test_failure_starts_all_ranks_again_under_their_numbers() -> None:
    run = Plain(max_restarts=2).run()
    run.exit(0)
    run.now_s = 5.0
    run.exit(2, code=1)
    assert run.core.phase is PlainPhase.RUNNING
    assert run.records("restarting") == ["restart 1 of 2, after rank 2: exited with code 1"]
    assert run.restarts == [0, 1]
    first, again = run.sent(SpawnRanks)[:2], run.sent(SpawnRanks)[2:]
    assert [order.ranks for order in first] == [order.ranks for order in again]
    assert [order.plain.master_port for order in again] == [29002, 29002]
    assert [order.plain.max_restarts for order in again] == [2, 2]
    assert run.core.membership.live == (0, 1, 2)
    for rank in range(3):
        run.exit(rank)
    assert run.ended == ("completed", 0)
    assert run.outcome is not None
    assert [loss.rank for loss in run.outcome.losses] == [2]


def test_failure_behind_the_last_restart_is_the_runs() -> None:
    run = Plain(max_restarts=1).run()
    run.exit(1, code=3)
    run.exit(0, code=8)
    assert run.restarts == [0, 1]
    assert run.ended == ("failed", 8)
    assert run.outcome is not None
    assert run.outcome.message == "rank 0: exited with code 8, after 1 restart"


def test_ranks_are_not_started_before_the_last_one_has_ended() -> None:
    run = Plain(max_restarts=1).run(StopRanks)
    run.exit(1, code=3)
    run.exit(2, code=3)
    assert run.sent(PickPort) == [PickPort(1, "")]
    run.exit(0, signal=15, by_us=True)
    assert run.sent(PickPort) == [PickPort(1, ""), PickPort(2, "")]
    assert run.restarts == [0, 1]


def test_port_that_a_stranger_took_costs_no_restart() -> None:
    run = Plain().run()
    run.is_taken = True
    run.exit(0, code=1)
    assert run.core.phase is PlainPhase.RUNNING
    assert "port 29001 was taken" in run.records("port_taken")[0]
    assert run.restarts == [0, 0]
    run.is_taken = False
    run.exit(0, code=1)
    assert run.ended == ("failed", 1)


def test_ports_that_are_taken_again_and_again_end_the_run() -> None:
    run = Plain().run()
    run.is_taken = True
    for _ in range(MAX_PORT_TRIES + 1):
        assert run.core.phase is PlainPhase.RUNNING
        run.exit(0, code=1)
    assert run.ended == ("failed", 1)


def test_answer_to_an_older_question_is_not_taken_for_the_port() -> None:
    run = Plain(max_restarts=1).run(PickPort)
    assert run.say(PortPicked("a", 7, 1, "", False, ""), "a") == []
    assert run.core.phase is PlainPhase.STARTING


# ---------------------------------------------------------------------------------------------------------- lost hosts
def test_lost_host_ends_a_run_that_has_no_restarts() -> None:
    run = Plain().run()
    actions = run.post(HostDropped("b", "reset"))
    assert RestoreHost("b") not in actions
    assert run.records("host_lost") == ["b: connection lost: reset"]
    assert run.ended == ("failed", 5)
    assert run.outcome is not None
    assert run.outcome.failure is not None
    assert (run.outcome.failure.kind, run.outcome.failure.host) == (KIND_HOST, "b")


def test_run_gathers_a_lost_host_before_its_restart() -> None:
    run = Plain(max_restarts=1).run()
    assert RestoreHost("b") in run.post(HostDropped("b", "reset"))
    assert run.core.phase is PlainPhase.GATHERING
    assert run.core.refusal("b") == ""
    assert run.restarts == [0]
    run.say(hello("b", 2), "b")
    assert run.core.phase is PlainPhase.RUNNING
    assert run.restarts == [0, 1]


def test_run_gathers_the_host_of_rank_0_too() -> None:
    run = Plain(max_restarts=1).run()
    assert RestoreHost("a") in run.post(HostDropped("a", "reset"))
    assert run.core.phase is PlainPhase.GATHERING
    run.say(hello("a"), "a")
    assert run.restarts == [0, 1]


def test_host_that_comes_back_with_other_devices_is_refused() -> None:
    run = Plain(max_restarts=1).run()
    run.post(HostDropped("b", "reset"))
    run.say(hello("b", 1), "b")
    assert "offers other devices than before" in run.records("join_refused")[0]
    assert run.core.phase is PlainPhase.GATHERING


def test_host_that_does_not_come_back_ends_the_run() -> None:
    run = Plain(max_restarts=1).run()
    run.post(HostDropped("b", "reset"))
    run.core.liveness = type(run.core.liveness)(LivenessSettings())
    assert run.core.next_deadline_s() == 1.0 + JOIN_S
    run.tick(1.0 + JOIN_S)
    assert run.ended == ("failed", 5)
    assert run.outcome is not None
    assert "b: did not come back within 600 s" in run.outcome.message


def test_second_host_that_is_lost_while_the_first_is_gathered_is_gathered_too() -> None:
    run = Plain(max_restarts=1).run()
    run.post(HostDropped("b", "reset"))
    assert RestoreHost("a") in run.post(HostDropped("a", "reset"))
    run.say(hello("b", 2), "b")
    assert run.core.phase is PlainPhase.GATHERING
    run.say(hello("a"), "a")
    assert run.restarts == [0, 1]


def test_host_that_leaves_for_good_while_another_is_gathered_ends_the_run() -> None:
    run = Plain(max_restarts=1).run()
    run.post(HostDropped("b", "reset"))
    run.say(HostStopped("a", "told to"), "a")
    assert run.ended == ("failed", 5)


def test_host_that_leaves_in_order_is_not_looked_for() -> None:
    run = Plain(max_restarts=1).run()
    assert RestoreHost("b") not in run.say(HostStopped("b", "told to"), "b")
    assert run.ended == ("failed", 5)


def test_host_whose_ranks_have_finished_may_be_lost() -> None:
    run = Plain().run()
    run.exit(1)
    run.exit(2)
    run.post(HostDropped("b", "reset"))
    assert run.core.phase is PlainPhase.RUNNING
    run.exit(0)
    assert run.ended == ("completed", 0)


@pytest.mark.parametrize("host", ["a", "b"])
def test_host_that_is_lost_before_the_ranks_are_spawned_costs_a_restart(host: str) -> None:
    run = Plain(max_restarts=1).run(PickPort)
    run.held.discard(PickPort)
    run.post(HostDropped(host, "reset"))
    assert run.core.phase is PlainPhase.GATHERING
    run.say(hello(host, run.devices[host]), host)
    assert run.restarts == [1]


def test_host_of_rank_0_that_is_lost_with_the_verdict_is_gathered() -> None:
    run = Plain(max_restarts=1).run()
    run.held.add(PickPort)
    run.exit(1, code=2)
    assert run.core.phase is PlainPhase.STARTING
    run.held.discard(PickPort)
    run.post(HostDropped("a", "reset"))
    assert run.core.phase is PlainPhase.GATHERING
    run.say(hello("a"), "a")
    assert run.restarts == [0, 1]


def test_silent_host_is_suspect_then_lost() -> None:
    run = Plain().run()
    for at_s in (6.0, 12.0):
        run.now_s = at_s
        run.say(Beat("a", ()), "a")
    assert "host b is suspect (silent for 11.0 s)" in run.records("peer_suspect")
    run.now_s = 13.0
    run.say(Beat("b", ()), "b")
    assert run.records("peer_alive") == ["host b is alive (silent for 0.0 s)"]
    for at_s in (20.0, 30.0, 40.0, 43.0):
        run.now_s = at_s
        run.say(Beat("a", ()), "a")
    assert run.records("host_lost") == ["b: silent for 30.0 s"]
    assert run.ended == ("failed", 5)


def test_time_in_which_the_controller_stood_still_counts_against_nobody() -> None:
    run = Plain().run()
    run.now_s = 101.0
    run.post(Stalled(100.0))
    assert run.records("stalled") == ["the controller did not run for 100.0 s"]
    assert run.core.phase is PlainPhase.RUNNING
    assert run.core.next_deadline_s() == 111.0


# ----------------------------------------------------------------------------------------------------------------- stop
def test_stop_ends_the_ranks_within_their_grace() -> None:
    run = Plain(max_restarts=3).run()
    run.stop()
    assert [order.grace_s for order in run.sent(StopHost)] == [GRACE_S, GRACE_S]
    assert run.ended == ("stopped", 130)
    assert run.outcome is not None
    assert run.outcome.message == "stopped by test"


def test_abort_ends_them_at_once_also_behind_a_stop() -> None:
    run = Plain().run(StopHost)
    run.stop()
    too_late = "the run is ending already; abort it to end it now"
    assert run.stop() == [Record("stop_requested", Severity.INFO, too_late, {})]
    run.held.clear()
    run.stop(abort=True)
    assert [order.grace_s for order in run.sent(StopHost)] == [GRACE_S, GRACE_S, 0.0, 0.0]
    assert run.ended == ("stopped", 130)


def test_stop_before_the_start_ends_the_run() -> None:
    run = Plain()
    run.say(hello("a"), "a")
    run.stop()
    assert run.ended == ("stopped", 130)


def test_failure_that_came_before_the_stop_stays_the_runs() -> None:
    run = Plain(max_restarts=1).run(StopRanks)
    run.exit(1, code=9)
    run.stop()
    assert run.ended == ("failed", 9)


def test_failure_behind_a_stop_is_collateral() -> None:
    run = Plain().run(StopHost)
    run.stop()
    run.exit(1, code=1)
    run.held.clear()
    run.stop(abort=True)
    assert run.ended == ("stopped", 130)
    assert run.outcome is not None
    assert run.outcome.collateral == 1


def test_abort_while_a_failure_ends_the_run_changes_no_code() -> None:
    run = Plain().run(StopHost)
    run.exit(1, code=9)
    assert run.core.phase is PlainPhase.ENDING
    run.held.clear()
    run.stop(abort=True)
    assert run.ended == ("failed", 9)
    assert run.outcome is not None
    assert run.outcome.collateral == 0


def test_signal_to_a_daemon_stops_the_run_once() -> None:
    run = Plain().run(StopHost)
    run.say(StopWanted("a", -1, 15), "a")
    assert run.say(StopWanted("b", -1, 15), "b") == []
    run.held.clear()
    run.stop(abort=True)
    assert run.ended == ("stopped", 143)


def test_lost_walk_in_is_waited_for_but_not_looked_for() -> None:
    run = Plain(max_restarts=1, target_ranks=4)
    run.devices["x"] = 1
    run.run()
    assert [member.host for member in run.core.membership.all()] == ["a", "b", "b", "x"]
    assert not any(isinstance(action, RestoreHost) for action in run.post(HostDropped("x", "reset")))
    assert run.core.phase is PlainPhase.GATHERING
    run.say(hello("x"), "x")
    assert run.restarts == [0, 1]


def test_walk_in_that_leaves_is_not_waited_for_and_ends_a_run_that_trains() -> None:
    run = Plain()
    run.held.add(StopHost)
    run.say(hello("a", 1), "a")
    assert run.say(LeaveWanted("b", "SIGTERM to its daemon"), "b") == []
    left = run.say(LeaveWanted("a", "SIGTERM to its daemon"), "a")
    assert left == [SendHost("a", StopHost("SIGTERM to its daemon", 0.0))]

    run = Plain().run(StopHost)
    run.say(LeaveWanted("b", "SIGTERM to its daemon"), "b")
    assert run.say(LeaveWanted("a", "SIGTERM to its daemon"), "a") == []
    run.held.clear()
    run.stop(abort=True)
    assert run.ended == ("stopped", 143)


def test_host_that_does_not_stop_is_given_up() -> None:
    run = Plain().run(StopHost)
    run.stop()
    due_s = run.core.next_deadline_s()
    assert due_s == 1.0 + GRACE_S + 5.0
    actions = run.tick(due_s)
    assert DropHost("b", "did not stop in time") in actions
    assert run.ended == ("stopped", 130)


# ---------------------------------------------------------------------------------------------------------------- looks
def test_ranks_have_lived_from_their_start_to_their_end() -> None:
    run = Plain(max_restarts=1)
    assert (run.core.uptime_s(1.0), run.core.lived_s(0, 1.0)) == (None, None)
    run.run()
    run.now_s = 4.0
    run.exit(0)
    assert (run.core.uptime_s(9.0), run.core.lived_s(0, 9.0), run.core.lived_s(1, 9.0)) == (8.0, 3.0, 8.0)
    run.now_s = 6.0
    run.exit(1)
    run.exit(2)
    assert run.core.uptime_s(9.0) == 5.0


@pytest.mark.parametrize("phase", [PlainPhase.RUNNING, PlainPhase.STARTING])
def test_contradictions_are_found(phase: PlainPhase) -> None:
    run = Plain().run(StopRanks)
    run.exit(1, code=1)
    run.core.phase = phase
    with pytest.raises(InvariantViolation):
        run.core.check()
