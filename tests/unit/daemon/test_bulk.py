"""Bulk data between a controller's hub and daemons' links over real sockets: sums, states, and what goes wrong."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flodl.averaging.shared import SharedPlane
from flodl.controller.bulk import Arrived, BulkHub
from flodl.core.events import ControllerDropped, HostEvent, SumReturned
from flodl.errors import DeadlineExceeded, RemoteProtocolError
from flodl.ids import RoundKey
from flodl.messages import Beat, HostHello, Layout, ToDaemon
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.processes import create_memfd
from flodl.wire.chunks import HEADER_BYTES, ChunkHeader, ChunkKind, pack_header, unpack_header
from flodl_daemon.bulk import BulkLink

KEY = RoundKey(1, 2, 0)
LAYOUT = Layout(600_000, 100, 77)  # three chunks
LIMIT_S = 30.0


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
        self.link = BulkLink(ours, self.events.put)
        self.link.greet(hello(name))
        self.end = hub.link(name, theirs)
        assert self.end.greeting(LIMIT_S) == hello(name)
        assert hub.attach(self.end)
        self.link.start(self.plane)
        self.fill(value)

    def fill(self, value: float) -> None:
        image = np.frombuffer(self.plane.result(LAYOUT), np.float32, LAYOUT.f32_count)
        image[:] = value

    @property
    def values(self) -> set[float]:
        return set(np.frombuffer(self.plane.result(LAYOUT), np.float32, LAYOUT.f32_count).tolist())

    def close(self) -> None:
        self.link.close()
        self.end.close()
        os.close(self.plane_fd)


class Yard:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrived: queue.Queue[Arrived] = queue.Queue()
        self.hub = BulkHub(folder, self.arrived.put)
        self.hosts: list[Host] = []

    def host(self, name: str, value: float = 0.0) -> Host:
        self.hosts.append(Host(self.hub, name, value))
        return self.hosts[-1]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    made.hub.close()
    for host in made.hosts:
        host.close()


def outbox(data: bytes) -> int:
    fd = create_memfd("outbox")
    os.write(fd, data)
    return fd


def test_the_total_of_all_hosts_comes_back_to_each(yard: Yard) -> None:
    a, b = yard.host("a", 1.0), yard.host("b", 2.5)
    yard.hub.open_sum(KEY, ("a", "b"), LAYOUT)
    for host in (a, b):
        host.link.stream_sum(KEY, LAYOUT)
    for host in (a, b):
        assert host.events.get(timeout=LIMIT_S) == SumReturned(KEY)
        assert host.values == {3.5}


def test_the_total_crosses_in_half_the_bytes_and_is_the_same_everywhere(yard: Yard) -> None:
    a, b = yard.host("a", 1.0 + 2**-9), yard.host("b", 2.5)  # 1.001953125 is no bfloat16
    yard.hub.open_sum(KEY, ("a", "b"), LAYOUT, bf16=True)
    for host in (a, b):
        host.link.stream_sum(KEY, LAYOUT, bf16=True)
    for host in (a, b):
        assert host.events.get(timeout=LIMIT_S) == SumReturned(KEY)
        assert host.values == {3.5}
    images = [bytes(host.plane.result(LAYOUT)) for host in (a, b)]
    assert images[0] == images[1]


def test_a_cancelled_round_writes_nothing_into_the_next(yard: Yard) -> None:
    """The old total is under way when the round is cancelled: it must not land in the memory of the new one."""
    ours, theirs = socket.socketpair()
    events: queue.Queue[HostEvent] = queue.Queue()
    fd = create_memfd("plane")
    plane = SharedPlane(fd, 1)
    link = BulkLink(ours, events.put)
    link.start(plane)
    frames = BlockingFrames(theirs, "daemon", ToDaemon)
    total = LAYOUT.total_bytes
    link.stream_sum(KEY, LAYOUT)
    _read_sum(frames)
    length = 1 << 20
    frames.send_buffers(pack_header(ChunkHeader(ChunkKind.SUM_DOWN, KEY, 0, length, total)), b"\x01" * (length // 2))
    link.cancel(KEY)
    newer = RoundKey(1, 2, 1)
    link.stream_sum(newer, LAYOUT)
    _read_sum(frames)
    frames.send_buffers(b"\x01" * (length // 2))  # the rest of the old chunk
    for offset in range(0, total, length):
        piece = b"\x02" * min(length, total - offset)
        frames.send_buffers(pack_header(ChunkHeader(ChunkKind.SUM_DOWN, newer, offset, len(piece), total)), piece)
    assert events.get(timeout=LIMIT_S) == SumReturned(newer)
    assert set(bytes(plane.result(LAYOUT))) == {2}
    link.close()
    frames.close()
    os.close(fd)


def _read_sum(frames: BlockingFrames) -> None:
    left = LAYOUT.total_bytes
    while left:
        raw = bytearray(HEADER_BYTES)
        frames.receive_into(raw, LIMIT_S)
        size = unpack_header(raw).length_bytes
        frames.receive_into(bytearray(size), LIMIT_S)
        left -= size


@pytest.mark.parametrize("change", [{"key": RoundKey(9, 9, 9)}, {"total_bytes": 4 << 20}])
def test_bytes_of_a_round_that_is_not_open_are_read_past(yard: Yard, change: dict[str, Any]) -> None:
    a = yard.host("a", 1.0)
    yard.hub.open_sum(KEY, ("a",), LAYOUT)
    fields = {"kind": ChunkKind.SUM_UP, "key": KEY, "offset_bytes": 0, "length_bytes": 64, "total_bytes": 64}
    header = ChunkHeader(**{**fields, "total_bytes": LAYOUT.total_bytes, **change})
    a.link._frames.send_buffers(pack_header(header), b"\xff" * 64)
    a.link.stream_sum(KEY, LAYOUT)
    assert a.events.get(timeout=LIMIT_S) == SumReturned(KEY)
    assert a.values == {1.0}


def test_a_state_arrives_whole_in_a_private_file_whatever_becomes_of_its_rank(yard: Yard) -> None:
    data = os.urandom((2 << 20) + 5)
    fd = outbox(data)
    assert yard.host("a").link.stream_state(3, len(data), fd)
    os.close(fd)
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert (arrived.host, arrived.rank, arrived.size_bytes, arrived.error) == ("a", 3, len(data), "")
    assert arrived.path is not None
    assert arrived.path.read_bytes() == data
    assert arrived.path.stat().st_mode & 0o777 == 0o600


def test_states_of_two_ranks_at_once_do_not_mix(yard: Yard) -> None:
    sent = {0: b"a" * (3 << 20), 1: b"b" * (3 << 20)}
    for rank, host in enumerate((yard.host("a"), yard.host("b"))):
        fd = outbox(sent[rank])
        host.link.stream_state(rank, len(sent[rank]), fd)
        os.close(fd)
    for arrived in (yard.arrived.get(timeout=LIMIT_S), yard.arrived.get(timeout=LIMIT_S)):
        assert arrived.path is not None
        assert arrived.path.read_bytes() == sent[arrived.rank]


@pytest.mark.parametrize("size", [0, -1, 101, 1 << 60])
def test_a_state_that_is_not_there_is_not_sent(yard: Yard, size: int) -> None:
    fd = outbox(b"x" * 100)
    assert not yard.host("a").link.stream_state(0, size, fd)
    os.close(fd)


def test_a_disk_that_does_not_take_the_state_is_told_and_the_connection_lives(yard: Yard, tmp_path: Path) -> None:
    yard.hub.folder = tmp_path / "nowhere"
    a = yard.host("a", 1.0)
    fd = outbox(b"x" * (2 << 20))
    a.link.stream_state(0, 2 << 20, fd)
    os.close(fd)
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert arrived.path is None
    assert "nowhere" in arrived.error
    yard.hub.open_sum(KEY, ("a",), LAYOUT)
    a.link.stream_sum(KEY, LAYOUT)
    assert a.events.get(timeout=LIMIT_S) == SumReturned(KEY)


def test_a_state_that_breaks_off_leaves_no_file(yard: Yard, tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    a = yard.host("a")
    header = ChunkHeader(ChunkKind.STATE_UP, 0, 0, 64, 128)
    a.link._frames.send_buffers(pack_header(header), b"x" * 64)
    wait_until(lambda: list(tmp_path.iterdir()), LIMIT_S, "the temporary file")
    a.link.close()
    wait_until(lambda: not list(tmp_path.iterdir()), LIMIT_S, "its removal")


@pytest.mark.parametrize(("offset", "key"), [(64, 0), (128, 0), (64, 1)], ids=["again", "gap", "other rank"])
def test_a_state_out_of_order_ends_the_connection(yard: Yard, offset: int, key: int) -> None:
    a = yard.host("a")
    for header in (
        ChunkHeader(ChunkKind.STATE_UP, 0, 0, 64, 1024),
        ChunkHeader(ChunkKind.STATE_UP, 0, 64, 64, 1024),
        ChunkHeader(ChunkKind.STATE_UP, key, offset if key == 0 and offset == 64 else offset + 64, 64, 1024),
    ):
        a.link._frames.send_buffers(pack_header(header), b"x" * 64)
    assert isinstance(a.events.get(timeout=LIMIT_S), ControllerDropped)


def test_a_host_has_one_connection(yard: Yard) -> None:
    yard.host("a")
    ours, theirs = socket.socketpair()
    second = yard.hub.link("a", theirs)
    assert not yard.hub.attach(second)
    second.close()
    ours.close()


def test_a_greeting_is_bounded_in_time_and_kind(yard: Yard) -> None:
    ours, theirs = socket.socketpair()
    link = yard.hub.link("a", theirs)
    with pytest.raises(DeadlineExceeded):
        link.greeting(0.05)
    BlockingFrames(ours, "controller", ToDaemon).send(Beat("a", ()))
    with pytest.raises(RemoteProtocolError):
        link.greeting(LIMIT_S)
    link.close()
    ours.close()


def test_no_thread_outlives_its_connection(yard: Yard, wait_until: Callable[..., Any]) -> None:
    yard.host("only-here")
    assert any("only-here" in thread.name for thread in threading.enumerate())
    yard.hub.drop("only-here")
    assert isinstance(yard.hosts[0].events.get(timeout=LIMIT_S), ControllerDropped)
    yard.hosts[0].link.close()
    wait_until(lambda: not any("only-here" in t.name for t in threading.enumerate()), LIMIT_S, "their end")
