"""What TLS costs a bulk connection: throughput of chunks between two processes over loopback, under TLS and plain.

Loopback is where it shows most: there is no network that would be slower than the cipher. Up is a host's sum on its way
to the controller; both ways is a sum that comes back while it is sent. The best run counts, for other work on the
machine can only slow one down. The last line of output is a JSON object with bytes per second and the ratios of TLS to
plain.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from typing import Final

from flodl.config.tls import TlsMode
from flodl.errors import PeerLost
from flodl.messages import FromDaemon, ToDaemon
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.certificate import security_of
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.dial import Controller, Identity, connect_bulk
from flodl.runtime.line import Line
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.wire.chunks import CHUNK_BYTES, HEADER_BYTES
from flodl.wire.handshake import Peer, Role, derive_host_secret

RUNS: Final = 8
CHUNKS: Final = 128
LIMIT_S: Final = 60.0
RUN_ID: Final = "benchmark"
TOKEN: Final = bytes(32)
HOST: Final = "host"
MIB: Final = 1 << 20


def main() -> int:
    """Serve when asked to, else start a server for each mode and measure."""
    if len(sys.argv) > 1:
        asyncio.run(serve(TlsMode(sys.argv[1])))
        return 0
    figures: dict[str, float] = {}
    for mode in (TlsMode.OFF, TlsMode.ON):
        for name, rates in measure(mode).items():
            key = f"{name}_{'tls' if mode is TlsMode.ON else 'plain'}"
            figures[f"{key}_bytes_per_s"] = max(rates)
            print(f"{key:16} {max(rates) / MIB:7.0f} MiB/s, best of {RUNS} runs")
    for name in ("up", "both"):
        figures[f"{name}_ratio"] = figures[f"{name}_tls_bytes_per_s"] / figures[f"{name}_plain_bytes_per_s"]
        print(f"{name:16} {figures[f'{name}_ratio']:7.2f} of plain")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


def measure(mode: TlsMode) -> dict[str, list[float]]:
    """Bytes per second in one direction, of ``RUNS`` runs after one that warms up."""
    with subprocess.Popen([sys.executable, __file__, mode], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            identity = Identity(RUN_ID, derive_host_secret(TOKEN, HOST), Role.DAEMON, HOST)
            line, _ = asyncio.run(connect_bulk(Controller("127.0.0.1", port, mode), identity))
            frames = BlockingFrames(line.sock, "server", ToDaemon, line.tls)
            rates = {
                name: [transfer(frames, with_answer) for _ in range(RUNS + 1)][1:]
                for name, with_answer in (("up", False), ("both", True))
            }
            frames.close()
        finally:
            server.terminate()
    return rates


def transfer(frames: BlockingFrames, with_answer: bool) -> float:
    """Send ``CHUNKS`` chunks, with as many coming back at the same time or a short answer behind them."""
    header, chunk = bytes([with_answer]) * HEADER_BYTES, memoryview(bytearray(CHUNK_BYTES))
    start_s = time.perf_counter()
    receiving = threading.Thread(target=receive, args=(frames, CHUNKS if with_answer else 0))
    receiving.start()
    for _ in range(CHUNKS):
        frames.send_buffers(header, chunk, timeout_s=LIMIT_S)
    receiving.join()
    frames.receive_into(bytearray(1), LIMIT_S)
    return CHUNKS * CHUNK_BYTES / (time.perf_counter() - start_s)


def receive(frames: BlockingFrames, count: int) -> None:
    """Read ``count`` chunks."""
    header, chunk = bytearray(HEADER_BYTES), memoryview(bytearray(CHUNK_BYTES))
    for _ in range(count):
        frames.receive_into(header, LIMIT_S)
        frames.receive_into(chunk, LIMIT_S)


async def serve(mode: TlsMode) -> None:
    """Serve a port until terminated; its number goes to standard output."""
    listeners = listen("127.0.0.1", 0)
    security = security_of(mode, ["127.0.0.1"])
    print(port_of(listeners), flush=True)
    handlers = Handlers(_refuse, _serve_bulk, _refuse, _refuse)
    await PortMux(listeners, Run(RUN_ID, TOKEN), handlers, MonotonicClock(), security).serve()


async def _serve_bulk(peer: Peer, line: Line) -> None:
    frames = BlockingFrames(line.sock, peer.host, FromDaemon, line.tls)
    threading.Thread(target=_answer, args=(frames,), daemon=True).start()


def _answer(frames: BlockingFrames) -> None:
    """For each ``transfer``: read its chunks; send as many meanwhile where it asks for that; then say so."""
    header, chunk = bytearray(HEADER_BYTES), memoryview(bytearray(CHUNK_BYTES))
    with contextlib.suppress(PeerLost):
        while True:
            sending = None
            for _ in range(CHUNKS):
                frames.receive_into(header, LIMIT_S)
                if header[0] and sending is None:
                    sending = threading.Thread(target=_send, args=(frames,))
                    sending.start()
                frames.receive_into(chunk, LIMIT_S)
            if sending is not None:
                sending.join()
            frames.send_buffers(b"x")


def _send(frames: BlockingFrames) -> None:
    header, chunk = bytes(HEADER_BYTES), memoryview(bytearray(CHUNK_BYTES))
    for _ in range(CHUNKS):
        frames.send_buffers(header, chunk, timeout_s=LIMIT_S)


async def _refuse(*_: object) -> None:
    raise AssertionError("only bulk connections come here")


if __name__ == "__main__":
    sys.exit(main())
