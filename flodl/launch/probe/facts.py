"""What a host says of itself, as records: checked strictly on the way in, for it comes from elsewhere.

Field by field this is what ``collect`` answers; sizes are bytes, a version that is empty means that there is none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from flodl.errors import RemoteProtocolError
from flodl.launch.document import DocumentFault, load

MARKER: Final = b"\nFDL1 "
MAX_FRAME_BYTES: Final = 1 << 20
MAX_NOISE_BYTES: Final = 4 << 20
"""What a login may print before and between the answers; an rc file that prints a mebibyte has been seen."""

MAX_HEADER_BYTES: Final = 128
KEPT_NOISE_BYTES: Final = 2048
OLDEST_PYTHON: Final = (3, 11)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What an installed torch was built for, by its own file; ``cuda`` and ``hip`` are versions."""

    version: str
    cuda: str
    hip: str


@dataclass(frozen=True, slots=True)
class TorchImport:
    """What importing torch gave: ``arches`` as in ``sm_90 compute_90``, or the ``error``."""

    error: str
    arches: tuple[str, ...]
    nccl: str


@dataclass(frozen=True, slots=True)
class SmiAnswer:
    """What nvidia-smi printed, untouched: GPUs, their use, the processes on them, the listing with MIG slices."""

    path: str
    query: str
    use: str
    apps: str
    listing: str
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that the run uses, and the room on its file system (of the nearest folder above, where it is not
    there). ``role``: project, temporary, shared memory, data, run directory.
    """

    role: str
    path: str
    is_folder: bool
    is_read_only: bool
    total_bytes: int
    free_bytes: int
    error: str


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, with addresses that others may dial."""

    name: str
    mtu: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunSeen:
    """Processes of this user that carry a run's mark; attended: its daemon or head still looks after all of them."""

    run_id: str
    pids: tuple[int, ...]
    is_attended: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """One host. ``limits`` are soft ones, -1 without a limit; ``visible`` is CUDA_VISIBLE_DEVICES there, None where it
    is not set; ``code`` are files of the project that are other ones there, with their SHA-256, empty where they are
    missing; ``amd`` is what tells of an AMD GPU; ``torch``, ``smi`` and ``torch_import`` are None where there is none
    or nobody asked.
    """

    hostname: str
    user: str
    is_root: bool
    python: str
    executable: str
    cores: int
    memory_bytes: int
    packages: Mapping[str, str]
    torch: TorchBuild | None
    limits: Mapping[str, int]
    has_rdma: bool
    interfaces: tuple[Interface, ...]
    script: str
    code: Mapping[str, str]
    missing_modules: tuple[str, ...]
    runs: tuple[RunSeen, ...]
    driver: str
    amd: str
    visible: str | None
    places: tuple[Place, ...]
    smi: SmiAnswer | None
    torch_import: TorchImport | None
    port: int = 0


@dataclass(frozen=True, slots=True)
class Reached:
    """Whether somebody could be dialled: at ``address``, from ``source``; else why not."""

    address: str
    source: str
    error: str


@dataclass(frozen=True, slots=True)
class Reach:
    """Whom a host could dial, with its wall clock when it heard the question and when it answered, in seconds."""

    heard_s: float
    said_s: float
    controller: Reached
    peers: Mapping[str, Reached] = field(default_factory=dict)


def read_facts(body: bytes) -> Facts:
    """Raises:
    RemoteProtocolError: a field is missing, unknown or of another type.
    """
    return _read(Facts, body)


def read_reach(body: bytes) -> Reach:
    """Raises:
    RemoteProtocolError: a field is missing, unknown or of another type.
    """
    return _read(Reach, body)


def _read(kind: type[T], body: bytes) -> T:
    try:
        return load(kind, body)
    except (DocumentFault, RecursionError) as fault:
        raise RemoteProtocolError(f"the host's answer: {fault}") from None


def request_line(record: Mapping[str, object]) -> bytes:
    """A question as ``collect`` reads it."""
    return json.dumps(record).encode() + b"\n"


class AnswerScanner:
    r"""Finds answers in a stream of noise, whatever its pieces; keeps little of the noise, and no more than one answer.

    An answer is ``\nFDL1 <nonce> <length>\n<json>``; the interpreter's own is ``\nFDL1 python <nonce> <version>\n``.
    Nobody who has not seen the nonce can make one up.
    """

    def __init__(self, nonce: str) -> None:
        self.python = ""
        self.noise = b""
        self._answer = MARKER + nonce.encode() + b" "
        self._python = MARKER + b"python " + nonce.encode() + b" "
        self._buffer = b""
        self._noise_left_bytes = MAX_NOISE_BYTES

    @property
    def said(self) -> bytes:
        """The end of what was printed and is no answer, for whoever looks for the reason."""
        return (self.noise + self._buffer)[-KEPT_NOISE_BYTES:]

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies of the answers that are complete now.

        Raises:
            RemoteProtocolError: an answer or the noise is too long, or a length is no number.
        """
        self._buffer += data
        bodies = []
        while (body := self._next()) is not None:
            if body:
                bodies.append(body)
        return bodies

    def _next(self) -> bytes | None:
        """The next body; empty for the interpreter's own line, None where more is needed."""
        found = [(at, marker) for marker in (self._answer, self._python) if (at := self._buffer.find(marker)) >= 0]
        if not found:
            self._drop(max(0, len(self._buffer) - MAX_HEADER_BYTES))
            return None
        at, marker = min(found)
        self._drop(at)
        header, end, rest = self._buffer[len(marker) :].partition(b"\n")
        if len(header) > MAX_HEADER_BYTES:
            raise RemoteProtocolError("the host's answer: its header does not end")
        if not end:
            return None
        header = header.removesuffix(b"\r")  # a login on a terminal ends lines so
        if marker == self._python:
            self.python, self._buffer = header.decode("ascii", "replace"), b"\n" + rest
            return b""
        if not header.isdigit() or not 0 < int(header) <= MAX_FRAME_BYTES:
            raise RemoteProtocolError(f"the host's answer: expected a length up to {MAX_FRAME_BYTES}")
        if len(rest) < int(header):
            return None
        self._buffer = rest[int(header) :]
        return rest[: int(header)]

    def _drop(self, count: int) -> None:
        self.noise = (self.noise + self._buffer[:count])[-KEPT_NOISE_BYTES:]
        self._buffer = self._buffer[count:]
        self._noise_left_bytes -= count
        if self._noise_left_bytes < 0:
            raise RemoteProtocolError(f"it printed more than {MAX_NOISE_BYTES} bytes that are no answer")
