"""A daemon's end of a bulk connection with its shared memory, on a hub's other end."""

import os
import queue
import socket

import numpy as np

from flodl.averaging.shared import SharedPlane
from flodl.controller.bulk import BulkHub
from flodl.core.events import HostEvent
from flodl.messages import HostHello, Layout
from flodl.runtime.processes import create_memfd
from flodl.wire.chunks import ChunkHeader, pack_header
from flodl_daemon.bulk import BulkLink
from flodl_daemon.inbox import HostInbox

LAYOUT = Layout(600_000, 100, 77)  # three chunks
LIMIT_S = 30.0
MEMORY_BYTES = 1 << 30


def hello(host: str) -> HostHello:
    return HostHello(host, 1, "m", "127.0.0.1", (), 1, "", "", "")


class Host:
    """A daemon's end with its shared memory."""

    def __init__(self, hub: BulkHub, name: str, value: float) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self.events: queue.Queue[HostEvent] = queue.Queue()
        self.plane_fd = create_memfd("plane")
        self.plane = SharedPlane(self.plane_fd, 1)
        self.inbox = HostInbox(MEMORY_BYTES)
        self.inbox.open()
        self.link = BulkLink(ours, self.events.put)
        self.link.greet(hello(name))
        self.end = hub.link(name, theirs)
        assert self.end.greeting(LIMIT_S) == hello(name)
        assert hub.attach(self.end)
        self.link.start(self.plane, self.inbox)
        self.fill(value)

    def fill(self, value: float) -> None:
        image = np.frombuffer(self.plane.result(LAYOUT), np.float32, LAYOUT.f32_count)
        image[:] = value

    @property
    def values(self) -> set[float]:
        return set(np.frombuffer(self.plane.result(LAYOUT), np.float32, LAYOUT.f32_count).tolist())

    def send(self, transfer: int, data: bytes, rank: int = 0) -> bool:
        """A rank's state goes up; the rank is gone before it has left."""
        fd = outbox(data)
        try:
            return self.link.stream_state(rank, transfer, len(data), fd)
        finally:
            os.close(fd)

    def send_chunk(self, header: ChunkHeader) -> None:
        self.link._frames.send_buffers(pack_header(header), b"x" * header.length_bytes)

    @property
    def received(self) -> bytes:
        """What the inbox holds."""
        return os.pread(self.inbox.fd, os.fstat(self.inbox.fd).st_size, 0)

    def close(self) -> None:
        self.link.close()
        self.end.close()
        os.close(self.plane_fd)
        self.inbox.close()


def outbox(data: bytes) -> int:
    fd = create_memfd("outbox")
    os.write(fd, data)
    return fd
