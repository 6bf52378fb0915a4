"""An ssh server in this process, with hosts' peculiarities: noise, folders, interpreters, locked doors."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from flodl.launch.plan import HostKind, HostPlan, SshSpec

USER = "tester"

FAKE_DAEMON = """
import sys
from flodl.launch import bootstrap, document
given = bootstrap.read(sys.stdin.buffer)
with open(sys.argv[1], "w") as file:
    file.write(document.dump(given))
sys.stdout.buffer.write(bootstrap.ready_line(given.run_id))
sys.stdout.buffer.write(b"\\xff\\xfe after ready\\n")
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


@dataclass
class SshSite:
    """A home folder with keys and configuration, and a server that lets its key in."""

    home: Path
    port: int = 0
    noise: bytes = b""
    noise_stderr: bytes = b""
    connections: int = 0
    drop_first: int = 0
    forwards: bool = True
    has_sftp: bool = True
    commands: list[str] = field(default_factory=list)
    sessions: list[asyncssh.SSHServerConnection] = field(default_factory=list)
    host_key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    @property
    def key(self) -> Path:
        return self.home / ".ssh" / "id_ed25519"

    def trust(self, key: asyncssh.SSHKey | None = None, name: str | None = None) -> None:
        public = (key or self.host_key).export_public_key().decode().strip()
        with self.known_hosts.open("a") as file:
            file.write(f"{name or f'[127.0.0.1]:{self.port}'} {public}\n")

    def hang_up(self) -> None:
        """End every session."""
        for session in self.sessions:
            session.abort()
        self.sessions.clear()

    def spec(self, **changes: object) -> SshSpec:
        values: dict[str, object] = {"target": "127.0.0.1", "port": self.port, "user": USER}
        return SshSpec(**{**values, **changes})  # type: ignore[arg-type]

    def host(self, folder: Path, python: str, **ssh: object) -> HostPlan:
        settings = self.spec(**ssh)
        return HostPlan(
            "box", HostKind.SSH, ("cpu",), python, str(folder), ("t.py",), ssh=settings, project=str(folder)
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["SshSite"]:
        authorized = asyncssh.import_authorized_keys(
            (self.home / "authorized.pub").read_text() if (self.home / "authorized.pub").exists() else ""
        )
        site = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                site.connections += 1
                site.sessions.append(conn)

            def connection_requested(self, *_: object) -> bool:
                return True

            def server_requested(self, *_: object) -> bool:
                return site.forwards

        server = await asyncssh.create_server(
            Server,
            "127.0.0.1",
            0,
            server_host_keys=[self.host_key],
            authorized_client_keys=authorized,
            process_factory=self._run,
            sftp_factory=self.has_sftp,
            encoding=None,
        )
        self.port = server.get_port()
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _run(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        command = process.command or ""
        self.commands.append(command)
        process.stdout.write(self.noise)
        process.stderr.write(self.noise_stderr)
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.home), "SHELL": "/bin/sh"},
        )
        feeding = asyncio.create_task(_feed(process, child))
        try:
            await asyncio.gather(_copy(child.stdout, process.stdout), _copy(child.stderr, process.stderr))
            process.exit(await child.wait())
        finally:
            feeding.cancel()
            if child.returncode is None:
                child.kill()
                await child.wait()


async def _feed(process: Any, child: asyncio.subprocess.Process) -> None:
    try:
        await _copy(process.stdin, child.stdin)
    except asyncssh.SignalReceived:
        child.terminate()


async def _copy(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    if isinstance(sink, asyncio.StreamWriter):
        sink.close()


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
