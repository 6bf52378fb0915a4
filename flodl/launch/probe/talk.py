"""One host's side of the conversation: sends ``collect`` and the questions, reads the answers, each with a deadline.

The program travels over standard input to the interpreter that the daemon will be started with; whatever the login
prints besides the answers is noise, of which the end is quoted when no answer comes.
"""

import asyncio
import contextlib
import inspect
import os
import secrets
import shutil
import signal
import time
from asyncio.subprocess import PIPE, STDOUT, Process, SubprocessStreamProtocol
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flodl.errors import HostUnreachable, RemoteProtocolError
from flodl.launch.commands import INTERPRETER_MISSING
from flodl.launch.plan import HostPlan
from flodl.launch.probe import collect
from flodl.launch.probe.facts import (
    OLDEST_PYTHON,
    AnswerScanner,
    Facts,
    Reach,
    read_facts,
    read_reach,
    request_line,
)

SMI_TIMEOUT_S: Final = 10.0
"""A cold driver without persistence mode takes several seconds to answer; one that needs longer is broken."""

TORCH_TIMEOUT_S: Final = 60.0
"""Importing torch takes two seconds from a warm disk and has been seen to take thirty from a network file system."""

FACTS_TIMEOUT_S: Final = 30.0
"""Without torch's import: a login shell, Python and a look at /proc."""

DIAL_TIMEOUT_S: Final = 2.0
REACH_TIMEOUT_S: Final = 30.0
"""Eight addresses of a peer at two seconds each, and its part of the conversation."""

CLOSE_TIMEOUT_S: Final = 2.0
PIECE_BYTES: Final = 1 << 16
QUOTED_LINES: Final = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Channel:
    """A started program on a host: its output and error in one stream, its input, its exit code once it has ended
    (None where the session was lost). ``controllers``: where this host would dial the controller.
    """

    read: Callable[[int], Awaitable[bytes]]
    write: Callable[[bytes], None]
    exit_code: Callable[[], Awaitable[int | None]]
    close: Callable[[], Awaitable[None]]
    controllers: tuple[str, ...] = ()


class OldPython(Exception):
    """The interpreter is older than flodl needs; ``version`` says how old."""

    def __init__(self, version: str) -> None:
        self.version = version
        super().__init__(version)


class Interview:
    """One host, asked twice. Build it, then open the channel with its ``nonce``."""

    def __init__(self, host: HostPlan) -> None:
        self.host, self.nonce, self.token = host, secrets.token_hex(16), secrets.token_hex(16)
        self._scanner = AnswerScanner(self.nonce)
        self._bodies: list[bytes] = []

    async def facts(self, channel: Channel, request: Mapping[str, Any]) -> Facts:
        """What the host is like.

        Raises:
            OldPython: its interpreter cannot run the program.
            HostUnreachable: stage start: there is no interpreter, or no answer; what was printed is quoted.
        """
        source = inspect.getsource(collect).encode()
        limit_s = FACTS_TIMEOUT_S + (TORCH_TIMEOUT_S if request["gpus"] else 0.0)
        channel.write(b"%d\n" % len(source) + source + request_line({**request, "token": self.token}))
        return await self._answer(channel, limit_s, read_facts)

    async def reach(self, channel: Channel, asked: Mapping[str, Any]) -> tuple[Reach, float]:
        """Whom the host can dial, and by how many seconds its clock is ahead of ours (as NTP reckons it).

        Raises:
            HostUnreachable: as in ``facts``.
        """
        sent_s = time.time()
        channel.write(request_line({**asked, "timeout_s": DIAL_TIMEOUT_S}))
        reach = await self._answer(channel, REACH_TIMEOUT_S, read_reach)
        return reach, ((reach.heard_s - sent_s) + (reach.said_s - time.time())) / 2

    async def _answer(self, channel: Channel, limit_s: float, read: Callable[[bytes], T]) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return read(await self._body(channel))
        except TimeoutError:
            remedy = "see what its login shell and interpreter do: an rc file that waits, or a slow file system"
            raise self._failed(f"no answer within {limit_s:g} s", remedy) from None
        except RemoteProtocolError as error:
            raise self._failed(str(error), "see what its interpreter prints, and which flodl is there") from None

    async def _body(self, channel: Channel) -> bytes:
        while not self._bodies:
            with contextlib.suppress(OSError):
                if data := await channel.read(PIECE_BYTES):
                    self._bodies += self._scanner.feed(data)
                    self._see_age()
                    continue
            raise self._ended(await channel.exit_code())
        return self._bodies.pop(0)

    def _see_age(self) -> None:
        numbers = self._scanner.python.split(".")
        is_version = len(numbers) > 1 and all(number.isdigit() for number in numbers)
        if is_version and tuple(map(int, numbers[:2])) < OLDEST_PYTHON:
            raise OldPython(self._scanner.python)

    def _ended(self, code: int | None) -> HostUnreachable:
        if code in (INTERPRETER_MISSING, 127):
            python = self.host.python or "python3 (of the login shell's PATH)"
            remedy = f"set `python` of worker {self.host.name} to an interpreter with flodl, by its absolute path"
            return self._failed(f"interpreter {python} not found", remedy, is_quoted=False)
        if code is None:
            return self._failed("the session was lost before it answered")
        return self._failed(f"its interpreter ended with code {code} before it answered")

    def _failed(self, reason: str, remedy: str = "", is_quoted: bool = True) -> HostUnreachable:
        lines = self._scanner.said.decode(errors="backslashreplace").splitlines()
        printable = ("".join(char if char.isprintable() else " " for char in line)[:300].strip() for line in lines)
        said = [line for line in printable if line][-QUOTED_LINES:]
        quoted = "; it said:\n" + "\n".join(said) if said and is_quoted else ""
        return HostUnreachable(self.host.name, "start", reason + quoted, remedy)


async def open_local(host: HostPlan, nonce: str, controllers: tuple[str, ...]) -> Channel:
    """Start the program on this machine.

    Raises:
        HostUnreachable: stage start: the interpreter cannot be executed.
    """
    is_there = await asyncio.to_thread(os.path.isdir, host.cwd)
    if shutil.which(host.python) is None:
        reason = f"interpreter {host.python} not found"
        raise HostUnreachable(host.name, "start", reason, f"set `python` of worker {host.name}")
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(limit=PIECE_BYTES, loop=loop),
        host.python,
        "-c",
        collect.RUN,
        nonce,
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
        cwd=host.cwd if is_there else None,
        start_new_session=True,
    )
    process = Process(transport, protocol, loop)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin

    async def exit_code() -> int:
        code = await process.wait()
        return code if code >= 0 else 128 - code

    async def close() -> None:
        stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a wrapper's children too, whether it answered or not
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        transport.close()  # whoever has left the session may keep the pipes open: nobody waits for that

    return Channel(process.stdout.read, stdin.write, exit_code, close, controllers)
