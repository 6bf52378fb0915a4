"""HTTP on the run's port: right answers, and clients of every bad kind that hurt only themselves."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.config.tls import TlsMode
from flodl.controller import http
from flodl.controller.http import HttpServer, View
from flodl.core.actions import Record, Severity
from flodl.monitor.event_log import EventLog
from flodl.monitor.log_store import LogStore
from flodl.runtime.certificate import Security
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.runtime.tls import TlsLayer, client_context
from tests.unit.runtime.tls_pair import certificate

LIMIT_S = 60.0
HOST = "Host: localhost\r\n"
OWNER = HOST + f"Authorization: Bearer {'5e' * 32}\r\n"


class Site:
    """A served port with some logs and events."""

    def __init__(self, folder: Path, security: Security) -> None:
        self.logs = LogStore(folder)
        self.events = EventLog(folder / "events.jsonl")
        self.state: Callable[[], Any] = lambda: {"phase": "training"}
        self.context = None if security.certificate is None else client_context()
        self.sockets = listen("127.0.0.1", 0)
        self.port = port_of(self.sockets)
        view = View(
            self._state,
            self.events,
            self.logs,
            lambda rank: f"host{rank}",
            "5e" * 32,
            frozenset({"localhost", "node-a"}),
        )
        self.server = HttpServer(view)

        async def refuse(*_: Any) -> None:
            raise AssertionError("only HTTP comes here")

        handlers = Handlers(refuse, refuse, self.server.serve, self.server.redirect)
        self.mux = PortMux(self.sockets, Run("run-1", bytes(32)), handlers, MonotonicClock(), security)

    def _state(self) -> Any:
        return self.state()

    def event(self) -> None:
        self.events.add(Record("note", Severity.INFO, "a detail", {}))

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26, ssl=self.context)

    async def raw(self, request: bytes) -> bytes:
        """Everything that comes back for these bytes."""
        reader, writer = await self.open()
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    async def ask(self, target: str, method: str = "GET", headers: str = HOST) -> tuple[int, str, bytes]:
        """Status, head and body; the body without its chunk marks."""
        answer = await self.raw(f"{method} {target} HTTP/1.1\r\n{headers}\r\n".encode("latin-1"))
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), head.decode(), unchunked(body) if b"chunked" in head else body

    async def lines(self, target: str) -> list[dict[str, Any]]:
        status, _, body = await self.ask(target)
        assert status == 200, body
        return [json.loads(line) for line in body.splitlines() if line.strip()]

    async def texts(self, query: str) -> list[str]:
        return [line["text"] for line in await self.lines(f"/logs?{query}")]


def unchunked(body: bytes) -> bytes:
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        data, body = data + body[:length], body[length + 2 :]
    return data


async def bounded(site: Site, scenario: Callable[[Site], Awaitable[Any]]) -> Any:
    serving = asyncio.create_task(site.mux.serve())
    try:
        async with asyncio.timeout(LIMIT_S):
            result = await scenario(site)
            assert not serving.done(), "the port has died"
            assert (await site.ask("/state.json"))[0] == 200
            return result
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        site.logs.close()
        site.events.end()
        for sock in site.sockets:
            sock.close()


async def within(folder: Path, security: Security, scenario: Callable[[Site], Awaitable[Any]]) -> Any:
    return await bounded(Site(folder, security), scenario)


@pytest.fixture
def serve(tmp_path: Path) -> "Serve":
    return lambda scenario: asyncio.run(within(tmp_path, Security(), scenario))


@pytest.fixture
def serve_tls(tmp_path: Path) -> "Serve":
    security = Security(TlsMode.ON, certificate())
    return lambda scenario: asyncio.run(within(tmp_path, security, scenario))


Serve = Callable[[Callable[[Site], Awaitable[Any]]], Any]


# ---------------------------------------------------------------------------------------------------------- answers
def test_the_state_is_json_that_nobody_caches_or_guesses(serve: Serve) -> None:
    status, head, body = serve(lambda site: site.ask("/state.json"))
    assert (status, json.loads(body)) == (200, {"phase": "training"})
    for header in ("application/json", "no-store", "nosniff", "same-origin"):
        assert header in head


@pytest.mark.parametrize("target", ["/state.json", "/events", "/logs", "/nowhere"])
def test_head_answers_with_a_head_only(serve: Serve, target: str) -> None:
    def ask(site: Site) -> Awaitable[bytes]:
        site.event()
        site.logs.append(0, "stdout", 0, b"line\n")
        return site.raw(f"HEAD {target} HTTP/1.1\r\n{HOST}\r\n".encode())

    answer = serve(ask)
    assert answer.startswith(b"HTTP/1.1 404" if target == "/nowhere" else b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1


def test_an_old_client_gets_the_plain_body(serve: Serve) -> None:
    answer = serve(lambda site: site.raw(f"GET /state.json HTTP/1.0\r\n{HOST}\r\n".encode()))
    assert answer.endswith(b'\r\n\r\n{"phase": "training"}')


def test_logs_are_chosen_by_rank_host_and_stream(serve: Serve) -> None:
    async def scenario(site: Site) -> list[list[str]]:
        for rank in (-1, 0, 1, 2):
            for stream in ("stdout", "stderr"):
                site.logs.append(rank, stream, 0, f"{rank} {stream}\n".encode())
        queries = ("ranks=0,2&stream=stdout", "host=host1,host2&stream=stderr", "ranks=-1")
        return [await site.texts(query) for query in queries]

    assert serve(scenario) == [
        ["0 stdout", "2 stdout"],
        ["1 stderr", "2 stderr"],
        ["-1 stdout", "-1 stderr"],
    ]


def test_tail_is_exact_and_a_cursor_goes_on_behind_its_line(serve: Serve) -> None:
    async def scenario(site: Site) -> tuple[list[str], list[str]]:
        site.logs.append(0, "stdout", 0, b"".join(b"%d\n" % number for number in range(100)) + b"rest")
        last = await site.lines("/logs?tail=3")
        again = await site.texts(f"cursor={last[0]['cursor']}")
        return [line["text"] for line in last], again

    assert serve(scenario) == (["98", "99", "rest"], ["99", "rest"])


def test_since_leaves_out_what_is_older(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> list[str]:
        for offset, wall_s in ((0, 1000.0), (4, 2000.0)):
            monkeypatch.setattr("flodl.monitor.log_store.time.time", lambda wall_s=wall_s: wall_s)
            site.logs.append(0, "stdout", offset, b"%d\n" % (wall_s / 10))
        return await site.texts("since=1500")

    assert serve(scenario) == ["200"]


def test_followers_get_everything_until_the_end(serve: Serve) -> None:
    async def scenario(site: Site) -> list[list[int]]:
        following = [asyncio.create_task(site.lines("/events?follow=1")) for _ in range(10)]
        for _ in range(20):
            site.event()
            await asyncio.sleep(0.001)
        site.events.end()
        return [[line["seq"] for line in await each] for each in following]

    assert serve(scenario) == [list(range(1, 21))] * 10


@pytest.mark.parametrize("path", ["logs", "events"])
def test_a_follower_is_answered_before_there_is_anything_to_tell(serve: Serve, path: str) -> None:
    async def scenario(site: Site) -> bytes:
        reader, writer = await site.open()
        writer.write(f"GET /{path}?follow=1&cursor={10**6} HTTP/1.0\r\n{HOST}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head

    assert serve(scenario).startswith(b"HTTP/1.1 200")


def test_a_log_follower_gets_a_standing_bar_and_the_last_words(serve: Serve) -> None:
    async def scenario(site: Site) -> tuple[list[str], list[str]]:
        reader, writer = await site.open()
        writer.write(f"GET /logs?follow=1 HTTP/1.0\r\n{HOST}\r\n".encode())
        site.logs.append(0, "stdout", 0, b"\r 10%\r 20%")
        head_and_bar = [await reader.readuntil(b'10%"}\n'), await reader.readuntil(b'20%"}\n')]
        site.logs.append(0, "stderr", 0, b"Killed")
        site.logs.end()
        rest = await reader.read()
        writer.close()
        await site.server.until_read()
        return [json.loads(each.splitlines()[-1])["text"] for each in head_and_bar], [
            json.loads(line)["text"] for line in rest.splitlines() if line.strip()
        ]

    assert serve(scenario) == ([" 10%", " 20%"], [" 20%", "Killed"])


def test_an_idle_stream_is_kept_alive(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(http, "FOLLOW_POLL_S", 0.05)

    async def scenario(site: Site) -> None:
        for path in ("events", "logs"):
            reader, writer = await site.open()
            writer.write(f"GET /{path}?follow=1 HTTP/1.0\r\n{HOST}\r\n".encode())
            await reader.readuntil(b"\r\n\r\n\n\n")
            writer.close()

    serve(scenario)


# --------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("target", "method", "headers", "status"),
    [
        ("/nowhere", "GET", HOST, 404),
        ("//[::1/", "GET", HOST, 404),
        ("http://[/state.json", "GET", HOST, 404),
        ("/state.json", "POST", HOST + "Content-Length: 3\r\n", 405),
        ("/state.json", "GET", "Host: evil.example\r\n", 403),
        ("/state.json", "GET", "Host: \r\n", 403),
        ("/state.json", "GET", "Host: [::1\r\n", 403),
        ("/state.json", "GET", "Host: localhost:99999999999999999999\r\n", 403),
        ("/state.json", "GET", "Host: b\xfccher\r\n", 403),
        ("/state.json", "GET", "", 400),
        ("/state.json", "GET", HOST + HOST, 400),
        ("/state.json", "GET", HOST + "Bad Header\r\n", 400),
        ("/state.json", "GET", HOST + "X: " + "y" * 40_000 + "\r\n", 431),
        ("/logs?cursor=-1", "GET", HOST, 400),
        ("/logs?tail=99999999999999999999", "GET", HOST, 400),
        ("/logs?tail=9999999999999999", "GET", HOST, 400),
        ("/events?cursor=%C2%B2", "GET", HOST, 400),
        ("/events?cursor=1e3", "GET", HOST, 400),
        ("/logs?ranks=%C2%B2", "GET", HOST, 400),
        ("/logs?ranks=--5", "GET", HOST, 400),
        ("/logs?ranks=0,x", "GET", HOST, 400),
        ("/logs?stream=../index", "GET", HOST, 400),
    ],
)
def test_a_bad_request_is_answered_in_json(serve: Serve, target: str, method: str, headers: str, status: int) -> None:
    found, _, body = serve(lambda site: site.ask(target, method, headers))
    assert found == status
    error = json.loads(body or b"{}")
    assert isinstance(error["error"], str)


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        ("/logs?cursor=9007199254740992", 0),
        ("/logs?tail=9007199254740992", 1),
        ("/logs?since=9007199254740992", 0),
        ("/logs?%ff=%zz&tail=%31&host=%00", 0),
        ("/logs?&&==&", 1),
        ("/events?cursor=9007199254740992", 0),
    ],
)
def test_absurd_but_legal_queries_are_answered(serve: Serve, target: str, lines: int) -> None:
    def ask(site: Site) -> Awaitable[list[dict[str, Any]]]:
        site.logs.append(0, "stdout", 0, b"line\n")
        return site.lines(target)

    assert len(serve(ask)) == lines


@pytest.mark.parametrize(
    ("query", "details"),
    [("tail=2", ["3", "4"]), ("tail=0", []), ("tail=9&cursor=2", ["3", "4"]), ("tail=4", list("1234"))],
)
def test_events_begin_so_many_before_the_end(serve: Serve, query: str, details: list[str]) -> None:
    def ask(site: Site) -> Awaitable[list[dict[str, Any]]]:
        for number in range(1, 5):
            site.events.add(Record("x", Severity.INFO, str(number), {}))
        return site.lines(f"/events?{query}")

    assert [line["detail"] for line in serve(ask)] == details


def test_the_dialed_address_is_a_good_host_header(serve: Serve) -> None:
    answers = serve(
        lambda site: asyncio.gather(
            *(
                site.ask("/state.json", headers=f"Host: {host}\r\n")
                for host in (
                    "127.0.0.1",
                    f"127.0.0.1:{site.port}",
                    "NODE-A:1337",
                    "localhost",
                )
            )
        )
    )
    assert [status for status, _, _ in answers] == [200] * 4


def test_off_loopback_the_read_token_is_needed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "is_loopback", lambda host: False)
    given = [HOST, HOST + "Authorization: Bearer x\r\n", HOST + "Authorization: Bearer \xff\r\n"]
    right = HOST + f"Authorization: Bearer {'5e' * 32}\r\n"

    async def scenario(site: Site) -> list[int]:
        statuses = [(await site.ask("/state.json", headers=each))[0] for each in [*given, right]]
        monkeypatch.undo()
        return statuses

    assert serve(scenario) == [401, 401, 401, 200]


def test_a_fault_of_ours_ends_one_connection_only(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> bytes:
        site.state = lambda: {"broken": object()}
        answer = await site.raw(f"GET /state.json HTTP/1.1\r\n{HOST}\r\n".encode())
        site.state = dict
        return answer

    assert serve(scenario) == b""
    assert "http request failed" in caplog.text


# ------------------------------------------------------------------------------------------------------ hostilities
def test_a_megabyte_of_headers_is_refused_and_the_refusal_arrives(serve: Serve) -> None:
    answer = serve(lambda site: site.raw(b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * (1 << 20) + b"\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 431")


def test_pipelined_requests_get_one_answer_and_a_close(serve: Serve) -> None:
    answer = serve(lambda site: site.raw(f"GET /state.json HTTP/1.1\r\n{HOST}\r\n".encode() * 50))
    assert answer.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize(
    "junk", [b"G", b"GET\n\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100 + b"\r\n", b"get\0\xff\r\n\r\n"]
)
def test_what_is_no_http_is_dropped(serve: Serve, junk: bytes) -> None:
    async def scenario(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(junk)
        writer.write_eof()
        await reader.read()
        writer.close()

    serve(scenario)


def test_abrupt_ends_in_the_middle_of_a_stream_harm_nobody(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        for path in ("/logs?follow=1", "/events?follow=1", "/logs", "/state.json"):
            for _ in range(10):
                reader, writer = await site.open()
                writer.write(f"GET {path} HTTP/1.1\r\n{HOST}\r\n".encode())
                await reader.read(1) if path == "/state.json" else await asyncio.sleep(0)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                site.logs.append(0, "stdout", site.logs.count, b"x")
                site.event()
        await site.server.until_read()

    serve(scenario)


def test_a_follower_that_has_gone_is_noticed_without_news(serve: Serve) -> None:
    async def scenario(site: Site) -> None:
        for path in ("events", "logs"):
            _, writer = await site.open()
            writer.write(f"GET /{path}?follow=1 HTTP/1.1\r\n{HOST}\r\n".encode())
            while site.server._all_read.is_set():
                await asyncio.sleep(0.001)
            writer.close()
            await site.server.until_read()

    serve(scenario)


def test_a_follower_that_reads_nothing_is_dropped(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WRITE_S", 0.3)

    async def scenario(site: Site) -> None:
        site.logs.append(0, "stdout", 0, (b"x" * 1000 + b"\n") * 30_000)
        sock = socket.create_connection(("127.0.0.1", site.port))
        sock.sendall(f"GET /logs?follow=1 HTTP/1.1\r\n{HOST}\r\n".encode())
        while site.server._all_read.is_set():
            await asyncio.sleep(0.001)
        await site.server.until_read()
        sock.close()

    serve(scenario)


def test_too_many_followers_are_turned_away(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_FOLLOWERS", 2)

    async def scenario(site: Site) -> int:
        writers = []
        for _ in range(2):
            _, writer = await site.open()
            writer.write(f"GET /events?follow=1 HTTP/1.1\r\n{HOST}\r\n".encode())
            writers.append(writer)
        while site.server._followers < 2:
            await asyncio.sleep(0.001)
        status, _, _ = await site.ask("/logs")
        for writer in writers:
            writer.close()
        return status

    assert serve(scenario) == 503


async def follow(site: Site, headers: str = HOST) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has begun."""
    reader, writer = await site.open()
    writer.write(f"GET /events?follow=1 HTTP/1.1\r\n{headers}\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    return reader, writer


@pytest.mark.parametrize("site", ["serve", "serve_tls"])
def test_followers_with_the_read_token_replace_the_oldest_without(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, site: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "MAX_FOLLOWERS", 3)

    async def scenario(site: Site) -> tuple[list[int], list[bytes], bytes]:
        strangers = [await follow(site) for _ in range(3)]
        owners = [await follow(site, OWNER) for _ in range(2)]
        for reader, _ in strangers[:2]:  # the oldest, and they see an end
            while await reader.read(1 << 10):
                pass
        statuses = [(await site.ask("/logs"))[0]]
        owners.append(await follow(site, OWNER))
        statuses += [(await site.ask("/logs", headers=headers))[0] for headers in (HOST, OWNER)]
        site.event()
        heard = [(await reader.readuntil(b"}\n")) for reader, _ in owners]
        for _, writer in (*strangers, *owners):
            writer.close()
        await site.server.until_read()
        return statuses, heard, await strangers[2][0].read()

    statuses, heard, last = request.getfixturevalue(site)(scenario)
    assert statuses == [503, 503, 503]
    assert all(b"a detail" in each for each in heard)
    assert b"a detail" not in last
    assert not caplog.records


def test_slow_clients_make_room_and_run_out_of_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(http, "REQUEST_S", 0.5)

    async def scenario(site: Site) -> int:
        slow = []
        for _ in range(60):
            reader, writer = await site.open()
            writer.write(b"GET / HT")
            slow.append((reader, writer))
        status, _, _ = await site.ask("/state.json")
        for reader, writer in slow:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        return status

    assert serve(scenario) == 200


def test_clients_that_have_their_answer_make_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(http, "LINGER_S", LIMIT_S)

    async def scenario(site: Site) -> tuple[int, bytes]:
        answered = []
        for _ in range(60):
            reader, writer = await site.open()
            writer.write(f"GET /nothing HTTP/1.1\r\n{HOST}\r\n".encode())
            assert b" 404 " in await reader.readline()
            answered.append(writer)
        reader, slow = await site.open()
        slow.write(b"GET /state.json HTTP/1.1\r\n")
        status, _, _ = await site.ask("/state.json")
        slow.write(f"{HOST}\r\n".encode())
        slows_answer = await reader.readline()
        for writer in (*answered, slow):
            writer.close()
        return status, slows_answer

    assert serve(scenario) == (200, b"HTTP/1.1 200 \r\n")


# --------------------------------------------------------------------------------------------------------- under TLS
def test_the_state_is_read_under_tls(serve_tls: Serve) -> None:
    status, _, body = serve_tls(lambda site: site.ask("/state.json"))
    assert (status, json.loads(body)) == (200, {"phase": "training"})


def test_long_answers_and_slow_requests_pass_under_tls(serve_tls: Serve) -> None:
    async def scenario(site: Site) -> int:
        site.logs.append(0, "stdout", 0, (b"x" * 1000 + b"\n") * 3000)
        reader, writer = await site.open()
        for byte in f"GET /logs?tail=3000 HTTP/1.1\r\n{HOST}\r\n".encode():
            writer.write(bytes([byte]))
            await writer.drain()
        body = await reader.read()
        writer.close()
        return body.count(b"x" * 1000)

    assert serve_tls(scenario) == 3000


def test_a_follower_under_tls_that_leaves_is_let_go(serve_tls: Serve) -> None:
    async def scenario(site: Site) -> None:
        reader, writer = await site.open()
        writer.write(f"GET /events?follow=1 HTTP/1.1\r\n{HOST}\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await site.server.until_read()

    serve_tls(scenario)


def test_a_client_that_breaks_tls_hurts_only_itself(serve_tls: Serve) -> None:
    async def scenario(site: Site) -> None:
        sock = socket.create_connection(("127.0.0.1", site.port), LIMIT_S)
        layer = TlsLayer(client_context(), is_server=False)
        layer.shake_hands()
        while not layer.is_open:
            sock.sendall(layer.outgoing())
            layer.shake_hands(await asyncio.to_thread(sock.recv, 4096))
        sock.sendall(layer.outgoing() + layer.encrypt(b"GET /state.json HTTP/1.1\r\n") + bytes(100))
        assert await asyncio.to_thread(sock.recv, 4096) == b""
        sock.close()

    serve_tls(scenario)


async def raw_plain(site: Site, request: bytes) -> bytes:
    site.context, context = None, site.context
    try:
        return await site.raw(request)
    finally:
        site.context = context


@pytest.mark.parametrize(
    ("target", "path"),
    [("/logs?tail=3", "/logs?tail=3"), ("/", "/"), ("@evil.example/", "/"), ("http://evil.example/", "/")],
)
def test_plain_http_is_sent_to_the_same_address_under_tls(serve_tls: Serve, target: str, path: str) -> None:
    def ask(site: Site) -> Awaitable[bytes]:
        return raw_plain(site, f"GET {target} HTTP/1.1\r\nHost: node-a:{site.port}\r\n\r\n".encode())

    head, _, body = serve_tls(ask).decode().partition("\r\n\r\n")
    lines = head.split("\r\n")
    (where,) = (line.partition(": ")[2] for line in lines if line.lower().startswith("location: "))
    assert lines[0].startswith("HTTP/1.1 308")
    assert where.startswith("https://node-a:")
    assert where.endswith(path)
    assert "evil" not in where
    assert where in body


def test_plain_http_with_a_foreign_host_is_sent_nowhere(serve_tls: Serve) -> None:
    answer = serve_tls(lambda site: raw_plain(site, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 403")
