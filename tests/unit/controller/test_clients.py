"""What the controller answers to clients, without a socket."""

import pytest

from flodl.config.builder import local_cluster
from flodl.controller.clients import MAX_SOURCE_CHARS, ClientDesk
from flodl.core.events import DrainAsked, StartAsked, StopAsked
from flodl.core.plain import NO_DRAIN
from flodl.core.window import StartRule
from flodl.launch.bootstrap import Bootstrap
from flodl.launch.document import load
from flodl.launch.plan import LaunchRequest, plan
from flodl.messages import (
    AskBootstrap,
    BootstrapGiven,
    Declined,
    DrainAccepted,
    DrainRequest,
    StartAccepted,
    StartRequest,
    StopAccepted,
    StopRequest,
    WindowDone,
)
from flodl.wire.codec import decode, encode
from tests.unit.core.cohort import Cohort
from tests.unit.core.test_plain import Plain


def desk(cohort: Cohort) -> ClientDesk:
    asked = LaunchRequest("run-1", 0.0, ("train.py", "\udcff"), "/proj", "python", frozenset({"localhost"}))
    return ClientDesk(cohort.core, plan(local_cluster(1), asked))


@pytest.fixture
def training() -> Cohort:
    """Rank 0 on a, 1 and 2 on b."""
    return Cohort(dataset_size=4000).train_until(WindowDone)


def test_stop_is_heard_in_any_phase() -> None:
    reply, event = desk(Cohort()).answer(StopRequest("fdl stop", False, 143))
    assert (reply, event) == (StopAccepted("waiting"), StopAsked("fdl stop", False, 143))


def test_start_is_heard_while_the_window_is_held_and_names_who_starts() -> None:
    held = Cohort(start=StartRule.MANUAL)
    assert desk(held).answer(StartRequest("fdl start")) == (
        Declined("too few ranks: 0 of 2 hosts are there; missing: a (has not joined), b (has not joined)", False),
        None,
    )
    held.join()
    reply, event = desk(held).answer(StartRequest("fdl start"))
    assert (reply, event) == (StartAccepted(3, ("a", "b")), StartAsked("fdl start"))


def test_start_of_a_run_that_trains_is_declined(training: Cohort) -> None:
    reason = "the run is training: it does not wait to be started"
    assert desk(training).answer(StartRequest("fdl start")) == (Declined(reason, False), None)


def test_drain_names_the_ranks_that_leave(training: Cohort) -> None:
    reply, event = desk(training).answer(DrainRequest("b", "fdl drain"))
    assert (reply, event) == (DrainAccepted((1, 2)), DrainAsked("b", "fdl drain"))


@pytest.mark.parametrize(
    ("host", "reason"), [("x", "host x is not in the run; there are: a, b"), ("x" * 9999, "that is no host's name")]
)
def test_drain_that_cannot_be_is_declined_and_the_core_does_not_hear_it(
    training: Cohort, host: str, reason: str
) -> None:
    assert desk(training).answer(DrainRequest(host, "fdl drain")) == (Declined(reason, False), None)


def test_long_name_of_a_client_does_not_reach_the_log_whole(training: Cohort) -> None:
    _, event = desk(training).answer(DrainRequest("b", "a\n" * 9999))
    assert isinstance(event, DrainAsked)
    assert event.source == "a?" * (MAX_SOURCE_CHARS // 2)


def test_plain_run_is_stopped_like_any_other_and_neither_drained_nor_joined() -> None:
    core = Plain().run().core
    asked = LaunchRequest("run-1", 0.0, ("train.py",), "/proj", "python", frozenset({"localhost"}))
    plain = ClientDesk(core, plan(local_cluster(1), asked))
    assert plain.answer(StopRequest("fdl stop", False, 143)) == (
        StopAccepted("running"),
        StopAsked("fdl stop", False, 143),
    )
    assert plain.answer(DrainRequest("b", "fdl drain")) == (Declined(NO_DRAIN, is_early=False), None)
    reason = "a plain run keeps the ranks that it has started with"
    assert plain.answer(AskBootstrap("c")) == (Declined(reason, is_early=False), None)


def test_machine_that_wants_to_join_gets_its_bootstrap(training: Cohort) -> None:
    reply, event = desk(training).answer(AskBootstrap("c"))
    assert event is None
    assert isinstance(reply, BootstrapGiven)
    given = load(Bootstrap, reply.document)
    assert (given.run_id, given.host, given.secret) == ("run-1", "c", "")
    assert given.script == ("train.py", "\udcff")
    assert decode(encode(reply), BootstrapGiven) == reply


@pytest.mark.parametrize(
    ("host", "reply"),
    [
        ("b", Declined("host b has already joined this run; another machine needs another name", is_early=False)),
        ("../c", Declined("that is no host's name", is_early=False)),
    ],
)
def test_machine_that_may_not_join_is_told_why(training: Cohort, host: str, reply: Declined) -> None:
    assert desk(training).answer(AskBootstrap(host)) == (reply, None)


def test_machine_that_comes_too_early_is_told_so() -> None:
    reason = "the run is staging and takes hosts in once it trains"
    assert desk(Cohort().join()).answer(AskBootstrap("c")) == (Declined(reason, is_early=True), None)


def test_machine_that_comes_to_a_closed_world_or_a_run_that_ends_is_told_so(training: Cohort) -> None:
    closed = Cohort(is_elastic=False, dataset_size=4000).train_until(WindowDone)
    reason = "the run has started without it, and join.elastic is false"
    assert desk(closed).answer(AskBootstrap("c")) == (Declined(reason, is_early=False), None)
    training.stop()
    assert desk(training).answer(AskBootstrap("c")) == (Declined("the run is ending", is_early=False), None)


# ------------------------------------------------------------------------------------------------------------ walk-ins
def test_walk_in_gets_its_bootstrap(training: Cohort) -> None:
    reply = desk(training).introduce_walk_in("c")
    assert isinstance(reply, BootstrapGiven)
    given = load(Bootstrap, reply.document)
    assert (given.run_id, given.host, given.secret, given.is_walk_in) == ("run-1", "c", "", True)


def test_walk_in_that_may_not_come_is_told_why_and_whether_it_is_early(training: Cohort) -> None:
    reason = "the run is staging and takes hosts in once it trains"
    assert desk(Cohort().join()).introduce_walk_in("c") == Declined(reason, is_early=True)
    assert desk(training).introduce_walk_in("b") == Declined(
        "host b has already joined this run; another machine needs another name", is_early=False
    )
