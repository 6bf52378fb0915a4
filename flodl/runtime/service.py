"""What systemd gives a service, and what it hears from it: readiness, status, watchdog pings (sd_notify(3)).

The variables are taken out of the environment, so that no process below can speak for the service or find its token.
Outside of systemd everything here does nothing.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

OWN_VARIABLES: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "CREDENTIALS_DIRECTORY",
)
"""What is meant for the service's own process."""


@dataclass(frozen=True, slots=True)
class Service:
    """``watchdog_s``: how long the service manager goes without a ping before it ends us; None when it does not watch.
    ``credentials``: the folder of what ``LoadCredential=`` loaded, None without it.
    """

    address: str = ""
    watchdog_s: float | None = None
    credentials: Path | None = None

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str], pid: int) -> Self:
        """What ``environ`` holds for process ``pid``; it holds none of it any more afterwards."""
        given = {name: environ.pop(name, "") for name in OWN_VARIABLES}
        period, meant = given["WATCHDOG_USEC"], given["WATCHDOG_PID"]
        is_watched = period.isascii() and period.isdigit() and int(period) > 0 and meant in ("", str(pid))
        folder = given["CREDENTIALS_DIRECTORY"]
        return cls(given["NOTIFY_SOCKET"], int(period) / 1e6 if is_watched else None, Path(folder) if folder else None)

    def tell(self, **words: object) -> None:
        """Send ``NAME=value`` lines, such as ``READY=1``; a service manager that does not listen changes nothing."""
        if not self.address.startswith(("/", "@")):
            return
        text = "\n".join(f"{name}={str(value).replace(os.linesep, ' ')}" for name, value in words.items())
        target = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.settimeout(1.0)  # a full queue must not hold up what is watched
            sock.sendto(text.encode(errors="backslashreplace"), target)
