"""CollectivePlane without peers: misuse, a rank alone, an address that is not ours."""

import threading

import pytest
import torch

from flodl.averaging.collective import CollectivePlane
from flodl.errors import DeadlineExceeded, LocalProtocolError
from flodl.messages import Layout

LAYOUT = Layout(10, 2, 3)


def no_controller(
    op: str, keys: tuple[str, ...], values: tuple[bytes, ...], number: int, timeout_s: float
) -> tuple[bool, tuple[bytes, ...], int]:
    raise DeadlineExceeded("the controller does not answer")


def form_and_wait(plane: CollectivePlane, ranks: list[int]) -> str:
    errors: list[str] = []
    ended = threading.Event()
    plane.form(1, 0, ranks, ranks[0], 5.0, lambda error: (errors.append(error), ended.set()))
    assert ended.wait(10)
    return errors[0]


def test_reducing_without_a_group_is_refused() -> None:
    plane = CollectivePlane(no_controller, torch.device("cpu"), "127.0.0.1")

    with pytest.raises(LocalProtocolError, match="no group stands"):
        plane.all_reduce(LAYOUT, include_raw=True, on_done=lambda _: None)


def test_a_rank_alone_needs_no_controller() -> None:
    plane = CollectivePlane(no_controller, torch.device("cpu"), "127.0.0.1")
    assert form_and_wait(plane, [4]) == ""
    plane.side_buffer(LAYOUT).fill_(7)
    errors: list[str] = []

    plane.all_reduce(LAYOUT, include_raw=True, on_done=errors.append)

    assert errors == [""]
    assert plane.side_buffer(LAYOUT).unique().tolist() == [7]
    plane.abandon()
    assert (plane.parked_bytes, plane.must_hard_exit, plane.backend) == (0, False, "gloo")


def test_an_error_of_the_rendezvous_is_the_formations_error() -> None:
    plane = CollectivePlane(no_controller, torch.device("cpu"), "127.0.0.1")

    assert "the controller does not answer" in form_and_wait(plane, [0, 1])


def test_an_address_that_is_not_ours_is_the_formations_error() -> None:
    plane = CollectivePlane(no_controller, torch.device("cpu"), "192.0.2.1")

    assert form_and_wait(plane, [0, 1])
