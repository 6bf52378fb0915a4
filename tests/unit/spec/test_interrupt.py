"""Ctrl-C: the first stops, the second interrupts, a handler of the script's own stays."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flodl.spec.interrupt import stop_on_interrupt


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_stops_and_the_second_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    stops: list[str] = []
    stop_on_interrupt(lambda: stops.append("stop"), lambda: False)

    interrupt()
    assert stops == ["stop"]
    assert "Ctrl-C again ends at once" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_after_the_end_of_training_the_first_interrupts() -> None:
    stops: list[str] = []
    stop_on_interrupt(lambda: stops.append("stop"), lambda: True)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not stops


def test_in_another_thread_ctrl_c_stays_what_it_was() -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(stop_on_interrupt, lambda: pytest.fail("not ours"), lambda: False).result(30.0)

    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_the_scripts_own_handler_is_left_alone() -> None:
    own: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: own.append(number))
    stop_on_interrupt(lambda: pytest.fail("not ours"), lambda: False)

    interrupt()

    assert own == [signal.SIGINT]
