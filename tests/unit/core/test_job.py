"""A run from the join window to its outcome: phases, hosts, refusals, losses, stops and exit codes."""

from dataclasses import replace
from typing import Any

import pytest

from flodl.core.actions import DropHost, JobAction, Record, SendHost, Severity, StopHead, WatchHead
from flodl.core.events import (
    HeadExited,
    HeadSaid,
    HostDropped,
    HostFailed,
    HostSaid,
    Stalled,
    StartAsked,
    StateStored,
    StopAsked,
    Ticked,
)
from flodl.core.finale import STATE_TIMEOUT_S
from flodl.core.job import JobCore, JobSettings, Phase
from flodl.core.liveness import Liveness, LivenessSettings
from flodl.core.membership import Membership
from flodl.core.startup import Startup
from flodl.core.window import JoinSettings, StartRule
from flodl.messages import (
    Admitted,
    Beat,
    EvalDone,
    Evict,
    FinishRank,
    FormGroup,
    FromDaemon,
    GroupFormed,
    HeadError,
    HeadReady,
    Heard,
    HostStopped,
    KillRank,
    LogChunk,
    MinReached,
    Mode,
    RankBeat,
    RankError,
    RankExited,
    RankFinished,
    Reduced,
    RunEnded,
    SendState,
    SpawnRanks,
    StateSent,
    StopHost,
    StopRequest,
    StoreRequest,
    WindowDone,
)
from tests.unit.core.cohort import Cohort, hello

GRACE_S = 30.0


def beat(*ranks: int, age_ms: int = 0, has_beaten: bool = True) -> Beat:
    return Beat("b", tuple(RankBeat(rank, has_beaten, age_ms, 5, 100) for rank in ranks))


def events_of(actions: list[JobAction]) -> list[str]:
    return [action.event for action in actions if isinstance(action, Record)]


def training(mode: Mode = Mode.CPU_SYNC, **changes: object) -> Cohort:
    """A long run in its first window."""
    return Cohort(mode, dataset_size=600, **changes).train_until(WindowDone)


def ending_of(cohort: Cohort) -> tuple[str, int]:
    assert cohort.outcome is not None
    return cohort.outcome.status, cohort.outcome.exit_code


# -------------------------------------------------------------------------------------------------------- start to end
def test_run_goes_through_its_phases_and_ends_once() -> None:
    cohort = Cohort(eval_samples=2)
    assert cohort.core.phase is Phase.WAITING
    cohort.join()
    assert cohort.core.phase is Phase.STAGING
    assert [order.world_size for order in cohort.sent(SpawnRanks)] == [3, 3]
    cohort.held = {Reduced}
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    assert cohort.core.phase is Phase.STAGING
    cohort.post(HeadSaid(HeadReady(cohort.settings, {})))
    assert cohort.core.phase is Phase.FORMING
    assert cohort.sent(Admitted) == [Admitted(rank, 3, (0, 1, 2)) for rank in range(3)]
    cohort.held = {WindowDone}
    cohort.release(Reduced)
    assert cohort.core.phase is Phase.TRAINING
    cohort.held = {EvalDone}
    cohort.release(WindowDone)
    assert cohort.core.phase is Phase.FINISHING
    cohort.held = {RankFinished, RankExited}
    cohort.release(EvalDone)
    assert cohort.core.phase is Phase.ENDING
    cohort.release(RankFinished)
    cohort.release(RankExited)
    assert cohort.core.phase is Phase.ENDED
    assert ending_of(cohort) == ("completed", 0)
    assert cohort.sent(RunEnded) == [RunEnded("completed", "", "/state", 2)]
    assert cohort.core.next_deadline_s() is None
    assert cohort.post(Ticked()) == []


def test_ranks_finish_before_their_hosts_are_stopped() -> None:
    cohort = Cohort().get_ready()
    kinds = [type(message).__name__ for message in cohort.sent(object) if isinstance(message, FinishRank | StopHost)]
    assert kinds == ["FinishRank"] * 3 + ["StopHost"] * 2


def test_run_waits_for_what_the_head_does_behind_the_training() -> None:
    cohort = Cohort()
    cohort.held.add(HeadExited)
    cohort.get_ready()
    assert (cohort.outcome, cohort.core.next_deadline_s()) == (None, None)
    assert cohort.core.is_head_told
    cohort.post(HeadExited(0, 0))
    assert ending_of(cohort) == ("completed", 0)


def test_head_that_fails_behind_the_training_fails_the_run() -> None:
    cohort = Cohort()
    cohort.held.add(HeadExited)
    cohort.get_ready()
    cohort.post(HeadExited(3, 0))
    assert ending_of(cohort) == ("failed", 3)


def test_run_without_a_head_sends_no_state() -> None:
    cohort = Cohort(has_head=False).get_ready()
    assert cohort.sent(SendState) == []
    assert ending_of(cohort) == ("completed", 0)


# ---------------------------------------------------------------------------------------------------------- join window
def test_host_that_may_not_join_is_stopped_and_dropped() -> None:
    cohort = Cohort(is_elastic=False)
    actions = cohort.say(hello("x"), "x")
    reason = "host x is not in this run's roster (a, b), and join.elastic is false"
    assert actions[1:3] == [SendHost("x", StopHost(reason, 0.0)), DropHost("x", reason)]
    assert events_of(actions) == ["join_refused"]


def test_too_few_at_the_hard_limit_is_that_whatever_kept_them_away() -> None:
    cohort = Cohort()
    cohort.post(HostFailed("b", "auth", "permission denied", ""))
    cohort.tick(600.0)
    assert ending_of(cohort) == ("failed", 5)


def test_roster_that_is_there_and_too_small_says_what_helps() -> None:
    cohort = Cohort(min_rank_start=9, is_elastic=False).join()
    assert cohort.outcome is not None
    assert cohort.outcome.message == (
        "the run cannot start: 3 of 9 ranks are there\nevery host of the roster is there\n"
        "  bring more hosts (fdl join), or lower join.min_rank_start"
    )


@pytest.mark.parametrize(
    ("comes", "goes", "words"),
    [
        (False, False, "no host has joined"),
        (True, False, "the roster is empty"),
        (True, True, "host x came, and left: no such script"),
    ],
)
def test_empty_roster_with_too_few_says_who_has_come(comes: bool, goes: bool, words: str) -> None:
    startup = Startup(JoinSettings((), min_rank_start=9), 60.0, Membership(), Liveness(LivenessSettings()), 0.0)
    if comes:
        startup.join(hello("x"), 1.0)
    if goes:
        startup.window.leave("x", "no such script")
    _, message = startup.give_up(600.0)
    assert f" ranks are there\n{words}\n  bring more hosts (fdl join)" in message


def test_start_without_some_of_the_roster_names_them() -> None:
    cohort = Cohort(min_rank_start=1)
    cohort.say(hello("a"), "a")
    cohort.post(HostFailed("b", "auth", "permission denied", "add your key there"))
    assert cohort.core.phase is Phase.STAGING
    assert cohort.records("host_failed") == ["b: auth: permission denied\n  add your key there"]
    assert cohort.records("degraded_start") == ["starting with 1 rank, without b (auth)"]


# -------------------------------------------------------------------------------------------------------- a held window
def test_held_window_waits_for_a_person_and_says_so_once() -> None:
    cohort = Cohort(start=StartRule.MANUAL).join()
    cohort.trust()
    cohort.tick(599.0)
    assert cohort.core.phase is Phase.WAITING
    assert cohort.core.startup.hold() == []
    assert cohort.records("window_held") == ["2 of 2 hosts are there; fdl start starts the run"]
    assert cohort.core.start_refusal() == ""
    cohort.post(StartAsked("fdl start"))
    assert cohort.core.phase is Phase.STAGING
    assert cohort.records("start_requested") == ["fdl start starts the run"]
    assert cohort.core.start_refusal() == "the run is staging: it does not wait to be started"


def test_start_that_cannot_be_is_noted_and_changes_nothing() -> None:
    cohort = Cohort(start=StartRule.MANUAL)
    cohort.say(hello("a"), "a")
    cohort.post(StartAsked("fdl start"))
    assert cohort.core.phase is Phase.WAITING
    (refused,) = cohort.records("start_refused")
    assert refused == (
        "fdl start cannot start the run: too few ranks: 1 of 2 hosts are there; missing: b (has not joined)"
    )


# ------------------------------------------------------------------------------------------------------------- walk-ins
def with_walk_in(**changes: Any) -> Cohort:
    """The roster's three ranks and a fourth of x, all building their models; the head is ready."""
    cohort = Cohort(start=StartRule.MANUAL, **changes).join()
    cohort.say(hello("x"), "x")
    cohort.post(StartAsked("fdl start"))
    cohort.post(HeadSaid(HeadReady(cohort.settings, {})))
    return cohort


def test_walk_in_trains_with_the_roster_from_the_start() -> None:
    cohort = with_walk_in()
    assert [order.world_size for order in cohort.sent(SpawnRanks)] == [4, 4, 4]
    assert "x, a host of no roster, joined with 1 device" in " ".join(cohort.records("host_joined"))
    for rank in range(4):
        cohort.say(cohort.ready(rank))
    assert cohort.sent(Admitted)[0].ranks == (0, 1, 2, 3)
    assert ending_of(cohort) == ("completed", 0)


def test_walk_in_that_trains_something_else_is_sent_away_and_the_others_start() -> None:
    cohort = with_walk_in()
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    cohort.say(replace(cohort.ready(3), fingerprint={**cohort.ready(0).fingerprint, "script": "other"}))
    (refused,) = cohort.records("join_refused")
    assert refused.startswith("rank 3 on x does not take part: rank 0 on a and rank 3 on x do not agree on: script (")
    assert [stop.reason[:13] for stop in cohort.sent(StopHost)][:1] == ["rank 0 on a a"]
    assert cohort.sent(Admitted)[0].ranks == (0, 1, 2)
    assert ending_of(cohort) == ("completed", 0)


@pytest.mark.parametrize("end", [RankError(3, "ImportError: x", ""), RankExited(3, 1, 0, by_us=False)])
def test_walk_in_that_fails_while_the_others_start_costs_nobody_else(end: FromDaemon) -> None:
    cohort = with_walk_in()
    cohort.say(end)
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    assert ending_of(cohort) == ("completed", 0)
    assert cohort.outcome is not None
    assert cohort.outcome.losses == ()


def test_walk_in_that_is_lost_while_the_others_start_is_borne() -> None:
    cohort = with_walk_in()
    cohort.post(HostDropped("x", "reset"))
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    assert ending_of(cohort) == ("completed", 0)


def test_start_that_counted_on_a_walk_in_fails_without_it() -> None:
    cohort = with_walk_in(min_rank_start=4)
    cohort.say(RankError(3, "ImportError: x", ""))
    assert ending_of(cohort) == ("failed", 5)
    assert cohort.outcome is not None
    assert cohort.outcome.message == "too few ranks to start: 3 of 4 ranks are left; rank 3: ImportError: x"


def test_two_walk_ins_that_do_not_fit_fail_a_start_that_counted_on_them_once() -> None:
    cohort = Cohort(hosts={}, min_rank_start=2, has_head=False)
    for host in ("x", "y", "z"):
        cohort.say(hello(host), host)
    assert cohort.core.phase is Phase.STAGING
    cohort.say(cohort.ready(0))
    cohort.say(replace(cohort.ready(1), fingerprint={"script": "other"}))
    assert ending_of(cohort) == ("failed", 5)


def test_walk_ins_alone_are_measured_by_the_head() -> None:
    cohort = Cohort(hosts={}, min_rank_start=3)
    for host in ("x", "y", "z"):
        cohort.say(hello(host), host)
    cohort.post(HeadSaid(HeadReady(cohort.settings, {"script": "mine"})))
    for rank, script in enumerate(("other", "mine", "mine")):
        cohort.say(replace(cohort.ready(rank), fingerprint={"script": script}))
    assert ending_of(cohort) == ("failed", 5)
    (refused,) = cohort.records("join_refused")
    assert refused.startswith("rank 0 on x does not take part: rank 1 on y and rank 0 on x do not agree on: script (m")


def test_walk_ins_of_whom_none_fits_the_head_fail_the_run_with_what_differs() -> None:
    cohort = Cohort(hosts={}, min_rank_start=1)
    cohort.say(hello("x"), "x")
    cohort.post(HeadSaid(HeadReady(cohort.settings, {"script": "mine"})))
    cohort.say(replace(cohort.ready(0), fingerprint={"script": "other"}))
    assert ending_of(cohort) == ("failed", 2)
    assert cohort.outcome is not None
    assert "rank 0 on x and the head do not agree on: script (other against mine)" in cohort.outcome.message


def test_torch_that_differs_is_noted_where_it_can_be_borne() -> None:
    cohort = Cohort()
    cohort.say(hello("a"), "a")
    cohort.say(replace(hello("b", 2), torch="2.9"), "b")
    cohort.post(HeadSaid(HeadReady(cohort.settings, {})))
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    assert cohort.records("torch_skew") == ["torch differs: a has 2.13; b has 2.9"]
    assert ending_of(cohort) == ("completed", 0)


def test_host_that_comes_while_the_others_start_is_refused() -> None:
    cohort = Cohort().join()
    assert cohort.say(hello("b"), "b")[2] == DropHost("b", "the run is staging and takes hosts in once it trains")


def test_host_that_leaves_the_window_may_come_back() -> None:
    cohort = Cohort(min_rank_start=2)
    cohort.say(hello("a"), "a")
    cohort.post(HostDropped("a", "reset"))
    assert cohort.post(HostDropped("a", "reset")) == []
    assert cohort.core.hosts == {}
    cohort.join()
    assert cohort.core.phase is Phase.STAGING


def test_window_has_a_deadline_before_anything_happens_and_names_who_never_came() -> None:
    cohort = Cohort()
    assert cohort.core.next_deadline_s() == 300.0
    cohort.tick(300.0)
    assert cohort.core.next_deadline_s() == 600.0
    cohort.tick(600.0)
    assert ending_of(cohort) == ("failed", 5)
    assert cohort.outcome is not None
    assert cohort.outcome.message.startswith(
        "the run cannot start: 0 of 2 hosts are there\nhost a: join: has not joined\n  see the host's"
    )


def test_host_that_cannot_be_reached_gives_its_own_exit_code() -> None:
    cohort = Cohort()
    cohort.say(hello("a"), "a")
    actions = cohort.post(HostFailed("b", "auth", "permission denied", ""))
    assert events_of(actions)[0] == "host_failed"
    assert ending_of(cohort) == ("failed", 4)
    words = "1 of 2 hosts are there\nhost b: auth: permission denied"
    assert SendHost("a", StopHost(f"the run cannot start: {words}", GRACE_S)) in actions


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        (("preflight", "preflight"), 3),
        (("preflight", "join"), 3),
        (("preflight", "connect"), 4),
        (("join", "start"), 4),
        (("join", "join"), 5),
    ],
)
def test_hosts_that_are_absent_give_the_exit_code_of_the_farthest_away(stages: tuple[str, str], code: int) -> None:
    cohort = Cohort()
    for host, stage in zip(("a", "b"), stages, strict=True):
        cohort.post(HostFailed(host, stage, "why", "what to do"))
    assert ending_of(cohort) == ("failed", code)


# ------------------------------------------------------------------------------------------------------------ admission
def test_cohort_that_disagrees_is_refused_as_usage() -> None:
    cohort = Cohort().join()
    cohort.post(HeadSaid(HeadReady(cohort.settings, {})))
    for rank in range(3):
        cohort.say(replace(cohort.ready(rank), fingerprint={"layers": str(rank // 2)}))
    assert ending_of(cohort) == ("failed", 2)
    assert cohort.outcome is not None
    assert "rank 0 on a and rank 2 on b do not agree on: layers (0 against 1)" in cohort.outcome.message


def test_host_behind_a_tunnel_is_refused_by_name_in_a_collective_mode() -> None:
    cohort = Cohort(Mode.NCCL_SYNC)
    cohort.say(hello("a"), "a")
    cohort.say(replace(hello("b", 2), tunnelled=True), "b")
    cohort.post(HeadSaid(HeadReady(cohort.settings, {})))
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    assert ending_of(cohort) == ("failed", 2)
    assert cohort.outcome is not None
    assert "the tunnel of b leads to the controller only" in cohort.outcome.message
    assert cohort.sent(FormGroup) == []


def test_second_report_of_a_rank_changes_nothing() -> None:
    cohort = Cohort().join()
    cohort.say(cohort.ready(0))
    cohort.say(replace(cohort.ready(0), backend="nccl"))
    assert cohort.core.startup.ready[0].backend == "gloo"


def test_head_that_does_not_come_up_is_given_the_ranks_grace() -> None:
    cohort = Cohort().join()
    for rank in range(3):
        cohort.say(cohort.ready(rank))
    cohort.trust()
    cohort.tick(300.0)
    assert cohort.core.phase is Phase.STAGING
    assert cohort.core.next_deadline_s() == 301.0
    cohort.tick(301.0)
    assert ending_of(cohort) == ("failed", 1)
    assert cohort.outcome is not None
    assert "did not reach Trainer.run within 300 s" in cohort.outcome.message


@pytest.mark.parametrize(("least", "phase"), [(0, Phase.ENDED), (2, Phase.STAGING)])
def test_loss_while_ranks_come_up_counts_against_the_least(least: int, phase: Phase) -> None:
    cohort = Cohort(min_rank_start=least).join()
    cohort.say(RankExited(2, 0, 9, by_us=False))
    assert cohort.core.phase is phase
    if least:
        for rank in range(2):
            cohort.say(cohort.ready(rank))
        cohort.post(HeadSaid(HeadReady(cohort.settings, {})))
        assert ending_of(cohort) == ("completed", 0)
    else:
        assert ending_of(cohort) == ("failed", 137)


def test_rank_that_never_speaks_is_dead_after_its_start_up_grace() -> None:
    cohort = Cohort(min_rank_start=2).join()
    for at_s in range(2, 301):
        cohort.now_s = float(at_s)
        cohort.say(Beat("a", ()), "a")
        cohort.say(beat(1, 2, has_beaten=at_s > 100), "b")
    assert cohort.records("rank_lost") == []
    cohort.tick(301.0)
    assert cohort.records("rank_lost") == ["rank 0 on a lost: rank 0 is dead (silent for 300.0 s)"]
    assert cohort.sent(KillRank) == [KillRank(0, "rank 0 is dead (silent for 300.0 s)")]


def test_second_death_of_a_tick_that_ended_the_run_is_buried_all_the_same() -> None:
    cohort = Cohort(hosts={"a": 2}).join()
    for at_s in range(2, 302):
        cohort.now_s = float(at_s)
        cohort.say(Beat("a", ()), "a")
    assert len(cohort.records("rank_lost")) == 2
    assert ending_of(cohort) == ("failed", 5)


# --------------------------------------------------------------------------------------------------------------- beats
def test_beat_is_answered_and_remembered_for_the_hosts_own_ranks() -> None:
    cohort = training()
    assert cohort.say(beat(1, 0, 9), "b") == [SendHost("b", Heard())]
    assert cohort.core.beats.keys() == {1}


def test_silent_rank_is_suspect_alive_again_then_dead() -> None:
    cohort = training()
    for at_s in range(2, 11):
        cohort.now_s = float(at_s)
        cohort.say(Beat("a", (RankBeat(0, True, 0, 1, 1),)), "a")
        cohort.say(beat(1, 2, age_ms=1000 * (at_s - 1)), "b")
    for at_s, age_ms, event in ((11.0, 10_000, "peer_suspect"), (12.0, 0, "peer_alive"), (13.0, 1000, "")):
        cohort.now_s = at_s
        actions = cohort.say(beat(1, 2, age_ms=age_ms), "b")
        cohort.say(Beat("a", (RankBeat(0, True, 0, 1, 1),)), "a")
        assert set(events_of(actions)) == ({event} if event else set())


def test_host_and_rank_that_fall_silent_together_are_lost_once() -> None:
    cohort = training()
    for host, ranks in (("a", (0,)), ("b", (1, 2))):
        cohort.say(Beat(host, tuple(RankBeat(rank, True, 0, 1, 1) for rank in ranks)), host)
    for at_s in range(2, 31):
        cohort.now_s = float(at_s)
        cohort.say(Beat("a", (RankBeat(0, True, 0, 1, 1),)), "a")
    assert cohort.records("rank_lost") == []
    cohort.tick(31.0)
    assert cohort.records("rank_lost") == ["rank 1, 2 on b lost: silent for 30.0 s"]
    assert DropHost("b", "silent for 30.0 s") in cohort.actions


def test_host_dead_and_its_starting_rank_dead_in_one_tick_are_buried_once() -> None:
    settings = LivenessSettings(startup_s=30.0)
    core = JobCore(JobSettings(JoinSettings(("a",)), settings, has_head=False), 0.0)
    core.handle(HostSaid("a", hello("a")), 1.0)
    actions = core.handle(Ticked(), 31.0)
    assert events_of(actions) == ["host_lost", "rank_lost"]
    assert core.phase is Phase.ENDED


def test_controllers_own_stall_is_forgiven() -> None:
    cohort = training()
    cohort.now_s = 100.0
    assert events_of(cohort.post(Stalled(99.0))) == ["stalled"]
    assert cohort.records("rank_lost") == []


def test_stall_within_a_stops_grace_gives_up_nobody() -> None:
    cohort = Cohort().train_until(WindowDone)
    cohort.stop()
    cohort.waiting.pop(0)[1]()  # one has answered; the others' words lie in the queue
    cohort.now_s += 60.0
    assert events_of(cohort.post(Stalled(60.0))) == ["stalled"]
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.losses, cohort.sent(KillRank)) == ("stopped", (), [])


@pytest.mark.parametrize("gap_s", [number / 2 + 0.33 for number in range(2, 20)])
def test_deadline_behind_a_stall_is_over_when_it_comes(gap_s: float) -> None:
    cohort = Cohort(Mode.NCCL_SYNC).train_until(GroupFormed)
    cohort.now_s += gap_s
    cohort.post(Stalled(gap_s))
    at_s = cohort.core.next_deadline_s()
    assert at_s is not None
    cohort.tick(at_s)
    assert cohort.core.next_deadline_s() != at_s


@pytest.mark.parametrize(
    ("mode", "awaited"), [(Mode.NCCL_SYNC, GroupFormed), (Mode.NCCL_SYNC, Reduced), (Mode.CPU_SYNC, StateStored)]
)
def test_no_deadline_counts_time_in_which_the_controller_did_not_run(mode: Mode, awaited: type) -> None:
    cohort = Cohort(mode).train_until(awaited)
    cohort.trust()
    deadline_s = cohort.core.next_deadline_s()
    cohort.now_s += 5000.0
    assert events_of(cohort.post(Stalled(5000.0))) == ["stalled"]
    assert deadline_s is not None
    assert cohort.core.next_deadline_s() == deadline_s + 5000.0
    cohort.release(awaited)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.losses) == ("completed", ())
    assert len(cohort.sent(FormGroup)) == (3 if mode.is_collective else 0), "nobody forms a second group"


def test_stall_before_anybody_has_come_is_told() -> None:
    core = JobCore(JobSettings(JoinSettings(("a",)), LivenessSettings(), has_head=False), 0.0)
    assert events_of(core.handle(Stalled(9.0), 9.0)) == ["stalled"]


# ------------------------------------------------------------------------------------------------------------ strangers
@pytest.mark.parametrize("rank", [0, 9])
def test_host_that_speaks_for_another_hosts_rank_is_not_heard(rank: int) -> None:
    cohort = training()
    assert events_of(cohort.say(RankError(rank, "boom", ""), "b")) == ["stray"]
    assert cohort.say(RankExited(rank, 1, 0, by_us=False), "b") == []
    assert cohort.core.phase is Phase.TRAINING


def test_dead_rank_that_speaks_is_evicted() -> None:
    cohort = training()
    cohort.say(RankExited(1, 0, 9, by_us=False))
    for word in (MinReached(1, 0), StoreRequest(1, 1, "get", (), (), 0), RankError(1, "boom", "")):
        note, order = cohort.say(word)
        assert isinstance(note, Record)
        assert note.event == "zombie"
        assert order == SendHost("b", Evict(1, "ended by signal 9"))
    assert cohort.core.phase is Phase.TRAINING


@pytest.mark.parametrize(
    "word",
    [
        GroupFormed(1, 1, 1, ""),
        WindowDone(1, 0, 0, 0, 0.0, True, None, None, 0.0),
        MinReached(1, 0),
        EvalDone(1, 0, 0.0, ""),
    ],
)
def test_training_word_before_the_training_is_noted(word: GroupFormed | WindowDone | MinReached | EvalDone) -> None:
    cohort = Cohort().join()
    assert events_of(cohort.say(word)) == ["early"]


def test_logs_and_rendezvous_are_the_shells_business() -> None:
    cohort = training()
    assert cohort.say(LogChunk(1, "stdout", 0, b"x")) == []
    assert cohort.say(StoreRequest(1, 1, "get", ("k",), (), 0)) == []


def test_finish_that_was_not_asked_for_says_nothing_and_the_exit_does() -> None:
    for cohort in (Cohort().join(), training()):
        assert cohort.say(RankFinished(1)) == []
        cohort.say(RankExited(1, 0, 0, by_us=True))
        assert "stopped by its daemon, which leaves the run" in cohort.records("rank_lost")[0]


def test_finish_said_twice_is_one() -> None:
    cohort = Cohort().train_until(HostStopped)
    assert cohort.core.phase is Phase.ENDING
    assert cohort.say(RankFinished(1)) == []
    assert cohort.say(RankExited(1, 0, 0, by_us=True)) == []


# --------------------------------------------------------------------------------------------------------------- losses
def test_signal_is_a_loss_that_the_run_survives() -> None:
    cohort = training()
    cohort.say(RankExited(2, 0, 9, by_us=False))
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("completed", 0)
    assert cohort.outcome is not None
    assert [(loss.kind, loss.rank, loss.signal) for loss in cohort.outcome.losses] == [("signal", 2, 9)]


def test_rank_killed_after_the_last_round_is_a_loss_in_the_summary() -> None:
    cohort = training()
    cohort.held = {RankFinished, RankExited}
    cohort.release(WindowDone)
    assert cohort.core.phase is Phase.ENDING
    cohort.say(RankExited(2, 0, 9, by_us=False))
    cohort.release(RankFinished)
    cohort.release(RankExited)
    assert ending_of(cohort) == ("completed", 0)
    assert cohort.outcome is not None
    assert [(loss.kind, loss.rank, loss.signal) for loss in cohort.outcome.losses] == [("signal", 2, 9)]


def test_exception_is_the_headline_and_its_process_gives_the_code() -> None:
    cohort = training()
    cohort.say(RankError(1, "KeyError: 'label'", "Traceback …"))
    cohort.say(RankExited(1, 7, 0, by_us=False))
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("failed", 7)
    assert cohort.outcome is not None
    assert cohort.outcome.message == "rank 1 failed: KeyError: 'label'"
    assert cohort.outcome.failure is not None
    assert cohort.outcome.failure.traceback == "Traceback …"
    assert cohort.sent(RunEnded) == [RunEnded("failed", "rank 1 failed: KeyError: 'label'", "/state", 0, 7)]


def test_exception_while_ranks_come_up_ends_the_run_without_a_round() -> None:
    cohort = Cohort().join()
    cohort.say(RankError(1, "ImportError", ""))
    assert cohort.sent(StopHost) != []
    assert ending_of(cohort) == ("failed", 1)


def test_second_exception_is_collateral() -> None:
    cohort = training()
    cohort.say(RankError(1, "first", ""))
    cohort.say(RankError(2, "second", ""))
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert (cohort.outcome.message, cohort.outcome.collateral) == ("rank 1 failed: first", 1)


@pytest.mark.parametrize(("code", "exit_code", "said"), [(3, 3, "exited with code 3"), (0, 2, "without finishing")])
def test_exit_without_a_word_fails_the_run(code: int, exit_code: int, said: str) -> None:
    cohort = training()
    cohort.say(RankExited(1, code, 0, by_us=False))
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("failed", exit_code)
    assert cohort.outcome is not None
    assert said in cohort.outcome.message


def test_host_that_stops_by_itself_takes_its_ranks_along() -> None:
    cohort = training()
    cohort.say(HostStopped("b", "SIGTERM"), "b")
    assert cohort.records("host_lost") == ["b: stopped: SIGTERM"]
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("completed", 0)


def test_host_whose_ranks_are_all_dead_is_only_dropped() -> None:
    cohort = training()
    cohort.say(RankExited(0, 0, 9, by_us=False))
    lost = len(cohort.records("rank_lost"))
    actions = cohort.post(HostDropped("a", "reset"))
    assert events_of(actions) == ["host_lost"]
    assert len(cohort.records("rank_lost")) == lost


def test_collective_plane_with_one_rank_left_stops_in_order() -> None:
    cohort = training(Mode.NCCL_SYNC)
    cohort.post(HostDropped("b", "reset"))
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("stopped", 5)
    assert cohort.outcome is not None
    assert cohort.outcome.message.startswith("a collective mode needs two ranks and rank 0 is alone; connection lost")


def test_loss_while_nobody_has_reported_knows_no_mode() -> None:
    cohort = Cohort(Mode.NCCL_SYNC, {"a": 2}, min_rank_start=1).join()
    cohort.say(RankExited(0, 0, 9, by_us=False))
    assert cohort.core.phase is Phase.STAGING


# ------------------------------------------------------------------------------------------------------------ finishing
def test_state_is_asked_of_the_next_when_its_sender_is_lost() -> None:
    cohort = Cohort().train_until(StateSent)
    cohort.say(RankExited(0, 0, 9, by_us=False))
    assert cohort.sent(SendState) == [SendState(0, 0, False), SendState(1, 1, False)]
    cohort.release(StateSent)
    assert ending_of(cohort) == ("completed", 0)


def test_loss_of_everybody_while_finishing_ends_the_run() -> None:
    cohort = Cohort().train_until(StateSent)
    for rank in range(3):
        cohort.say(RankExited(rank, 0, 9, by_us=False))
    assert ending_of(cohort) == ("failed", 5)


def test_state_that_cannot_be_stored_fails_the_run() -> None:
    cohort = Cohort().train_until(StateStored)
    cohort.post(StateStored("", "no space left"))
    assert ending_of(cohort) == ("failed", 1)
    assert cohort.sent(RunEnded)[0].state_path == ""


def test_state_that_does_not_come_is_given_up() -> None:
    cohort = Cohort().train_until(StateSent)
    cohort.trust()
    assert cohort.core.next_deadline_s() == cohort.now_s + STATE_TIMEOUT_S
    cohort.tick(cohort.now_s + STATE_TIMEOUT_S)
    assert ending_of(cohort) == ("completed", 0)
    assert cohort.sent(RunEnded)[0].state_path == ""


def test_stop_while_finishing_changes_only_the_verdict() -> None:
    cohort = Cohort().train_until(StateSent)
    cohort.stop()
    cohort.release(StateSent)
    assert ending_of(cohort) == ("stopped", 130)


# ---------------------------------------------------------------------------------------------------------------- stops
def test_stop_merges_a_last_round_and_second_thoughts_change_nothing() -> None:
    cohort = training()
    cohort.post(HeadSaid(StopRequest("head", abort=False, exit_code=143)))
    cohort.stop(exit_code=130)
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("stopped", 143)
    assert cohort.sent(RunEnded) == [RunEnded("stopped", "stopped by head", "/state", 0, 143)]


def test_last_round_of_a_stop_has_the_stop_grace() -> None:
    cohort = training()
    cohort.held |= {HostStopped, HeadExited}
    cohort.stop()
    assert cohort.core.next_deadline_s() == 11.0
    cohort.trust()
    cohort.tick(1.0 + GRACE_S)
    assert cohort.core.phase is Phase.ENDING
    assert cohort.sent(StopHost) == [StopHost("stopped by test", GRACE_S)] * 2
    assert StopHead(GRACE_S) in cohort.actions


def test_stop_behind_the_training_watches_the_head_that_is_left() -> None:
    cohort = training()
    cohort.held.add(HeadExited)
    cohort.release(WindowDone)
    assert cohort.core.phase is Phase.ENDING
    assert WatchHead(GRACE_S) not in cohort.actions
    cohort.stop()
    assert WatchHead(GRACE_S) in cohort.actions
    assert cohort.records("stop_requested") == ["the run is ending already; abort it to end it now"]


def test_rank_that_is_busy_beyond_the_stop_grace_is_given_up_and_the_others_work_is_kept() -> None:
    cohort = Cohort(Mode.CPU_CADENCE)
    cohort.train_until(WindowDone)
    cohort.waiting.pop()  # its window is never answered
    cohort.release(WindowDone)
    cohort.stop()
    assert cohort.core.phase is Phase.TRAINING
    cohort.trust()
    cohort.tick(1.0 + GRACE_S)
    assert [kill.reason for kill in cohort.sent(KillRank)] == [f"still busy {GRACE_S:g} s after the stop"]
    assert cohort.sent(SendState)


def test_same_error_in_every_rank_ends_the_run_at_once() -> None:
    cohort = training()
    for rank in range(3):
        cohort.say(RankError(rank, "ValueError: x", "Traceback"))
    assert cohort.core.phase in (Phase.ENDING, Phase.ENDED)
    assert (cohort.core.ending.status, cohort.core.ending.collateral) == ("failed", 2)


def test_hosts_that_do_not_stop_in_time_are_given_up() -> None:
    cohort = training()
    cohort.held.add(HostStopped)
    cohort.stop(abort=True)
    assert cohort.sent(StopHost) == [StopHost("aborted by test", 0.0)] * 2
    assert (cohort.outcome, cohort.core.next_deadline_s()) == (None, 6.0)
    cohort.tick(6.0)
    assert [action for action in cohort.actions if isinstance(action, DropHost)] == [
        DropHost("a", "did not stop in time"), DropHost("b", "did not stop in time"),
    ]  # fmt: skip
    assert ending_of(cohort) == ("stopped", 130)


def test_ranks_that_end_with_the_run_are_no_losses() -> None:
    cohort = training()
    cohort.held.add(HostStopped)
    cohort.stop(abort=True)
    assert cohort.say(RankExited(1, 0, 15, by_us=True)) == []
    assert cohort.say(RankError(2, "KeyboardInterrupt", "")) != []
    cohort.release(HostStopped)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.losses, cohort.outcome.failure) == ("stopped", (), None)


def test_stop_of_a_run_that_ends_already_is_answered() -> None:
    cohort = training()
    cohort.held.add(HostStopped)
    cohort.stop(abort=True)
    (note,) = cohort.stop()
    assert note == Record("stop_requested", Severity.INFO, "the run is ending already; abort it to end it now", {})


@pytest.mark.parametrize("is_joined", [True, False])
def test_stop_before_the_training_ends_the_run(is_joined: bool) -> None:
    cohort = Cohort()
    if is_joined:
        cohort.join()
    cohort.post(StopAsked("fdl stop", abort=False, exit_code=143))
    assert ending_of(cohort) == ("stopped", 143)


# ----------------------------------------------------------------------------------------------------------------- head
def test_heads_error_stops_the_run_after_a_last_round() -> None:
    cohort = training()
    cohort.post(HeadSaid(HeadError("ValueError", "Traceback")))
    cohort.post(HeadExited(1, 0))
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("failed", 1)
    assert cohort.outcome is not None
    assert (cohort.outcome.message, cohort.outcome.collateral) == ("the head failed: ValueError", 0)
    assert cohort.sent(SendState) == []


@pytest.mark.parametrize(
    ("code", "signal", "exit_code", "said"),
    [(0, 9, 137, "ended with signal 9"), (4, 0, 4, "ended with code 4"), (0, 0, 2, "without flodl.Trainer.run")],
)
def test_head_that_ends_early_fails_the_run(code: int, signal: int, exit_code: int, said: str) -> None:
    cohort = training()
    cohort.post(HeadExited(code, signal))
    cohort.release(WindowDone)
    assert ending_of(cohort) == ("failed", exit_code)
    assert said in cohort.records("head_lost")[0]
