"""One rank of the collective plane's tests: obeys the test over a pipe and reports what its plane says.

Usage: collective_peer.py CONTROL_FD RANK. Commands and reports are tuples, the command's name first.
"""

import hashlib
import os
import sys
import threading
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch

from flodl.averaging.collective import CollectivePlane
from flodl.errors import DeadlineExceeded
from flodl.messages import Layout, StoreReply, StoreRequest

torch.set_num_threads(1)


class Peer:
    """The main thread reads commands and never blocks in the plane; callbacks only send."""

    def __init__(self, control: Connection, rank: int) -> None:
        self.control = control
        self.rank = rank
        self.send_lock = threading.Lock()
        self.numbers = count(1)
        self.replies: dict[int, tuple[threading.Event, list[StoreReply]]] = {}
        self.plane = CollectivePlane(self.call, torch.device("cpu"), "127.0.0.1", store_timeout_s=20.0)

    def report(self, *words: Any) -> None:
        with self.send_lock:
            self.control.send(words)

    def call(
        self, op: str, keys: tuple[str, ...], values: tuple[bytes, ...], number: int, timeout_s: float
    ) -> tuple[bool, tuple[bytes, ...], int]:
        request = StoreRequest(self.rank, next(self.numbers), op, keys, values, number)
        arrived, replies = self.replies[request.request] = (threading.Event(), [])
        self.report("store", request)
        if not arrived.wait(timeout_s):
            raise DeadlineExceeded(f"no reply to {op} within {timeout_s} s")
        return replies[0].found, replies[0].values, replies[0].number

    def obey(self, command: tuple[Any, ...]) -> None:
        match command:
            case ("store_reply", reply):
                arrived, replies = self.replies.pop(reply.request)
                replies.append(reply)
                arrived.set()
            case ("form", incarnation, attempt, ranks, timeout_s):
                done = lambda error: self.report("formed", (incarnation, attempt), error)  # noqa: E731
                self.plane.form(incarnation, attempt, ranks, self.rank, timeout_s, done)
            case ("reduce", layout, value, include_raw):
                fill(self.plane.side_buffer(layout), layout, value, include_raw and self.rank == 0)
                self.plane.all_reduce(layout, include_raw, lambda error: self.report("reduced", value, error))
                self.report("reducing", value)
            case ("contribute", layout, image, include_raw):
                self.plane.side_buffer(layout).copy_(torch.frombuffer(bytearray(image), dtype=torch.uint8))
                self.plane.all_reduce(layout, include_raw, lambda error: self.report("reduced", 0, error))
            case ("image", layout):
                self.report("image", self.plane.side_buffer(layout).numpy().tobytes())
            case ("abandon",):
                self.plane.abandon()
                self.report("abandoned")
            case ("sums", layout):
                self.report("sums", sums_of(self.plane.side_buffer(layout), layout))
            case ("parked",):
                images = [item[0] for item in self.plane._parked if isinstance(item, tuple)]
                digests = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images]
                self.report("parked", digests, self.plane.parked_bytes, self.plane.must_hard_exit)
            case _:
                raise ValueError(command)


def fill(image: torch.Tensor, layout: Layout, value: int, is_source: bool) -> None:
    image.zero_()
    image[: layout.f32_count * 4].view(torch.float32).fill_(value)
    image[layout.f64_offset : layout.f64_offset + layout.f64_count * 8].view(torch.float64).fill_(value)
    image[layout.raw_offset : layout.raw_offset + layout.raw_bytes].fill_(200 if is_source else 0)


def sums_of(image: torch.Tensor, layout: Layout) -> tuple[list[float], list[float], list[int], str]:
    """The distinct values of each region, and a digest of all bytes."""
    f32 = image[: layout.f32_count * 4].view(torch.float32)
    f64 = image[layout.f64_offset : layout.f64_offset + layout.f64_count * 8].view(torch.float64)
    raw = image[layout.raw_offset : layout.raw_offset + layout.raw_bytes]
    digest = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    return f32.unique().tolist(), f64.unique().tolist(), raw.unique().tolist(), digest


def main() -> None:
    peer = Peer(Connection(int(sys.argv[1])), int(sys.argv[2]))
    try:
        while True:
            peer.obey(peer.control.recv())
    except EOFError:
        if peer.plane.must_hard_exit:
            os._exit(0)


if __name__ == "__main__":
    main()
