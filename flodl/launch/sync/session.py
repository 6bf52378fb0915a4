"""The conversation with a host's ``agent``, over an ssh session that is open."""

import asyncio
import contextlib
import importlib.resources
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Self, TypeAlias, TypeVar

import asyncssh

from flodl.errors import HostUnreachable
from flodl.launch.commands import INTERPRETER_MISSING, agent_command
from flodl.launch.ignore import OWN_FILE
from flodl.launch.plan import HostPlan
from flodl.launch.running import Read
from flodl.launch.ssh_login import Login
from flodl.launch.sync.agent import MARKER
from flodl.launch.sync.plan import SyncPlan, There, ledger_of
from flodl.launch.tree import Found, Tree, first_few
from flodl.spec.words import printable

START_S: Final = 30.0
"""From the command's start to the agent's first words: an interpreter, perhaps on a slow network file system."""

STALL_S: Final = 60.0
"""Without a beat of the agent, or a byte of a copy: the host hangs, or its disk does."""

LOCK_S: Final = 60.0
"""How long another launch that copies to the same folder is waited for."""

CLOSE_S: Final = 5.0
MAX_LINE_BYTES: Final = 8 << 20
"""A reply holds ``agent.BATCH`` paths at most, each of 4 KiB at most, escaped."""

MAX_NOISE_BYTES: Final = 4 << 20
NOISE_SHOWN: Final = 300
PIECE_BYTES: Final = 1 << 16

START_REMEDY: Final = "see what its login shell and interpreter do: an rc file that waits, or prints without end"
CHANGED_REMEDY: Final = f"launch again; what is written all the time, such as a log, belongs into {OWN_FILE}"
NONSENSE: Final = "its replies make no sense"

Reply: TypeAlias = dict[str, Any]
T = TypeVar("T")


class Noise(Exception):
    """A login shell has ``printed`` something else than what was to come; it has ended, or does not end."""

    def __init__(self, printed: bytes, has_ended: bool) -> None:
        super().__init__("no marker")
        self.printed, self.has_ended = printed, has_ended


class SyncSession:
    """``async with SyncSession(login, host)``: the agent runs on the host and has seen the project's folder.

    Every method raises ``HostUnreachable``, stage ``sync``, when the host cannot do it or falls silent.
    """

    def __init__(self, login: Login, host: HostPlan) -> None:
        self.login, self.host = login, host
        self.root, self.rsync = "", ""
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._buffer = b""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def look(self, tree: Tree) -> There:
        """What the host has of ``tree``. Changes nothing there."""
        wanted = [[entry.path, entry.size if not entry.is_link else -1] for entry in tree.entries]
        parts: list[Reply] = []
        done = await self._ask({"do": "look", "wanted": wanted}, parts.append)
        found = tuple(_found(pair) for part in parts for pair in _list(part, "found"))
        stale = tuple(str(path) for part in parts for path in _list(part, "stale"))
        altered = tuple(str(path) for part in parts for path in _list(part, "altered"))
        if len(found) != len(tree.entries):
            raise self.failure(NONSENSE)
        return There(found, stale, altered, str(done.get("mark")))

    async def begin(self, who: str, wait: Callable[[str], None]) -> tuple[str, int]:
        """Take the folder's lock and make ready; ``wait`` is told of another launch that has it.

        Returns:
            The ledger's mark, and how many bytes there is room for.
        """
        told: list[str] = []

        def part(reply: Reply) -> None:
            if not told:
                told.append(printable(str(reply.get("waits_for"))))
                wait(told[0])

        done = await self._ask({"do": "begin", "who": who, "wait_s": LOCK_S}, part)
        mark, free = done.get("mark"), done.get("free")
        if not isinstance(mark, str) or not isinstance(free, int):
            raise self.failure(NONSENSE)
        return mark, free

    async def install(
        self, tree: Tree, plan: SyncPlan, name_of: Callable[[int], str], complaint: str
    ) -> tuple[str, ...]:
        """Put into place what has arrived, the file of ``plan.send[index]`` under ``name_of(index)``; ``complaint`` is
        what whoever sent the files said of it.

        Returns:
            The files to remove that stayed, because somebody has changed them meanwhile.
        """
        request = {
            "do": "install",
            "remove": plan.remove,
            "files": [[name_of(n), each.path, each.mode, each.content] for n, each in enumerate(plan.send)],
            "links": [[entry.path, entry.content[2:]] for entry in plan.links],
            "modes": [[entry.path, entry.is_executable] for entry in plan.modes],
            "ledger": ledger_of(tree),
            "retain": plan.retain,
        }
        done = await self._ask(request, lambda _: None)
        if absent := _list(done, "absent"):
            raise self.failure(f"{_named(absent)} did not arrive{complaint}", f"see the disk at {self.root} there")
        if changed := _list(done, "changed"):
            raise self.failure(f"changed here since the launch: {_named(changed)}", CHANGED_REMEDY)
        return tuple(map(str, _list(done, "kept")))

    def failure(self, reason: str, remedy: str = "") -> HostUnreachable:
        """Why the host does not get the project."""
        return HostUnreachable(self.host.name, "sync", reason, remedy)

    async def unless_stalled(self, work: Coroutine[Any, Any, T], moved: Callable[[], int]) -> T:
        """``work``, given up when ``moved`` has not grown for ``STALL_S``."""
        task, before = asyncio.create_task(work), -1
        try:
            while not (await asyncio.wait({task}, timeout=STALL_S))[0]:
                if moved() == before:
                    raise self.failure(f"no byte has moved for {STALL_S:g} s", "see the network, and the disk there")
                before = moved()
                if self._process is not None:
                    self._process.stdin.write(b"\n")  # the agent gives up a side that says nothing
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    # ------------------------------------------------------------------------------------------------------ the agent
    async def _start(self) -> None:
        source = importlib.resources.files("flodl.launch.sync").joinpath("agent.py").read_bytes()
        try:
            async with asyncio.timeout(START_S):
                command = agent_command(self.host)
                self._process = await self.login.connection.create_process(command, encoding=None)
                self._process.stdin.write(b"%d\n%b" % (len(source), source))
                self._buffer = await past_marker(self._process.stdout.read)
        except TimeoutError:
            raise self.failure(f"its interpreter was not ready within {START_S:g} s", START_REMEDY) from None
        except Noise as noise:
            self._buffer = noise.printed
            raise (await self._ended() if noise.has_ended else self._noisy()) from None
        except (OSError, asyncssh.Error) as error:
            raise self._lost(error) from None
        opened = await self._ask({"do": "open", "root": self.host.project}, lambda _: None)
        self.root, self.rsync = str(opened.get("root")), str(opened.get("rsync"))

    def _noisy(self) -> HostUnreachable:
        return self.failure(f"its login shell prints without end{self._said()}", START_REMEDY)

    async def _ask(self, request: Reply, part: Callable[[Reply], None]) -> Reply:
        """The agent's last answer to ``request``; ``part`` gets those before it, but for its beats."""
        assert self._process is not None
        try:
            self._process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            while True:
                async with asyncio.timeout(STALL_S):
                    await self._process.stdin.drain()
                    reply = await self._reply()
                if "fault" in reply:
                    raise self.failure(printable(str(reply["fault"])))
                if "done" in reply:
                    return reply
                if "beat" not in reply:
                    part(reply)
        except TimeoutError:
            raise self.failure(f"silent for {STALL_S:g} s", "see its disk, and the network") from None
        except (OSError, asyncssh.Error) as error:
            raise self._lost(error) from None

    async def _reply(self) -> Reply:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise self.failure(NONSENSE)
            await self._read_more()
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise self.failure(NONSENSE)
        return reply

    async def _read_more(self) -> None:
        assert self._process is not None
        data = await self._process.stdout.read(PIECE_BYTES)
        if not data:
            raise await self._ended()
        self._buffer += data

    async def _ended(self) -> HostUnreachable:
        """Why the agent has ended: its last words are a traceback, or a shell's."""
        assert self._process is not None
        with contextlib.suppress(OSError, asyncssh.Error, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                self._buffer += await self._process.stderr.read(MAX_NOISE_BYTES)
                await self._process.wait_closed()
        if self._process.returncode in (INTERPRETER_MISSING, 127):
            python = self.host.python or "python3 (of the login shell's PATH)"
            remedy = f"set `python` of worker {self.host.name} to an interpreter, by its absolute path"
            return self.failure(f"interpreter {python} not found", remedy)
        return self.failure(f"the copying there has ended with code {self._process.returncode}{self._said()}")

    def _said(self) -> str:
        words = printable(self._buffer.decode("utf-8", "replace")).split("\n")
        last = " ".join(word.strip() for word in words if word.strip())[-NOISE_SHOWN:]
        return f"; it said: {last}" if last else ""

    def _lost(self, error: Exception) -> HostUnreachable:
        return self.failure(f"the ssh session was lost: {error}")

    async def _close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError, asyncssh.Error, TimeoutError):
            self._process.stdin.write_eof()
            await asyncio.wait_for(self._process.wait_closed(), CLOSE_S)
        self._process.close()


async def past_marker(read: Read) -> bytes:
    """What has come behind the marker, of whatever the host says first.

    Raises:
        Noise: no marker came.
    """
    marker, buffer = f"\n{MARKER}\n".encode(), b""
    while marker not in buffer:
        data = await read(PIECE_BYTES)
        buffer += data
        if not data or len(buffer) > MAX_NOISE_BYTES:
            raise Noise(buffer, has_ended=not data)
    return buffer.partition(marker)[2]


def _found(pair: object) -> Found:
    match pair:
        case [str(content), bool(is_executable)]:
            return Found(content, is_executable)
        case _:
            return Found("?")


def _named(paths: Sequence[object]) -> str:
    return first_few([printable(str(path)) for path in paths])


def _list(reply: Reply, key: str) -> list[object]:
    value = reply.get(key)
    return value if isinstance(value, list) else []
