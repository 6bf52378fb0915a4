"""The run over HTTP, read only: ``/state.json``, ``/events`` and ``/logs`` as JSON lines.

h11 parses (one small package, no loop of its own, 16 ms to import); the socket comes from the port's mux. Reads are
free on loopback, elsewhere they need the read token. A foreign Host header is refused, so that no web page can read a
run through a name of its own. Followers are cursors: one that does not read is dropped.
"""

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import h11

from flodl.config.address import is_loopback, split_address
from flodl.errors import ConfigError
from flodl.ids import HostName, RankId
from flodl.monitor.event_log import EventLog
from flodl.monitor.log_store import HEAD, LineReader, LogStore, since_cursor, tail_cursor

READ_BYTES: Final = 16 * 1024
MAX_HEADER_BYTES: Final = 16 * 1024
REQUEST_S: Final = 10.0
"""How long a request's header may take."""

WRITE_S: Final = 10.0
"""A follower that takes nothing for this long is dropped."""

FOLLOW_POLL_S: Final = 1.0
"""How often an idle log follower looks for an unfinished line or the end."""

EVENTS_PER_PIECE: Final = 500

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class View:
    """What there is to read. ``host_of`` names a rank's host, ``names`` the Host headers that are ours."""

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
        self._followers = 0
        self._all_read = asyncio.Event()
        self._all_read.set()

    async def until_read(self) -> None:
        """Wait until nobody reads a stream."""
        await self._all_read.wait()

    async def serve(self, sock: socket.socket) -> None:
        """Answer one request and close; ``sock`` has not been read from."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, TimeoutError, h11.RemoteProtocolError) as error:
            _log.debug("http connection dropped: %s", error)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        peer = str(writer.get_extra_info("peername", ("",))[0])
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await _request(connection, reader)
            self._check(request, peer)
            send = _sender(connection, writer)
            await self._route(request, send)
        except HttpError as error:
            body = json.dumps({"error": error.text}).encode()
            await _respond(connection, writer, error.status, body)

    def _check(self, request: h11.Request, peer: str) -> None:
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        if request.method not in (b"GET", b"HEAD"):
            raise HttpError(405, "only GET: nothing here changes the run")
        if not self._is_ours(headers.get(b"host", "")):
            raise HttpError(403, "unknown Host header: use the controller's address")
        if is_loopback(peer):
            return
        given = headers.get(b"authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._view.read_token}".encode()):
            raise HttpError(401, "a read token is needed: use fdl on the controller's machine")

    def _is_ours(self, host: str) -> bool:
        try:
            name, _ = split_address(host, 80)
        except ConfigError:
            return False
        return name.lower() in self._view.names

    async def _route(self, request: h11.Request, send: "_Send") -> None:
        parts = urlsplit(request.target.decode("latin-1"))
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        match parts.path:
            case "/state.json":
                await send(json.dumps(self._view.state(), allow_nan=False).encode(), "application/json")
            case "/events":
                await self._stream(send, self._events(query))
            case "/logs":
                await self._stream(send, self._logs(query))
            case _:
                raise HttpError(404, "there is /state.json, /events and /logs")

    async def _stream(self, send: "_Send", lines: AsyncIterator[list[Any]]) -> None:
        self._followers += 1
        self._all_read.clear()
        try:
            async for piece in lines:
                data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in piece)
                await send(data.encode(), "application/x-ndjson", more=True)
            await send(b"", "application/x-ndjson")
        finally:
            self._followers -= 1
            if not self._followers:
                self._all_read.set()

    async def _events(self, query: Mapping[str, str]) -> AsyncIterator[list[Any]]:
        events, cursor, follow = self._view.events, _number(query, "cursor"), _number(query, "follow")
        while True:
            while piece := events.after(cursor, EVENTS_PER_PIECE):
                cursor = piece[-1]["seq"]
                yield piece
            if not follow or not await events.wait(cursor):
                return

    async def _logs(self, query: Mapping[str, str]) -> AsyncIterator[list[Any]]:
        store, wants = self._view.logs, _choice(query, self._view.host_of)
        cursor = _number(query, "cursor")
        if "tail" in query:
            cursor = max(cursor, tail_cursor(store, wants, _number(query, "tail")))
        if "since" in query:
            cursor = max(cursor, since_cursor(store, _number(query, "since") * 1000))
        reader, follow = LineReader(store, cursor, wants), _number(query, "follow")
        while True:
            while reader.cursor < store.count:
                lines = reader.lines()
                if lines:
                    yield [self._log_line(line) for line in lines]
            if not follow or not await store.wait(reader.cursor, FOLLOW_POLL_S):
                break
        yield [self._log_line(line) for line in reader.rest()]

    def _log_line(self, line: Any) -> dict[str, Any]:
        return {
            "cursor": line.cursor,
            "ts": line.ts_ms,
            "rank": line.rank,
            "host": "" if line.rank == HEAD else self._view.host_of(line.rank),
            "stream": line.stream,
            "text": line.text,
        }


class _Send:
    """Writes an answer's head with its first piece, then pieces; the last call has ``more`` False."""

    def __init__(self, connection: h11.Connection, writer: asyncio.StreamWriter) -> None:
        self._connection, self._writer, self._has_head = connection, writer, False

    async def __call__(self, data: bytes, kind: str, more: bool = False) -> None:
        out = b""
        if not self._has_head:
            self._has_head = True
            out += self._connection.send(_head(200, kind)) or b""
        if data:
            out += self._connection.send(h11.Data(data=data)) or b""
        if not more:
            out += self._connection.send(h11.EndOfMessage()) or b""
        await _write(self._writer, out)


def _sender(connection: h11.Connection, writer: asyncio.StreamWriter) -> _Send:
    return _Send(connection, writer)


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        else:
            raise ConnectionResetError("closed before a request")


async def _respond(connection: h11.Connection, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    out = connection.send(_head(status, "application/json")) or b""
    out += connection.send(h11.Data(data=body)) or b""
    out += connection.send(h11.EndOfMessage()) or b""
    await _write(writer, out)


def _head(status: int, kind: str) -> h11.Response:
    headers = [
        ("Content-Type", kind),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close"),
    ]
    return h11.Response(status_code=status, headers=headers)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(WRITE_S):
        await writer.drain()


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not text.isdigit() or len(text) > 15:
        raise HttpError(400, f"{name}: expected a whole number")
    return int(text)


def _choice(query: Mapping[str, str], host_of: Callable[[RankId], HostName]) -> Callable[[RankId, str], bool]:
    ranks = {int(word) for word in query.get("ranks", "").split(",") if word.lstrip("-").isdigit()}
    hosts = {word for word in query.get("host", "").split(",") if word}
    stream = query.get("stream", "")

    def wants(rank: RankId, name: str) -> bool:
        return (
            (not ranks or rank in ranks)
            and (not stream or name == stream)
            and (not hosts or (rank != HEAD and host_of(rank) in hosts))
        )

    return wants
