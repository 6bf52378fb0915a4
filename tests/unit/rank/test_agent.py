"""The agent over a real socketpair: what it says by itself, where what it hears goes, and the daemon's end."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flodl.core.events import DaemonDropped, DaemonSaid
from flodl.errors import DeadlineExceeded
from flodl.messages import Admitted, DaemonToRank, RankAlive, RankHello, RankToDaemon, StoreReply, StoreRequest
from flodl.rank.agent import Agent
from flodl.rank.inbox import Inbox
from flodl.runtime.blocking import BlockingFrames

LIMIT_S = 20.0


@dataclass
class Pair:
    agent: Agent
    inbox: Inbox
    daemon: BlockingFrames

    def hear(self, kind: type) -> Any:
        """The next message of ``kind``."""
        for _ in range(100):
            message = self.daemon.receive(LIMIT_S)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr("flodl.rank.agent.HEARTBEAT_S", 0.02)
    mine, theirs = socket.socketpair()
    inbox = Inbox()
    agent = Agent(3, BlockingFrames(theirs, "daemon", DaemonToRank), inbox)
    pair = Pair(agent, inbox, BlockingFrames(mine, "rank 3", RankToDaemon))
    agent.start()
    yield pair
    pair.daemon.close()


def test_it_introduces_itself_first_and_beats_with_the_step_count(pair: Pair) -> None:
    hello = pair.daemon.receive(LIMIT_S)
    pair.agent.report_steps(lambda: 41)

    assert isinstance(hello, RankHello)
    assert hello.rank == 3
    assert any(pair.hear(RankAlive) == RankAlive(3, 41) for _ in range(50))


def test_messages_go_to_the_inbox_in_order(pair: Pair) -> None:
    for world_size in (1, 2, 3):
        pair.daemon.send(Admitted(3, world_size, (3,)))

    assert [pair.inbox.take(LIMIT_S) for _ in range(3)] == [DaemonSaid(Admitted(3, n, (3,))) for n in (1, 2, 3)]


def test_a_rendezvous_call_gets_its_own_answer_whatever_the_order(pair: Pair) -> None:
    answers: dict[str, Any] = {}

    def ask(key: str) -> None:
        answers[key] = pair.agent.ask_store("get", (key,), (), 1000, LIMIT_S)

    threads = [threading.Thread(target=ask, args=(key,)) for key in ("a", "b")]
    for thread in threads:
        thread.start()
    requests: list[StoreRequest] = [pair.hear(StoreRequest) for _ in threads]
    pair.daemon.send(StoreReply(3, 999, True, (b"nobody asked",), 0))
    for request in reversed(requests):
        pair.daemon.send(StoreReply(3, request.request, True, (request.keys[0].encode() * 2,), 7))
    for thread in threads:
        thread.join(LIMIT_S)

    assert answers == {"a": (True, (b"aa",), 7), "b": (True, (b"bb",), 7)}
    assert pair.inbox.is_empty


def test_a_rendezvous_call_ends_at_its_deadline(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded, match=r"get of k: no answer within 0\.05 s"):
        pair.agent.ask_store("get", ("k",), (), 0, 0.05)


def test_the_daemons_end_frees_everyone(pair: Pair, wait_until: Callable[..., Any]) -> None:
    errors: list[str] = []

    def ask() -> None:
        try:
            pair.agent.ask_store("get", ("k",), (), 0, LIMIT_S)
        except DeadlineExceeded as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    pair.hear(StoreRequest)
    pair.daemon.close()

    assert pair.inbox.take(LIMIT_S) == DaemonDropped()
    thread.join(LIMIT_S)
    assert errors == ["rendezvous: get of k: the host's daemon is gone"]
    pair.agent.send(RankAlive(3, 0))  # says nothing to nobody
