"""Framed streams and their blocking twin over TCP and socketpairs: what arrives, and how an end is told."""

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flodl.errors import DeadlineExceeded, LocalProtocolError, RemoteProtocolError
from flodl.messages import DaemonToRank, FromDaemon, HostStopped, KillRank, LogChunk, RankAlive, RankToDaemon, SendState
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.streams import INBOX_FRAMES, ConnectionLost, FramedStream, Loss, configure_tcp
from flodl.wire.codec import encode
from flodl.wire.frames import frame
from tests.unit.runtime.tls_pair import open_pair

LIMIT_S = 20.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    return ours, theirs


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


PAIRS = pytest.mark.parametrize("make_pair", [tcp_pair, unix_pair], ids=["tcp", "socketpair"])
MakePair = Callable[[], tuple[socket.socket, socket.socket]]


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await scenario()

    return asyncio.run(bounded())


async def settle(predicate: Callable[[], bool]) -> None:
    while not predicate():
        await asyncio.sleep(0.001)


def chunk(number: int, size: int = 10) -> LogChunk:
    return LogChunk(0, "stdout", number, bytes(size))


def reset(sock: socket.socket) -> None:
    """Close with RST, as a killed process with unread data does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def loss_of(stream: FramedStream) -> ConnectionLost:
    try:
        while True:
            await stream.receive()
    except ConnectionLost as lost:
        return lost


async def stream_over(sock: socket.socket, **options: Any) -> FramedStream:
    return await FramedStream.over(sock, "daemon node-a", FromDaemon, **options)


# --------------------------------------------------------------------------------------------------- FramedStream
@PAIRS
def test_messages_arrive_in_order_both_ways(make_pair: MakePair) -> None:
    async def scenario() -> list[list[int]]:
        ours, theirs = make_pair()
        async with await stream_over(ours) as left, await stream_over(theirs) as right:
            for number in range(3 * INBOX_FRAMES):
                assert left.send(chunk(number))
                assert right.send(chunk(-number))
            received = []
            for stream in (left, right):
                messages = [await stream.receive() for _ in range(3 * INBOX_FRAMES)]
                received.append([message.offset for message in messages if isinstance(message, LogChunk)])
        return received

    left, right = run(scenario)

    assert left == [-number for number in range(3 * INBOX_FRAMES)]
    assert right == list(range(3 * INBOX_FRAMES))


@PAIRS
def test_last_words_arrive_although_the_receiver_was_talking(make_pair: MakePair) -> None:
    async def scenario() -> tuple[list[Any], list[Loss]]:
        ours, theirs = make_pair()
        left, right = await stream_over(ours), await stream_over(theirs)
        right.send(chunk(0, 100_000))
        left.send(chunk(1, 100_000))
        left.send(HostStopped("node-a", "bye"))
        closing = asyncio.create_task(left.close())
        right.send(chunk(2, 100_000))
        words = [await right.receive(), await right.receive()]
        losses = [(await loss_of(right)).loss, (await loss_of(left)).loss]
        await right.close()
        await closing
        return words, losses

    words, losses = run(scenario)

    assert words == [chunk(1, 100_000), HostStopped("node-a", "bye")]
    assert losses == [Loss.EOF, Loss.CLOSED]


@PAIRS
@pytest.mark.parametrize("torn_bytes", [0, 9])
def test_peer_that_closes_or_dies_is_told_as_eof(make_pair: MakePair, torn_bytes: int) -> None:
    async def scenario() -> ConnectionLost:
        ours, theirs = make_pair()
        stream = await stream_over(ours)
        theirs.sendall(frame(encode(chunk(0)))[:torn_bytes])
        theirs.close()
        return await loss_of(stream)

    lost = run(scenario)

    assert (lost.loss, lost.peer) == (Loss.EOF, "daemon node-a")
    assert lost.detail == ("9 bytes of a torn frame" if torn_bytes else "")


@PAIRS
def test_peer_that_dies_with_data_unread_is_told_as_reset(make_pair: MakePair) -> None:
    async def scenario() -> ConnectionLost:
        ours, theirs = make_pair()
        stream = await stream_over(ours)
        stream.send(chunk(0))
        await settle(lambda: stream.waiting_bytes == 0)
        reset(theirs)
        return await loss_of(stream)

    lost = run(scenario)

    assert lost.loss is Loss.RESET
    assert "reset by peer" in str(lost)


def test_what_came_before_the_end_is_still_received() -> None:
    async def scenario() -> list[Any]:
        ours, theirs = tcp_pair()
        stream = await stream_over(ours)
        theirs.sendall(b"".join(frame(encode(chunk(number))) for number in range(3)))
        theirs.close()
        await settle(lambda: not stream.is_open)
        words = [await stream.receive() for _ in range(3)]
        with pytest.raises(ConnectionLost):
            await stream.receive()
        return words

    assert run(scenario) == [chunk(0), chunk(1), chunk(2)]


def test_peer_that_does_not_read_is_dropped_as_clogged_and_send_never_waits() -> None:
    async def scenario() -> tuple[list[bool], ConnectionLost, bool]:
        ours, theirs = tcp_pair()
        stream = await stream_over(ours, outbound_bytes=4_000_000)
        sent = [True]
        while sent[-1]:
            sent.append(stream.send(chunk(0, 1_000_000)))
        late = stream.send(chunk(0))
        with pytest.raises(ConnectionLost) as error:
            await stream.receive()
        theirs.close()
        return sent, error.value, late

    sent, lost, late = run(scenario)

    assert len(sent) > 4
    assert lost.loss is Loss.CLOGGED
    assert "the limit is 4000000" in str(lost)
    assert late is False


def test_flood_stays_with_its_sender() -> None:
    async def scenario() -> tuple[bool, int]:
        ours, theirs = tcp_pair()
        theirs.setblocking(False)
        stream = await stream_over(ours)
        data = frame(encode(chunk(0, 1000))) * 1000
        blocked_turns = 0
        while blocked_turns < 200:
            try:
                theirs.send(data)
                blocked_turns = 0
            except BlockingIOError:
                blocked_turns += 1
            await asyncio.sleep(0)
        held = len(stream._inbox)
        for _ in range(held):
            await stream.receive()
        goes_on = await stream.receive() == chunk(0, 1000)
        stream.abort()
        theirs.close()
        return goes_on, held

    goes_on, held = run(scenario)

    assert goes_on
    assert held < 3 * INBOX_FRAMES


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", frame(b"\xc1"), frame(encode(KillRank(0, "not yours to say"))), b"\0\0\0\0"],
    ids=["huge length", "no MessagePack", "another's word", "empty frame"],
)
def test_broken_protocol_cuts_the_connection(data: bytes) -> None:
    async def scenario() -> tuple[bool, bytes]:
        ours, theirs = tcp_pair()
        stream = await stream_over(ours)
        theirs.sendall(data)
        with pytest.raises(RemoteProtocolError):
            await stream.receive()
        theirs.settimeout(LIMIT_S)
        rest = await asyncio.to_thread(lambda: _read_to_end(theirs))
        theirs.close()
        return stream.is_open, rest

    assert run(scenario) == (False, b"")


def _read_to_end(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionResetError:
        return b""


def test_close_gives_up_on_a_peer_that_never_closes() -> None:
    async def scenario() -> bool:
        ours, theirs = tcp_pair()
        stream = await stream_over(ours)
        await stream.close(timeout_s=0.05)
        await stream.close()
        theirs.close()
        return stream.is_open

    assert run(scenario) is False


def test_message_that_is_none_is_our_own_error() -> None:
    async def scenario() -> None:
        ours, theirs = tcp_pair()
        async with await stream_over(ours) as stream:
            theirs.close()
            with pytest.raises(LocalProtocolError):
                stream.send("hello")  # type: ignore[arg-type]

    run(scenario)


def test_tcp_is_configured_on_accepted_sockets_and_other_families_are_left_alone() -> None:
    ours, theirs = tcp_pair()
    local = unix_pair()
    for sock in (ours, theirs, *local):
        configure_tcp(sock)

    options = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in (ours, theirs)]
    keepalive = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for sock in (ours, theirs, *local):
        sock.close()

    assert options == [1, 1]
    assert keepalive == 1


# ------------------------------------------------------------------------------------------------- BlockingFrames
def blocking_pair(make_pair: MakePair = unix_pair) -> tuple[BlockingFrames, BlockingFrames]:
    ours, theirs = make_pair()
    return BlockingFrames(ours, "rank 0", RankToDaemon), BlockingFrames(theirs, "daemon", DaemonToRank)


@PAIRS
def test_blocking_frames_talk_to_a_stream(make_pair: MakePair) -> None:
    async def scenario() -> tuple[Any, Any]:
        ours, theirs = make_pair()
        rank = BlockingFrames(theirs, "daemon", DaemonToRank)
        async with await FramedStream.over(ours, "rank 0", RankToDaemon) as stream:
            await asyncio.to_thread(rank.send, RankAlive(0, 7))
            stream.send(SendState(0, 1, whole=False))
            heard = await stream.receive(), await asyncio.to_thread(rank.receive, LIMIT_S)
            rank.close()
            return heard

    assert run(scenario) == (RankAlive(0, 7), SendState(0, 1, whole=False))


def test_many_threads_send_whole_messages() -> None:
    daemon, rank = blocking_pair()
    threads = [
        threading.Thread(target=lambda n=n: [rank.send(RankAlive(n, step)) for step in range(200)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()

    heard = [daemon.receive(LIMIT_S) for _ in range(800)]
    for thread in threads:
        thread.join()
    daemon.close()
    rank.close()

    by_rank = {n: [word.steps for word in heard if isinstance(word, RankAlive) and word.rank == n] for n in range(4)}
    assert by_rank == {n: list(range(200)) for n in range(4)}


def test_receive_that_ran_out_of_time_in_mid_frame_loses_nothing() -> None:
    ours, theirs = unix_pair()
    daemon = BlockingFrames(ours, "rank 0", RankToDaemon)
    data = frame(encode(RankAlive(3, 4)))

    for byte in data[:-1]:
        theirs.send(bytes([byte]))
        with pytest.raises(DeadlineExceeded, match="rank 0: no message within 0 s"):
            daemon.receive(0)
    theirs.send(data[-1:])
    heard = daemon.receive(LIMIT_S)
    daemon.close()
    theirs.close()

    assert heard == RankAlive(3, 4)


@PAIRS
def test_buffers_larger_than_the_kernels_arrive_without_a_copy(make_pair: MakePair) -> None:
    sender, receiver = blocking_pair(make_pair)
    payload = memoryview(bytes(range(256)) * 20_000)
    thread = threading.Thread(target=sender.send_buffers, args=(b"head", payload))
    thread.start()

    head, body = bytearray(4), memoryview(bytearray(len(payload)))
    receiver.receive_into(head, LIMIT_S)
    receiver.receive_into(body, LIMIT_S)
    thread.join()
    sender.close()
    receiver.close()

    assert head == b"head"
    assert body == payload


def test_send_to_a_peer_that_does_not_read_ends_as_clogged() -> None:
    sender, receiver = blocking_pair()

    with pytest.raises(ConnectionLost, match=r"it has not read for 0\.05 s") as error:
        sender.send_buffers(bytes(10_000_000), timeout_s=0.05)
    receiver.close()

    assert error.value.loss is Loss.CLOGGED


def test_chunk_that_stops_in_the_middle_is_an_error_that_cuts() -> None:
    sender, receiver = blocking_pair()
    sender.send_buffers(b"abc")

    with pytest.raises(DeadlineExceeded, match="in the middle of a chunk"):
        receiver.receive_into(bytearray(10), 0.05)
    with pytest.raises(ConnectionLost):
        sender.send_buffers(b"more")
    sender.close()


@pytest.mark.parametrize("data", [b"", b"\0\0"], ids=["between frames", "torn"])
def test_blocking_end_is_told_with_its_kind(data: bytes) -> None:
    sender, receiver = blocking_pair()
    if data:
        sender.send_buffers(data)
    sender.close()

    with pytest.raises(ConnectionLost) as error:
        receiver.receive(LIMIT_S)

    assert error.value.loss is Loss.EOF
    assert ("torn frame" in str(error.value)) is bool(data)


def test_blocking_reset_is_told_as_one() -> None:
    ours, theirs = tcp_pair()
    receiver = BlockingFrames(ours, "controller", FromDaemon)
    reset(theirs)

    with pytest.raises(ConnectionLost) as error:
        receiver.receive(LIMIT_S)

    assert error.value.loss is Loss.RESET


def test_broken_protocol_cuts_the_blocking_connection_too() -> None:
    sender, receiver = blocking_pair()
    sender.send_buffers(b"\xff\xff\xff\xff")

    with pytest.raises(RemoteProtocolError):
        receiver.receive(LIMIT_S)
    with pytest.raises(ConnectionLost):
        sender.send(RankAlive(0, 1))


def test_close_wakes_the_thread_that_waits() -> None:
    sender, receiver = blocking_pair()
    losses: list[Loss] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            receiver.receive(LIMIT_S)
        except ConnectionLost as lost:
            losses.append(lost.loss)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(LIMIT_S)
    receiver.close()
    thread.join(LIMIT_S)
    sender.close()

    assert losses in ([Loss.EOF], [Loss.CLOSED])


def test_the_kernel_takes_little_that_it_has_not_sent() -> None:
    """What waits for a slow network must wait where ``waiting_bytes`` counts it, not in front of every heartbeat."""

    async def scenario() -> int:
        ours, theirs = tcp_pair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        stream = await stream_over(ours)
        for number in range(300):
            stream.send(chunk(number, 65536))
            await asyncio.sleep(0)
        waiting = stream.waiting_bytes
        stream.abort()
        theirs.close()
        return waiting

    assert 300 * 65536 - run(scenario) < 1 << 20


# --------------------------------------------------------------------------------------------------------- under TLS
async def streams_under_tls() -> tuple[FramedStream, FramedStream]:
    ours, theirs = tcp_pair()
    client, server = open_pair()
    return await stream_over(ours, tls=client), await stream_over(theirs, tls=server)


def frames_under_tls() -> tuple[BlockingFrames, BlockingFrames, socket.socket]:
    """Two ends, and the second one's bare socket."""
    ours, theirs = tcp_pair()
    client, server = open_pair()
    left = BlockingFrames(ours, "controller", FromDaemon, client)
    return left, BlockingFrames(theirs, "host a", FromDaemon, server), theirs


def test_messages_arrive_under_tls_both_ways() -> None:
    async def scenario() -> list[Any]:
        left, right = await streams_under_tls()
        async with left, right:
            for number in range(300):
                left.send(chunk(number, 1000))
                right.send(chunk(-number, 100_000))
            return [await right.receive() for _ in range(300)] + [await left.receive() for _ in range(300)]

    assert run(scenario) == [chunk(n, 1000) for n in range(300)] + [chunk(-n, 100_000) for n in range(300)]


def test_last_words_arrive_under_tls_although_the_receiver_was_talking() -> None:
    async def scenario() -> tuple[Any, list[Loss]]:
        left, right = await streams_under_tls()
        right.send(chunk(0, 100_000))
        left.send(HostStopped("node-a", "bye"))
        closing = asyncio.create_task(left.close())
        word = await right.receive()
        losses = [(await loss_of(right)).loss, (await loss_of(left)).loss]
        await right.close()
        await closing
        return word, losses

    assert run(scenario) == (HostStopped("node-a", "bye"), [Loss.EOF, Loss.CLOSED])


def test_farewell_under_tls_ends_the_stream_although_the_socket_stays_open() -> None:
    async def scenario() -> Loss:
        ours, theirs = tcp_pair()
        client, server = open_pair()
        stream = await stream_over(ours, tls=client)
        theirs.sendall(server.farewell())
        loss = (await loss_of(stream)).loss
        theirs.close()
        return loss

    assert run(scenario) is Loss.EOF


def test_record_that_was_changed_on_the_way_cuts_the_stream() -> None:
    async def scenario() -> str:
        ours, theirs = tcp_pair()
        client, server = open_pair()
        stream = await stream_over(ours, tls=client)
        sealed = bytearray(server.encrypt(frame(encode(chunk(1)))))
        sealed[-1] ^= 1
        theirs.sendall(sealed)
        with pytest.raises(RemoteProtocolError) as error:
            await stream.receive()
        is_silent = not stream.send(chunk(2))
        await stream.close()
        theirs.close()
        return f"{error.value} {is_silent}"

    assert run(scenario) == "TLS: DECRYPTION_FAILED_OR_BAD_RECORD_MAC True"


def test_buffers_pass_under_tls_both_ways_at_once() -> None:
    left, right, _ = frames_under_tls()
    payload = memoryview(bytes(range(256)) * 20_000)
    bodies = [memoryview(bytearray(4 + len(payload))) for _ in range(2)]
    sending = [threading.Thread(target=end.send_buffers, args=(b"head", payload)) for end in (left, right)]
    receiving = [
        threading.Thread(target=end.receive_into, args=(body, LIMIT_S))
        for end, body in zip((left, right), bodies, strict=True)
    ]
    for thread in (*sending, *receiving):
        thread.start()
    for thread in (*sending, *receiving):
        thread.join()
    left.close()
    right.close()

    assert [bytes(body) for body in bodies] == [b"head" + payload] * 2


def test_frames_and_buffers_share_a_connection_under_tls() -> None:
    left, right, _ = frames_under_tls()
    body = bytearray(3)
    left.send(chunk(1, 70_000))
    left.send_buffers(b"abc")
    left.send(chunk(2))

    words = [right.receive(LIMIT_S)]
    right.receive_into(body, LIMIT_S)
    words.append(right.receive(LIMIT_S))
    with pytest.raises(DeadlineExceeded):
        right.receive(0.0)
    left.close()
    right.close()

    assert words == [chunk(1, 70_000), chunk(2)]
    assert body == b"abc"


@pytest.mark.parametrize("how", ["farewell", "closed"])
def test_end_under_tls_is_told_to_a_thread(how: str) -> None:
    ours, theirs = tcp_pair()
    client, server = open_pair()
    frames = BlockingFrames(ours, "controller", FromDaemon, client)
    if how == "farewell":
        theirs.sendall(server.farewell())
    else:
        theirs.close()

    with pytest.raises(ConnectionLost) as error:
        frames.receive(LIMIT_S)
    theirs.close()

    assert error.value.loss is Loss.EOF


def test_record_that_was_changed_on_the_way_cuts_a_threads_connection() -> None:
    ours, theirs = tcp_pair()
    client, server = open_pair()
    frames = BlockingFrames(ours, "controller", FromDaemon, client)
    sealed = bytearray(server.encrypt(b"x" * 100))
    sealed[-1] ^= 1
    theirs.sendall(sealed)

    with pytest.raises(RemoteProtocolError):
        frames.receive_into(bytearray(100), LIMIT_S)
    with pytest.raises(ConnectionLost) as error:
        frames.send_buffers(b"more")
    theirs.close()

    assert error.value.loss is Loss.CLOSED


def test_peer_that_does_not_read_under_tls_ends_as_clogged() -> None:
    left, _, theirs = frames_under_tls()

    with pytest.raises(ConnectionLost, match="has not read"):
        left.send_buffers(bytes(64 << 20), timeout_s=0.05)
    theirs.close()
