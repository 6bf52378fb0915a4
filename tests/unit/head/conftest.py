"""A controller's port inside the test: the real mux, with a script of words to the head."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.messages import ToHead
from flodl.runtime.certificate import Security
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.runtime.streams import ConnectionLost, FramedStream

TOKEN = bytes(range(32))
CONNECT_S = 120.0
"""The head may be a process that imports torch on a busy machine."""


class ControllerPort:
    """Serves on a thread; ``heard`` is what the head said."""

    def __init__(self, token_file: Path) -> None:
        self.heard: list[Any] = []
        self.roles: list[str] = []
        self.is_dropped = threading.Event()
        self._stream: FramedStream | None = None
        self._connected = threading.Event()
        self._listeners = listen("127.0.0.1", 0)
        token_file.write_text(TOKEN.hex())
        self.ticket = {
            "run_id": "run-1",
            "address": f"127.0.0.1:{port_of(self._listeners)}",
            "token_file": str(token_file),
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    def say(self, message: ToHead) -> None:
        """Send ``message`` once the head is connected."""
        assert self._connected.wait(CONNECT_S), "the head does not connect"
        assert self._stream is not None
        self._loop.call_soon_threadsafe(self._stream.send, message)

    def drop(self) -> None:
        """Cut the head's connection."""
        assert self._connected.wait(CONNECT_S), "the head does not connect"
        assert self._stream is not None
        self._loop.call_soon_threadsafe(self._stream.abort)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(30.0)
        self._loop.close()

    async def _serve(self) -> None:
        handlers = Handlers(self._control, self._control, self._http, self._http)  # type: ignore[arg-type]
        mux = PortMux(self._listeners, Run("run-1", TOKEN), handlers, MonotonicClock(), Security())
        self._serving = asyncio.create_task(mux.serve())
        await asyncio.wait([self._serving])
        for listener in self._listeners:
            listener.close()

    async def _control(self, peer: Any, stream: FramedStream) -> None:
        self.roles.append(peer.role)
        self._stream = stream
        self._connected.set()
        async with stream:
            try:
                while True:
                    self.heard.append(await stream.receive())
            except ConnectionLost:
                self.is_dropped.set()

    async def _http(self, line: Any) -> None:
        line.sock.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerPort]:
    port = ControllerPort(tmp_path / "token")
    yield port
    port.close()
