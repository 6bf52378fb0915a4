"""Bulk data between a controller's hub and daemons' links over real sockets: sums, states, and what goes wrong."""

import contextlib
import errno
import hashlib
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.averaging.shared import SharedPlane
from flodl.controller import states
from flodl.controller.bulk import QUEUED_STATES, BulkHub
from flodl.controller.states import Arrived, private_file
from flodl.core.events import ControllerDropped, HostEvent, StateLanded, SumReturned
from flodl.errors import DeadlineExceeded, RemoteProtocolError
from flodl.ids import RoundKey
from flodl.messages import Beat, ToDaemon
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.processes import create_memfd
from flodl.wire.chunks import HEADER_BYTES, ChunkHeader, ChunkKind, chunk_ranges, pack_header, unpack_header
from flodl_daemon.bulk import BulkLink
from flodl_daemon.inbox import HostInbox
from tests.unit.daemon.bulk_host import LAYOUT, LIMIT_S, MEMORY_BYTES, Host, outbox

KEY = RoundKey(1, 2, 0)


class Yard:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrived: queue.Queue[Arrived] = queue.Queue()
        self.hub = BulkHub()
        self.hosts: list[Host] = []

    def expect(self, transfer: int, host: str, or_memory: bool = False) -> None:
        self.hub.expect(transfer, host, lambda: private_file(self.folder), self.arrived.put, or_memory)

    def send_down(self, transfer: int, hosts: tuple[str, ...], data: bytes, size: int | None = None) -> None:
        """``size`` may claim more than the file has."""
        path = self.folder / "bundle.fdl"
        path.write_bytes(data)
        with path.open("rb") as file:
            self.hub.send_state(transfer, hosts, file.fileno(), len(data) if size is None else size)

    def sum_still_works(self, host: Host) -> bool:
        self.hub.open_sum(KEY, (host.name,), LAYOUT)
        host.link.stream_sum(KEY, LAYOUT)
        return host.events.get(timeout=LIMIT_S) == SumReturned(KEY)

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
    link.start(plane, HostInbox(MEMORY_BYTES))
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
        left -= _read_chunk(frames).length_bytes


def _read_chunk(frames: BlockingFrames) -> ChunkHeader:
    raw = bytearray(HEADER_BYTES)
    frames.receive_into(raw, LIMIT_S)
    header = unpack_header(raw)
    frames.receive_into(bytearray(header.length_bytes), LIMIT_S)
    return header


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


# ------------------------------------------------------------------------------------------------------- states go up
def test_a_state_arrives_whole_where_it_is_expected_whatever_becomes_of_its_rank(yard: Yard) -> None:
    data = os.urandom((2 << 20) + 5)
    yard.expect(7, "a")
    assert yard.host("a").send(7, data)
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert (arrived.transfer, arrived.host, arrived.size_bytes, arrived.error) == (7, "a", len(data), None)
    assert arrived.sha256 == hashlib.sha256(data).hexdigest()
    assert arrived.path is not None
    assert arrived.path.read_bytes() == data
    assert arrived.path.stat().st_mode & 0o777 == 0o600


def test_states_of_two_hosts_at_once_do_not_mix(yard: Yard) -> None:
    sent = {1: b"a" * (3 << 20), 2: b"b" * (3 << 20)}
    for transfer, host in ((1, yard.host("a")), (2, yard.host("b"))):
        yard.expect(transfer, host.name)
        host.send(transfer, sent[transfer])
    for arrived in (yard.arrived.get(timeout=LIMIT_S), yard.arrived.get(timeout=LIMIT_S)):
        assert arrived.path is not None
        assert arrived.path.read_bytes() == sent[arrived.transfer]


@pytest.mark.parametrize(("transfer", "host"), [(2, "a"), (1, "b")])
def test_a_state_that_nobody_expects_is_read_past(yard: Yard, tmp_path: Path, transfer: int, host: str) -> None:
    yard.expect(transfer, host)
    a = yard.host("a")
    a.send(1, b"x" * (2 << 20))
    assert yard.sum_still_works(a)
    assert list(tmp_path.iterdir()) == []
    assert yard.arrived.empty()


def test_a_state_that_is_forgotten_on_its_way_leaves_no_file_and_is_not_heard_of(
    yard: Yard, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    a = yard.host("a")
    yard.expect(1, "a")
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 1, 0, 64, 128))
    wait_until(lambda: list(tmp_path.iterdir()), LIMIT_S, "the file")
    yard.hub.forget(1)
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 1, 64, 64, 128))
    yard.expect(2, "a")
    a.send(2, b"next")
    assert yard.arrived.get(timeout=LIMIT_S).transfer == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_state_that_is_forgotten_while_the_disk_takes_it_leaves_no_file(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    is_syncing, may_end, sync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        is_syncing.set()
        assert may_end.wait(LIMIT_S)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    a = yard.host("a")
    yard.expect(1, "a")
    a.send(1, b"x" * 100)
    assert is_syncing.wait(LIMIT_S)
    assert yard.sum_still_works(a)  # no sum waits for the disk
    yard.hub.forget(1)
    may_end.set()
    wait_until(lambda: not list(tmp_path.iterdir()), LIMIT_S, "its removal")
    assert yard.arrived.empty()


def test_a_sum_overtakes_the_state_that_is_being_sent_up() -> None:
    """Nobody reads the state at first: the sum goes before what of it has not left yet."""
    ours, theirs = socket.socketpair()
    link, frames, size = BulkLink(ours, lambda event: None), BlockingFrames(theirs, "daemon", ToDaemon), 64 << 20
    fd, plane_fd = create_memfd("outbox"), create_memfd("plane")
    os.ftruncate(fd, size)
    link.start(SharedPlane(plane_fd, 1), HostInbox(MEMORY_BYTES))
    assert link.stream_state(0, 1, size, fd)
    link.stream_sum(KEY, LAYOUT)
    kinds = [_read_chunk(frames).kind for _ in range(8)]
    assert kinds.count(ChunkKind.SUM_UP) == 3
    link.close()
    frames.close()
    os.close(fd)
    os.close(plane_fd)


def test_a_state_that_its_rank_overwrites_does_not_arrive_and_the_next_one_does(yard: Yard) -> None:
    a = yard.host("a")
    fd = outbox(b"x" * 100)
    yard.expect(1, "a")
    yard.expect(2, "a")
    with a.link._news:  # the sender takes the state up when it is too late
        a.link.stream_state(0, 1, 100, fd)
        os.ftruncate(fd, 0)
    os.close(fd)
    a.send(2, b"next")
    assert yard.arrived.get(timeout=LIMIT_S).transfer == 2


@pytest.mark.parametrize("size", [0, -1, 101, 1 << 60])
def test_a_state_that_is_not_there_is_not_sent(yard: Yard, size: int) -> None:
    fd = outbox(b"x" * 100)
    assert not yard.host("a").link.stream_state(0, 1, size, fd)
    os.close(fd)


def test_a_folder_that_is_not_there_is_told_and_the_connection_lives(yard: Yard, tmp_path: Path) -> None:
    yard.folder = tmp_path / "nowhere"
    a = yard.host("a")
    yard.expect(1, "a")
    a.send(1, b"x" * (2 << 20))
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert arrived.path is None
    assert isinstance(arrived.error, FileNotFoundError)
    assert yard.sum_still_works(a)


def no_space(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_does_not_take_the_state_is_told_and_nothing_is_left(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    a = yard.host("a")
    yard.expect(1, "a")
    fd = outbox(b"x" * (2 << 20))
    monkeypatch.setattr(states.os, call, no_space)
    a.link.stream_state(0, 1, 2 << 20, fd)
    arrived = yard.arrived.get(timeout=LIMIT_S)
    monkeypatch.undo()
    os.close(fd)
    assert (arrived.path, arrived.error and arrived.error.errno) == (None, errno.ENOSPC)
    assert list(tmp_path.iterdir()) == []
    assert yard.sum_still_works(a)


def spoil_disk(monkeypatch: pytest.MonkeyPatch, yard: Yard, fault: str) -> None:
    """What goes to memory is untouched."""
    write = os.write

    def has_room_for_one_chunk(fd: int, data: memoryview) -> int:
        if os.fstat(fd).st_nlink and os.fstat(fd).st_size >= 1 << 20:
            no_space()
        return write(fd, data)

    def loses_what_it_had(fd: int, data: memoryview) -> int:
        if os.fstat(fd).st_nlink and os.fstat(fd).st_size >= 1 << 20:
            os.ftruncate(fd, 1 << 19)
            no_space()
        return write(fd, data)

    def loses_what_it_had_at_last(fd: int) -> None:
        os.pwrite(fd, bytes(1 << 10), 1 << 20)
        no_space()

    match fault:
        case "folder":
            yard.folder /= "nowhere"
        case "write":
            monkeypatch.setattr(states.os, "write", has_room_for_one_chunk)
        case "fsync":
            monkeypatch.setattr(states.os, "fsync", no_space)
        case "lossy write":
            monkeypatch.setattr(states.os, "write", loses_what_it_had)
        case "lossy fsync":
            monkeypatch.setattr(states.os, "fsync", loses_what_it_had_at_last)


@pytest.mark.parametrize("fault", ["folder", "write", "fsync"])
def test_a_state_that_the_disk_does_not_take_is_kept_in_memory(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    a, data = yard.host("a"), os.urandom((3 << 20) + 7)
    yard.expect(4, "a", or_memory=True)
    spoil_disk(monkeypatch, yard, fault)
    a.send(4, data)
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert (arrived.transfer, arrived.host, arrived.size_bytes) == (4, "a", len(data))
    assert arrived.sha256 == hashlib.sha256(data).hexdigest()
    assert arrived.error is not None
    assert arrived.error.errno == (errno.ENOENT if fault == "folder" else errno.ENOSPC)
    assert arrived.path is not None
    assert arrived.path.read_bytes() == data
    assert list(tmp_path.iterdir()) == []
    arrived.discard()
    assert not arrived.path.exists()


@pytest.mark.parametrize("fault", ["lossy write", "lossy fsync"])
def test_a_state_of_which_the_disk_has_lost_a_part_is_not_taken_for_whole(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    a = yard.host("a")
    yard.expect(4, "a", or_memory=True)
    spoil_disk(monkeypatch, yard, fault)
    a.send(4, b"x" * (3 << 20))
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert (arrived.path, arrived.error and arrived.error.errno) == (None, errno.ENOSPC)
    assert list(tmp_path.iterdir()) == []
    assert _open_files("/memfd:state") == 0
    assert yard.sum_still_works(a)


@pytest.mark.parametrize("fault", ["folder", "write", "fsync"])
def test_a_state_that_neither_disk_nor_memory_takes_is_told_and_the_connection_lives(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def has_no_memory(name: str) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    a = yard.host("a")
    yard.expect(4, "a", or_memory=True)
    monkeypatch.setattr(states, "create_memfd", has_no_memory)
    spoil_disk(monkeypatch, yard, fault)
    a.send(4, b"x" * (2 << 20))
    arrived = yard.arrived.get(timeout=LIMIT_S)
    assert (arrived.path, arrived.memory_fd) == (None, -1)
    assert arrived.error is not None
    assert arrived.error.errno == (errno.ENOENT if fault == "folder" else errno.ENOSPC), "the disk's error"
    assert list(tmp_path.iterdir()) == []
    assert yard.sum_still_works(a)


def test_a_state_in_memory_that_is_forgotten_leaves_nothing(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    spoil_disk(monkeypatch, yard, "folder")
    a = yard.host("a")
    yard.expect(1, "a", or_memory=True)
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 1, 0, 64, 128))
    wait_until(lambda: _open_files("/memfd:state") == 1, LIMIT_S, "the file in memory")
    yard.hub.forget(1)
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 1, 64, 64, 128))
    wait_until(lambda: _open_files("/memfd:state") == 0, LIMIT_S, "its end")
    assert yard.arrived.empty()


def test_a_state_that_breaks_off_in_memory_leaves_nothing(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    spoil_disk(monkeypatch, yard, "folder")
    a = yard.host("a")
    yard.expect(1, "a", or_memory=True)
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 1, 0, 64, 128))
    wait_until(lambda: _open_files("/memfd:state") == 1, LIMIT_S, "the file in memory")
    a.link.close()
    wait_until(lambda: _open_files("/memfd:state") == 0, LIMIT_S, "its end")
    assert yard.arrived.empty()


def test_a_state_that_is_forgotten_while_it_goes_to_memory_leaves_nothing(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    def forgotten(fd: int) -> None:
        yard.hub.forget(1)
        no_space()

    monkeypatch.setattr(states.os, "fsync", forgotten)
    made: list[int] = []
    monkeypatch.setattr(states, "create_memfd", lambda name: made.append(create_memfd(name)) or made[-1])
    yard.expect(1, "a", or_memory=True)
    yard.host("a").send(1, b"x" * 100)
    wait_until(lambda: made and _open_files("/memfd:state") == 0, LIMIT_S, "its end")
    assert list(tmp_path.iterdir()) == []
    assert yard.arrived.empty()


def test_a_state_that_breaks_off_leaves_no_file(yard: Yard, tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    a = yard.host("a")
    yard.expect(0, "a")
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 0, 0, 64, 128))
    wait_until(lambda: list(tmp_path.iterdir()), LIMIT_S, "the temporary file")
    a.link.close()
    wait_until(lambda: not list(tmp_path.iterdir()), LIMIT_S, "its removal")
    assert yard.arrived.empty()


@pytest.mark.parametrize(("offset", "key"), [(64, 0), (192, 0), (128, 1)], ids=["again", "gap", "other transfer"])
def test_a_state_out_of_order_ends_the_connection(yard: Yard, offset: int, key: int) -> None:
    a = yard.host("a")
    yard.expect(0, "a")
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 0, 0, 64, 1024))
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, 0, 64, 64, 1024))
    a.send_chunk(ChunkHeader(ChunkKind.STATE_UP, key, offset, 64, 1024))
    assert isinstance(a.events.get(timeout=LIMIT_S), ControllerDropped)


# ----------------------------------------------------------------------------------------------------- states come down
def test_a_state_lands_in_the_inbox_of_every_host_it_is_for(yard: Yard) -> None:
    data = os.urandom((2 << 20) + 5)
    a, b, c = yard.host("a"), yard.host("b"), yard.host("c")
    yard.send_down(7, ("a", "b"), data)
    for host in (a, b):
        assert host.events.get(timeout=LIMIT_S) == StateLanded(7)
        assert host.received == data
    assert c.received == b""


def test_a_host_that_connects_later_gets_the_state_then(yard: Yard) -> None:
    yard.send_down(7, ("a",), b"state")
    a = yard.host("a")
    assert a.events.get(timeout=LIMIT_S) == StateLanded(7)
    assert a.received == b"state"


def test_the_next_state_takes_the_place_of_a_longer_one(yard: Yard) -> None:
    a = yard.host("a")
    yard.send_down(1, ("a",), b"x" * (2 << 20))
    assert a.events.get(timeout=LIMIT_S) == StateLanded(1)
    yard.send_down(2, ("a",), b"short")
    assert a.events.get(timeout=LIMIT_S) == StateLanded(2)
    assert a.received == b"short"


def test_a_sum_overtakes_the_state_that_is_being_sent_down(yard: Yard, wait_until: Callable[..., Any]) -> None:
    """Nobody reads the state at first: the total goes before what of it has not left yet."""
    ours, theirs = socket.socketpair()
    link = yard.hub.link("a", theirs)
    assert yard.hub.attach(link)
    frames, size = BlockingFrames(ours, "controller", ToDaemon), 64 << 20
    with (yard.folder / "sparse").open("wb+") as file:
        file.truncate(size)
        yard.hub.send_state(1, ("a",), file.fileno(), size)
    wait_until(lambda: select.select([ours], [], [], 0)[0], LIMIT_S, "the state, on its way")
    yard.hub.open_sum(KEY, ("a",), LAYOUT)
    for offset, length in chunk_ranges(LAYOUT.total_bytes):
        header = ChunkHeader(ChunkKind.SUM_UP, KEY, offset, length, LAYOUT.total_bytes)
        frames.send_buffers(pack_header(header), bytes(length))
    wait_until(lambda: len(link._pieces) == 3, LIMIT_S, "the whole total")
    kinds = [_read_chunk(frames).kind for _ in range(8)]
    assert kinds.count(ChunkKind.SUM_DOWN) == 3
    frames.close()


def test_a_file_that_has_become_shorter_ends_the_connection(yard: Yard) -> None:
    a = yard.host("a")
    yard.send_down(1, ("a",), b"x" * 100, size=2 << 20)
    assert isinstance(a.events.get(timeout=LIMIT_S), ControllerDropped)


def test_a_file_that_cannot_be_read_ends_the_connection(yard: Yard, tmp_path: Path) -> None:
    a = yard.host("a")
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yard.hub.send_state(1, ("a",), fd, 100)
    os.close(fd)
    assert isinstance(a.events.get(timeout=LIMIT_S), ControllerDropped)


def test_no_descriptor_of_a_state_is_left_when_its_host_never_came(yard: Yard, tmp_path: Path) -> None:
    yard.send_down(1, ("a", "b"), b"x")
    assert _open_files(tmp_path) == 2
    yard.hub.drop("a")
    assert _open_files(tmp_path) == 1
    yard.hub.close()
    assert _open_files(tmp_path) == 0


def test_no_descriptor_of_a_state_is_left_when_the_connection_ends(
    yard: Yard, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    ours, theirs = socket.socketpair()
    link = yard.hub.link("a", theirs)
    assert yard.hub.attach(link)
    for transfer in range(3):
        yard.send_down(transfer, ("a",), b"x" * (8 << 20))
    yard.hub.drop("a")
    wait_until(lambda: _open_files(tmp_path) == 0, LIMIT_S, "their end")
    ours.close()


def test_a_host_that_is_far_behind_with_its_states_is_dropped(yard: Yard, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    assert yard.hub.attach(yard.hub.link("a", theirs))
    for transfer in range(QUEUED_STATES + 1):
        yard.send_down(transfer, ("a",), b"x" * (8 << 20))
    while ours.recv(1 << 20):
        pass
    ours.close()


def _open_files(folder: Path | str) -> int:
    """Ours below a folder, or anonymous ones of a name."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith((f"{folder}/", f"{folder} "))
    return found


# ------------------------------------------------------------------------------------------------------- connections
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
