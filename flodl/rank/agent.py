"""The rank's agent: the socket to the daemon, beside the thread that trains.

One thread reads: answers of the rendezvous go to whoever waits for them, everything else into the inbox. Another says
that the rank is alive, whatever the training thread is doing. Any thread may send.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from typing import Final

from flodl.core.events import DaemonDropped, DaemonSaid
from flodl.errors import DeadlineExceeded, RemoteProtocolError
from flodl.ids import RankId
from flodl.messages import RankAlive, RankHello, RankToDaemon, StoreReply, StoreRequest
from flodl.rank.inbox import Inbox
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.streams import ConnectionLost

HEARTBEAT_S: Final = 1.0
READ_S: Final = 3600.0
"""The daemon speaks when it has something to say; its death closes the socket, which ends the wait at once."""


class Agent:
    """Talks to the daemon for one rank."""

    def __init__(self, rank: RankId, frames: BlockingFrames, inbox: Inbox) -> None:
        """``frames`` accepts ``messages.DaemonToRank``."""
        self._rank, self._frames, self._inbox = rank, frames, inbox
        self._count_steps: Callable[[], int] = lambda: 0
        self._requests = itertools.count()
        self._replies = threading.Condition()
        self._waiting: dict[int, StoreReply | None] = {}
        self._over = threading.Event()

    def start(self) -> None:
        """Introduce the rank, then listen and beat until the process ends."""
        self.send(RankHello(self._rank, os.getpid()))
        for target, name in ((self._read, "flodl-agent"), (self._beat, "flodl-heartbeat")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def report_steps(self, count_steps: Callable[[], int]) -> None:
        """Let the heartbeat carry the step counter; it is read from the heartbeat's thread."""
        self._count_steps = count_steps

    def send(self, message: RankToDaemon) -> None:
        """Say something. A daemon that is gone hears nothing: the reader tells the core."""
        with contextlib.suppress(ConnectionLost):
            self._frames.send(message)

    def ask_store(
        self, op: str, keys: tuple[str, ...], values: tuple[bytes, ...], number: int, timeout_s: float
    ) -> tuple[bool, tuple[bytes, ...], int]:
        """One call on the run's rendezvous table, from any thread: ``averaging.store.StoreCall``.

        Raises:
            DeadlineExceeded: no answer within ``timeout_s``, or the daemon is gone.
        """
        request = next(self._requests)
        with self._replies:
            self._waiting[request] = None
        self.send(StoreRequest(self._rank, request, op, keys, values, number))
        with self._replies:
            self._replies.wait_for(lambda: self._waiting[request] is not None or self._over.is_set(), timeout_s)
            reply = self._waiting.pop(request)
        if reply is None:
            why = "the host's daemon is gone" if self._over.is_set() else f"no answer within {timeout_s:g} s"
            raise DeadlineExceeded(f"rendezvous: {op} of {', '.join(keys)}: {why}")
        return reply.found, reply.values, reply.number

    def _read(self) -> None:
        while True:
            try:
                message = self._frames.receive(READ_S)
            except DeadlineExceeded:
                continue
            except (ConnectionLost, RemoteProtocolError):
                break
            if isinstance(message, StoreReply):
                self._answer(message)
            else:
                self._inbox.put(DaemonSaid(message))  # type: ignore[arg-type]  # the frames let nothing else through
        with self._replies:
            self._over.set()
            self._replies.notify_all()
        self._inbox.post(DaemonDropped())

    def _answer(self, reply: StoreReply) -> None:
        with self._replies:
            if reply.request in self._waiting:
                self._waiting[reply.request] = reply
                self._replies.notify_all()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            self.send(RankAlive(self._rank, self._count_steps()))
