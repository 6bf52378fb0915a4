"""The inbox: order, orders carried out by the taker, and room."""

import threading
from collections.abc import Callable
from typing import Any

from flodl.core.events import DaemonDropped, Ticked
from flodl.rank import inbox as inbox_module
from flodl.rank.inbox import Inbox


def test_events_come_out_in_the_order_they_went_in() -> None:
    inbox = Inbox()
    inbox.post(Ticked())
    inbox.put(DaemonDropped())

    assert not inbox.is_empty
    assert [inbox.take(0.0), inbox.take(0.0)] == [Ticked(), DaemonDropped()]
    assert inbox.is_empty
    assert inbox.take(0.0) is None


def test_an_order_is_carried_out_by_the_thread_that_takes_it() -> None:
    inbox, ran_in = Inbox(), []

    def order() -> Ticked:
        ran_in.append(threading.current_thread())
        return Ticked()

    sender = threading.Thread(target=inbox.post, args=(order,))
    sender.start()

    assert inbox.take(5.0) == Ticked()
    assert ran_in == [threading.current_thread()]
    sender.join()


def test_who_waited_for_nothing_is_told() -> None:
    idle: list[int] = []
    inbox = Inbox(lambda: idle.append(1))
    inbox.post(Ticked())

    assert (inbox.take(0.0), idle) == (Ticked(), [])
    assert (inbox.take(0.0), idle) == (None, [1])


def test_a_flood_waits_outside(monkeypatch: Any, wait_until: Callable[..., Any]) -> None:
    monkeypatch.setattr(inbox_module, "MAX_WAITING", 2)
    inbox, sent = Inbox(), []

    def flood() -> None:
        for number in range(4):
            inbox.put(Ticked())
            sent.append(number)

    thread = threading.Thread(target=flood)
    thread.start()
    wait_until(lambda: len(sent) == 2, 5.0, "two events fit")
    inbox.post(DaemonDropped())  # an effect never waits

    taken = [inbox.take(5.0) for _ in range(5)]

    thread.join()
    assert taken.count(Ticked()) == 4
    assert taken[2] == DaemonDropped()
