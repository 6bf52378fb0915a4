r"""What a daemon is given on its standard input, and how it says that it has read it.

Both directions are framed by a marker, so that a login banner, an rc file's output or a stray print before it cannot
be taken for data: ``FDL1 <length>\n<json>`` to the daemon, ``\nFDL1 ready <run_id>\n`` back on its standard output.
Secrets travel here and nowhere else: no argument, no environment of ssh.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from flodl.config.tls import TlsMode
from flodl.errors import RemoteProtocolError
from flodl.launch.document import DocumentFault, dump, load

MARKER: Final = b"FDL1 "

MAX_BOOTSTRAP_BYTES: Final = 4 << 20
"""Room for an environment and arguments as large as Linux passes to a process (2 MiB), escaped."""

MAX_HEADER_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Liveness:
    """When silence counts, in seconds: beats every ``heartbeat_s``; suspect, then dead; start-up has its own limit."""

    heartbeat_s: float = 1.0
    suspect_s: float = 10.0
    dead_s: float = 30.0
    startup_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Everything a daemon needs to serve one run on one host.

    ``secret`` is the host's in hex (``wire.handshake.derive_host_secret``). ``controllers`` are ``host:port``
    candidates (IPv6 in brackets), tried in order. ``devices`` are as configured: ``cpu`` once per CPU rank, GPU indices
    or UUIDs, or ``all``. ``script`` is what follows the interpreter, verbatim: ``train.py --x`` or ``-m pkg.module
    --x``. ``cwd`` is absolute, or ``.``, the folder in which the daemon was started. ``python`` empty means the
    daemon's own interpreter. ``env`` is added to the daemon's own environment for every rank. ``spool_dir`` is where
    the ranks' output is kept until it has been shipped; empty lets the daemon make a private temporary directory.
    ``tls`` says at which of the controllers' addresses the daemon wants TLS. ``tunnelled``: those addresses are this
    end of an ssh session that leads to the controller. ``is_walk_in``: the host came by itself, and ``secret`` is its
    join secret. ``project`` is what the roster says of the project's folder there, for a walk-in of the roster that has
    no word of its own.
    """

    run_id: str
    secret: str = field(repr=False)
    controllers: tuple[str, ...]
    host: str
    devices: tuple[str, ...]
    script: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    python: str
    liveness: Liveness
    on_disconnect_s: float
    stop_timeout_s: float
    spool_dir: str = ""
    tls: TlsMode = TlsMode.AUTO
    tunnelled: bool = False
    is_walk_in: bool = False
    project: str = ""


def encode(bootstrap: Bootstrap) -> bytes:
    """The framed bytes for the daemon's standard input."""
    body = dump(bootstrap).encode()
    return MARKER + str(len(body)).encode() + b"\n" + body


def read(stream: BinaryIO) -> Bootstrap:
    """Read one bootstrap from ``stream`` and nothing behind it; blocks until it is complete.

    Raises:
        RemoteProtocolError: no marker, a length out of bounds, the stream ended early, or a field does not fit. The
            text quotes no value.
    """
    header = stream.readline(MAX_HEADER_BYTES)
    digits = header[len(MARKER) : -1]
    if not header.startswith(MARKER) or not header.endswith(b"\n") or not digits.isdigit():
        raise RemoteProtocolError("bootstrap: expected 'FDL1 <length>' on standard input")
    length = int(digits)
    if length > MAX_BOOTSTRAP_BYTES:
        raise RemoteProtocolError(f"bootstrap: {length} bytes, at most {MAX_BOOTSTRAP_BYTES} are accepted")
    body = b""
    while len(body) < length:
        piece = stream.read(length - len(body))
        if not piece:
            raise RemoteProtocolError(f"bootstrap: ended after {len(body)} of {length} bytes")
        body += piece
    try:
        return load(Bootstrap, body)
    except DocumentFault as fault:
        raise RemoteProtocolError(f"bootstrap: {fault}") from None


def ready_line(run_id: str) -> bytes:
    """What the daemon writes to its standard output once it has read its bootstrap."""
    return b"\n" + MARKER + b"ready " + run_id.encode() + b"\n"


class ReadyScanner:
    """Takes the ready line out of a stream of noise, whatever its pieces; keeps no more than the line's length."""

    def __init__(self, run_id: str) -> None:
        self._line = ready_line(run_id)
        self._held = b""
        self._last = b"\n"
        self.is_found = False

    def feed(self, data: bytes) -> bytes:
        """The noise so far, without the ready line; what may be its beginning is held back. Behind it all is noise."""
        if self.is_found:
            return data
        window = self._held + data
        before, line, behind = window.partition(self._line)
        if line:
            self.is_found, self._held = True, b""
            is_open = (self._last + before)[-1:] != b"\n"
            return before + (b"\n" if is_open else b"") + behind
        sizes = range(len(self._line) - 1, 0, -1)
        kept = len(window) - next((size for size in sizes if window.endswith(self._line[:size])), 0)
        self._held = window[kept:]
        self._last = window[:kept][-1:] or self._last
        return window[:kept]

    def rest(self) -> bytes:
        """What is held back, once the stream has ended."""
        held, self._held = self._held, b""
        return held
