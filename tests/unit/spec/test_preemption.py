"""SIGTERM and SIGUSR1: the first stops, one that comes much later ends, a handler of the script's own stays."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from flodl.spec import preemption
from flodl.spec.preemption import PREEMPTIONS, exit_code_of, on_preemption, stop_when_preempted


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in PREEMPTIONS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def died(monkeypatch: pytest.MonkeyPatch) -> list[signal.Signals]:
    """By which signals the process would have ended."""
    numbers: list[signal.Signals] = []
    monkeypatch.setattr(preemption, "die_of", numbers.append)
    return numbers


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", PREEMPTIONS)
def test_the_first_stops_and_what_follows_soon_is_the_same(
    number: signal.Signals, died: list[signal.Signals], capsys: pytest.CaptureFixture[str]
) -> None:
    stops: list[signal.Signals] = []
    stop_when_preempted(stops.append, lambda: False)
    for each in (number, *PREEMPTIONS, number):
        send(each)
    assert (stops, died) == ([number], [])
    assert capsys.readouterr().err == f"\nflodl: {number.name}: stopping in order\n"


def test_sigterm_that_comes_later_ends_at_once(died: list[signal.Signals], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "REPEAT_S", -1.0)
    stops: list[signal.Signals] = []
    stop_when_preempted(stops.append, lambda: False)
    for each in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        send(each)
    assert (stops, died) == ([signal.SIGUSR1], [signal.SIGTERM])


@pytest.mark.parametrize("number", PREEMPTIONS)
def test_after_the_training_the_signal_ends(number: signal.Signals, died: list[signal.Signals]) -> None:
    stop_when_preempted(lambda _: pytest.fail("it is over"), lambda: True)
    send(number)
    assert died == [number]


def test_handler_of_the_script_stays() -> None:
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: own.append(number))
    heard: list[signal.Signals] = []
    on_preemption(heard.append)
    send(signal.SIGTERM)
    send(signal.SIGUSR1)
    assert (own, heard) == ([signal.SIGTERM], [signal.SIGUSR1])


def test_later_training_has_the_say() -> None:
    heard: list[str] = []
    on_preemption(lambda _: heard.append("first"))
    on_preemption(lambda _: heard.append("second"))
    send(signal.SIGUSR1)
    assert heard == ["second"]


def test_other_threads_leave_signals_alone() -> None:
    thread = threading.Thread(target=on_preemption, args=(lambda _: None,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", PREEMPTIONS)
def test_forked_process_has_the_signals_as_they_were(number: signal.Signals) -> None:
    on_preemption(lambda _: None)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number


def test_exit_codes_are_a_shells() -> None:
    assert [exit_code_of(number) for number in PREEMPTIONS] == [143, 138]
