"""What crosses the lab's bridge: captured whole by dumpcap, taken apart by tshark, TCP streams put together here."""

import os
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

START_S: Final = 15.0
DISSECT_S: Final = 60.0

Side: TypeAlias = tuple[str, int]
"""Address and port."""

CHANGE_CIPHER, ALERT, HANDSHAKE, DATA = 20, 21, 22, 23
MAX_RECORD_BYTES: Final = 16 * 1024 + 256
TLS_1_3: Final = "0x0304"


def obstacle() -> str:
    """Why nothing can be captured here; empty when it can."""
    missing = [name for name in ("dumpcap", "tshark") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (package tshark)" if missing else ""


@dataclass
class Traffic:
    """``streams``: what went from one side to the other, whole; ``others`` are protocols beside TCP, with payload."""

    path: Path
    streams: dict[tuple[Side, Side], bytes] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    def hello_versions(self, port: int) -> list[str]:
        """The version that each server on ``port`` has chosen, by its hello."""
        wanted = f"tls.handshake.type == 2 && tcp.srcport == {port}"
        fields = ("tls.handshake.extensions.supported_version",)
        return _dissect(self.path, wanted, fields, "-d", f"tcp.port=={port},tls")

    def read(self) -> None:
        """Take the captured file apart."""
        fields = ("ip.src", "tcp.srcport", "ip.dst", "tcp.dstport", "tcp.seq", "tcp.payload")
        pieces: dict[tuple[str, ...], dict[int, bytes]] = defaultdict(dict)
        for line in _dissect(self.path, "ip && tcp.len > 0", ("tcp.stream", *fields)):
            stream, *words, seq, payload = line.split("\t")
            data = bytes.fromhex(payload)
            at = pieces[stream, *words]
            at[int(seq)] = max(at.get(int(seq), b""), data, key=len)
        for (_, source, source_port, target, target_port), at in pieces.items():
            way = ((source, int(source_port)), (target, int(target_port)))
            self.streams[way] = self.streams.get(way, b"") + _joined(at)
        self.others = set(_dissect(self.path, "ip && !tcp && !icmp", ("_ws.col.Protocol",)))


@contextmanager
def captured(interface: str, path: Path) -> Iterator[Traffic]:
    """Everything on ``interface`` while the block runs; taken apart at its end. Fails when a packet was missed."""
    said = path.with_suffix(".said")
    with said.open("wb") as err:
        command = ["dumpcap", "-q", "-i", interface, "-s", "0", "-B", "64", "-w", str(path)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
    try:
        _wait_for_text(said, "File: ", process)
        traffic = Traffic(path)
        yield traffic
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(START_S)
    counts = said.read_text().partition("received/dropped")[2]
    assert "/0 (" in counts, f"packets were missed: {said.read_text()}"
    traffic.read()


def records(data: bytes) -> list[int]:
    """The types of the TLS records that make up ``data``; the last one may be torn.

    Raises:
        ValueError: something there is no record.
    """
    types, at = [], 0
    while at < len(data):
        kind, version, length = data[at], data[at + 1 : at + 3], int.from_bytes(data[at + 3 : at + 5], "big")
        is_record = kind in (CHANGE_CIPHER, ALERT, HANDSHAKE, DATA) and version in (b"\x03\x01", b"\x03\x03")
        if not is_record or length > MAX_RECORD_BYTES:
            raise ValueError(f"byte {at} of {len(data)} begins no TLS record: {data[at : at + 16].hex()}")
        types.append(kind)
        at += 5 + length
    return types


def _joined(at: dict[int, bytes]) -> bytes:
    """The bytes of one direction of one stream; what was sent again is taken once."""
    joined = bytearray()
    start = min(at)
    for seq, data in sorted(at.items()):
        behind = start + len(joined) - seq
        assert behind >= 0, f"a gap before byte {seq}"
        joined += data[behind:]
    return bytes(joined)


def _dissect(path: Path, wanted: str, fields: tuple[str, ...], *options: str) -> list[str]:
    shown = [word for name in fields for word in ("-e", name)]
    command = ["tshark", "-n", "-r", str(path), "-Y", wanted, "-T", "fields", *shown, *options]
    environ = {**os.environ, "HOME": str(path.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DISSECT_S, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _wait_for_text(path: Path, text: str, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_S
    while text not in path.read_text():
        assert process.poll() is None, path.read_text()
        assert time.monotonic() < deadline_s, path.read_text()
        os.sched_yield()
