"""What the controller answers to clients, without a socket."""

import pytest

from flodl.controller.clients import MAX_SOURCE_CHARS, ClientDesk
from flodl.core.events import DrainAsked, StopAsked
from flodl.messages import Declined, DrainAccepted, DrainRequest, StopAccepted, StopRequest, WindowDone
from tests.unit.core.cohort import Cohort


@pytest.fixture
def training() -> Cohort:
    """Rank 0 on a, 1 and 2 on b."""
    return Cohort(dataset_size=4000).train_until(WindowDone)


def test_stop_is_heard_in_any_phase() -> None:
    reply, event = ClientDesk(Cohort().core).answer(StopRequest("fdl stop", False, 143))
    assert (reply, event) == (StopAccepted("waiting"), StopAsked("fdl stop", False, 143))


def test_drain_names_the_ranks_that_leave(training: Cohort) -> None:
    reply, event = ClientDesk(training.core).answer(DrainRequest("b", "fdl drain"))
    assert (reply, event) == (DrainAccepted((1, 2)), DrainAsked("b", "fdl drain"))


@pytest.mark.parametrize(
    ("host", "reason"), [("x", "host x is not in the run; there are: a, b"), ("x" * 9999, "that is no host's name")]
)
def test_drain_that_cannot_be_is_declined_and_the_core_does_not_hear_it(
    training: Cohort, host: str, reason: str
) -> None:
    assert ClientDesk(training.core).answer(DrainRequest(host, "fdl drain")) == (Declined(reason, False), None)


def test_long_name_of_a_client_does_not_reach_the_log_whole(training: Cohort) -> None:
    _, event = ClientDesk(training.core).answer(DrainRequest("b", "a\n" * 9999))
    assert isinstance(event, DrainAsked)
    assert event.source == "a?" * (MAX_SOURCE_CHARS // 2)
