"""The run over HTTP, read only: ``/state.json``, ``/events`` and ``/logs`` as JSON lines.

h11 parses (one small package, no loop of its own, 16 ms to import); the line, under TLS or not, comes from the port's
mux. Reads are free on loopback, elsewhere they need the read token. A foreign Host header is refused, so that no web
page can read a run through a name of its own. Followers are cursors: one that does not read, or has gone, is dropped.
Whatever a client does, or an answer of ours does wrong, ends its connection and nothing else.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import h11

from flodl.config.address import is_loopback, split_address
from flodl.errors import ConfigError, ProtocolError
from flodl.ids import HostName, RankId
from flodl.monitor.event_log import EventLog
from flodl.monitor.log_lines import LineReader, LogLine, Wants, cursor_at, tail_reader
from flodl.monitor.log_store import HEAD, STREAMS, LogStore
from flodl.runtime.line import Line

READ_BYTES: Final = 16 * 1024
MAX_HEADER_BYTES: Final = 16 * 1024
MAX_LINGER_BYTES: Final = 4 * 1024 * 1024
"""What is read past an answer, so that a client which still sends can read it: closing would reset the connection."""

MAX_CONNECTIONS: Final = 256
"""At once; a newer one replaces the oldest that has its answer and lingers, else the oldest without a request yet."""

MAX_FOLLOWERS: Final = 64
"""Streams at once: each costs a reader of the logs. One that shows the read token replaces the oldest without it."""

REQUEST_S: Final = 10.0
"""How long a request's header may take."""

WRITE_S: Final = 10.0
"""A client that takes nothing for this long is dropped."""

LINGER_S: Final = 1.0

FOLLOW_POLL_S: Final = 1.0
"""How often an idle log follower looks for a progress bar that stands still."""

KEEP_ALIVE_S: Final = 30.0
"""An idle stream carries an empty line this often: proxies and clients take silence for an end."""

EVENTS_PER_PIECE: Final = 500
MAX_NUMBER: Final = 1 << 53

Headers = Sequence[tuple[str, str]]
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class View:
    """What there is to read. ``host_of`` names a rank's host, ``names`` the Host headers that are ours besides the
    address that the client dialed.
    """

    state: Callable[[], Mapping[str, Any]]
    events: EventLog
    logs: LogStore
    host_of: Callable[[RankId], HostName]
    read_token: str
    names: frozenset[str]


class HttpError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class HttpServer:
    """Serves one connection per call of ``serve``."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._waiting: dict[asyncio.Task[Any], None] = {}
        self._lingering: dict[asyncio.Task[Any], None] = {}
        self._strangers: dict[asyncio.Task[Any], None] = {}
        self._connections = 0
        self._followers = 0
        self._all_read = asyncio.Event()
        self._all_read.set()

    async def until_read(self) -> None:
        """Wait until nobody reads a stream."""
        await self._all_read.wait()

    async def serve(self, line: Line) -> None:
        """Answer one request and close."""
        await self._converse(line, self._answer_allowed)

    async def redirect(self, line: Line) -> None:
        """Answer one request, which has come in plain where TLS is required, with its address under TLS; and close."""
        await self._converse(line, _point_to_tls)

    async def _converse(self, line: Line, answer: "_Answer") -> None:
        reader, writer = await asyncio.open_connection(sock=line.sock, limit=READ_BYTES)
        exchange = _Exchange(reader, writer, line)
        self._connections += 1
        try:
            await self._answer(exchange, answer)
            await _replaceable(exchange.linger(), self._lingering, LINGER_S + WRITE_S)
        except (OSError, ProtocolError) as error:
            _log.debug("http connection dropped: %s", error)
        except Exception:  # noqa: BLE001  # a fault in an answer must not reach the port, and with it the run
            _log.exception("http request failed")
        finally:
            self._connections -= 1
            writer.transport.abort()

    async def _answer(self, exchange: "_Exchange", answer: "_Answer") -> None:
        try:
            request = await self._request(exchange)
            self._check_host(request, exchange)
            await answer(request, exchange)
        except h11.RemoteProtocolError as error:
            await exchange.fail(error.error_status_hint, str(error))
        except HttpError as error:
            await exchange.fail(error.status, error.text)

    async def _request(self, exchange: "_Exchange") -> h11.Request:
        """The request; TimeoutError when it was too slow, or made room for another."""
        if self._connections > MAX_CONNECTIONS:
            _end_oldest(self._lingering or self._waiting)
        return await _replaceable(exchange.request(), self._waiting, REQUEST_S)

    def _check_host(self, request: h11.Request, exchange: "_Exchange") -> None:
        if request.method not in (b"GET", b"HEAD"):
            raise HttpError(405, "only GET: nothing here changes the run")
        if not self._is_ours(_header(request, b"host"), exchange.local_host):
            raise HttpError(403, "unknown Host header: use the controller's address")

    async def _answer_allowed(self, request: h11.Request, exchange: "_Exchange") -> None:
        given = _header(request, b"authorization")
        is_known = hmac.compare_digest(given.encode(), f"Bearer {self._view.read_token}".encode())
        if not is_known and not is_loopback(exchange.peer_host):
            raise HttpError(401, "a read token is needed: use fdl on the controller's machine")
        await self._route(request, exchange, is_known)

    def _is_ours(self, host: str, dialed: str) -> bool:
        try:
            name, _ = split_address(host, 80)
        except ConfigError:
            return False
        return name == dialed or name.lower() in self._view.names

    async def _route(self, request: h11.Request, exchange: "_Exchange", is_known: bool) -> None:
        path, _, text = request.target.decode("latin-1").partition("?")
        query = {name: values[-1] for name, values in parse_qs(text).items()}
        match path:
            case "/state.json":
                data = json.dumps(self._view.state(), allow_nan=False).encode()
                await exchange.send(data, "application/json")
            case "/events":
                await self._stream(exchange, self._events(query), is_known)
            case "/logs":
                await self._stream(exchange, self._logs(query), is_known)
            case _:
                raise HttpError(404, "there is /state.json, /events and /logs")

    async def _stream(self, exchange: "_Exchange", pieces: AsyncIterator[list[Any]], is_known: bool) -> None:
        """``is_known``: the client has shown the read token, and gives way to nobody."""
        if self._followers >= MAX_FOLLOWERS and not (is_known and _end_oldest(self._strangers)):
            raise HttpError(503, f"{MAX_FOLLOWERS} streams are being read already")
        self._followers += 1
        self._all_read.clear()
        reading = exchange.while_there(_write_lines(exchange, pieces))
        try:
            await (reading if is_known else _replaceable(reading, self._strangers, None))
        finally:
            self._followers -= 1
            if not self._followers:
                self._all_read.set()

    async def _events(self, query: Mapping[str, str]) -> AsyncIterator[list[Any]]:
        events, cursor, follow = self._view.events, _number(query, "cursor"), _number(query, "follow")
        if "tail" in query:
            cursor = max(cursor, events.last_seq - _number(query, "tail"))
        if follow:
            yield []  # the answer begins now, not with the first event
        while True:
            while piece := events.after(cursor, EVENTS_PER_PIECE):
                cursor = piece[-1]["seq"]
                yield piece
            if not follow or not await events.wait(cursor, KEEP_ALIVE_S):
                return
            if events.last_seq <= cursor:
                yield []

    async def _logs(self, query: Mapping[str, str]) -> AsyncIterator[list[Any]]:
        store, wants = self._view.logs, _choice(query, self._view.host_of)
        follow = bool(_number(query, "follow"))
        reader = await self._log_reader(query, wants, follow)
        told_s = time.monotonic()
        if follow:
            yield []  # the answer begins now, not with the first line
        while True:
            while reader.next_arrival < store.count:
                if lines := reader.lines():
                    yield [self._log_line(line) for line in lines]
                    told_s = time.monotonic()
                await asyncio.sleep(0)
            if not follow or not await store.wait(reader.next_arrival, FOLLOW_POLL_S):
                break
            lines = reader.updates(int(time.time() * 1e3))
            if lines or time.monotonic() - told_s >= KEEP_ALIVE_S:
                yield [self._log_line(line) for line in lines]
                told_s = time.monotonic()
        yield [self._log_line(line) for line in reader.rest()]

    async def _log_reader(self, query: Mapping[str, str], wants: Wants, follow: bool) -> LineReader:
        store = self._view.logs
        cursor, since, tail = _number(query, "cursor"), _number(query, "since"), _number(query, "tail")
        cursor = min(cursor, cursor_at(store.count))
        if since:
            cursor = max(cursor, cursor_at(store.first_since(since * 1000)))
        if "tail" not in query:
            return LineReader(store, cursor, wants)
        return await tail_reader(store, wants, tail, cursor, with_rest=not follow)

    def _log_line(self, line: LogLine) -> dict[str, Any]:
        return {
            "cursor": line.cursor,
            "ts": line.ts_ms,
            "rank": line.rank,
            "host": "" if line.rank == HEAD else self._view.host_of(line.rank),
            "stream": line.stream,
            "text": line.text,
        }


class _Exchange:
    """One request and its answer on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
        """``reader`` and ``writer`` are over the line's socket."""
        self._reader, self._writer = reader, writer
        self._tls, self._unread = line.tls, line.unread()
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._is_head_request = False
        self.peer_host = str((writer.get_extra_info("peername") or ("",))[0])
        self.local_host = str((writer.get_extra_info("sockname") or ("",))[0])

    async def request(self) -> h11.Request:
        """The request's header.

        Raises:
            ConnectionResetError: the client closed before it was complete.
            h11.RemoteProtocolError: it is no HTTP, or too long.
        """
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.Request):
                self._is_head_request = event.method == b"HEAD"
                return event
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("closed before a request")
            self._connection.receive_data(await self._read())

    async def send(
        self, data: bytes, kind: str, *, status: int = 200, more: bool = False, headers: Headers = ()
    ) -> None:
        """Write the answer's head with its first piece, then pieces; the last call has ``more`` False. ``headers``
        are added to those of every answer.

        Raises:
            OSError: the client has gone, or takes nothing.
        """
        out = b""
        if self._connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            out += self._connection.send(_head(status, kind, headers)) or b""
        if data and not self._is_head_request:
            out += self._connection.send(h11.Data(data=data)) or b""
        if not more:
            out += self._connection.send(h11.EndOfMessage()) or b""
        self._writer.write(out if self._tls is None else self._tls.encrypt(out))
        async with asyncio.timeout(WRITE_S):
            await self._writer.drain()

    async def fail(self, status: int, text: str) -> None:
        """Answer with an error, unless the answer has begun: then its missing end tells."""
        if self._connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.send(json.dumps({"error": text}).encode(), "application/json", status=status)

    async def while_there(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` as long as the client keeps its side open.

        Raises:
            ConnectionResetError: it closed.
        """
        working = asyncio.create_task(work)
        reading = asyncio.create_task(self._read_past())
        try:
            await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionResetError("closed in the middle of a stream")
            working.result()
        finally:
            for task in (working, reading):
                task.cancel()
            await asyncio.wait({working, reading})

    async def linger(self) -> None:
        """Let the answer arrive: say that nothing follows, and read on until the client closes too."""
        if self._tls is not None:
            self._writer.write(self._tls.farewell())
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._read_past(MAX_LINGER_BYTES)
        self._writer.close()
        async with asyncio.timeout(WRITE_S):
            await self._writer.wait_closed()

    async def _read_past(self, limit_bytes: int = MAX_NUMBER) -> None:
        while limit_bytes > 0 and (data := await self._read()):
            limit_bytes -= len(data)

    async def _read(self) -> bytes:
        """Some bytes of the client; empty at the end."""
        data, self._unread = self._unread, b""
        while not data:
            sealed = await self._reader.read(READ_BYTES)
            if self._tls is None or not sealed:
                return sealed
            data = self._tls.decrypt(sealed)
            if self._tls.has_ended:
                break
        return data


_Answer = Callable[[h11.Request, _Exchange], Awaitable[None]]


async def _replaceable(
    work: Coroutine[Any, Any, T], among: dict[asyncio.Task[Any], None], timeout_s: float | None
) -> T:
    """The result of ``work``, which is ``among`` those that whoever needs room may cancel; TimeoutError when one did,
    or after ``timeout_s``, where there is one.
    """
    working = asyncio.create_task(work)
    among[working] = None
    try:
        await asyncio.wait({working}, timeout=timeout_s)
        if working.cancelled() or not working.done():
            raise TimeoutError("it took too long, or made room for another")
        return working.result()
    finally:
        among.pop(working, None)
        working.cancel()


def _end_oldest(among: dict[asyncio.Task[Any], None]) -> bool:
    """Make room; False where there is none to be made."""
    oldest = next(iter(among), None)
    if oldest is None:
        return False
    del among[oldest]
    oldest.cancel()
    return True


async def _point_to_tls(request: h11.Request, exchange: _Exchange) -> None:
    target = request.target.decode("latin-1")
    path = target if target.startswith("/") and target.isascii() else "/"  # else it could name another host
    where = f"https://{_header(request, b'host')}{path}"
    await exchange.send(
        f"this controller speaks HTTP under TLS only: {where}\n".encode(),
        "text/plain; charset=utf-8",
        status=308,
        headers=(("Location", where),),
    )


async def _write_lines(exchange: _Exchange, pieces: AsyncIterator[list[Any]]) -> None:
    kind = "application/x-ndjson"
    async for piece in pieces:
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in piece) or "\n"
        await exchange.send(data.encode(), kind, more=True)
        await asyncio.sleep(0)
    await exchange.send(b"", kind)


def _header(request: h11.Request, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in request.headers if key == name), "")


def _head(status: int, kind: str, more: Headers) -> h11.Response:
    headers = [
        *more,
        ("Content-Type", kind),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Connection", "close"),
    ]
    return h11.Response(status_code=status, headers=headers)


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 16) or int(text) > MAX_NUMBER:
        raise HttpError(400, f"{name}: expected a whole number from 0 to {MAX_NUMBER}")
    return int(text)


def _choice(query: Mapping[str, str], host_of: Callable[[RankId], HostName]) -> Wants:
    ranks = {_rank(word) for word in query.get("ranks", "").split(",") if word}
    hosts = {word for word in query.get("host", "").split(",") if word}
    stream = query.get("stream", "")
    if stream not in ("", *STREAMS):
        raise HttpError(400, f"stream: expected one of {', '.join(STREAMS)}")

    def wants(rank: RankId, name: str) -> bool:
        return (
            (not ranks or rank in ranks)
            and (not stream or name == stream)
            and (not hosts or (rank != HEAD and host_of(rank) in hosts))
        )

    return wants


def _rank(word: str) -> RankId:
    digits = word.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise HttpError(400, "ranks: expected numbers separated by commas, -1 for the head")
    return int(word)
