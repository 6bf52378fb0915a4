"""The controller's part of the CPU plane: the sum of the hosts' sums, chunk by chunk as they arrive.

Byte counts, not models: NumPy and a ``WireImage``, no torch. Readers receive straight into a host's buffer, a
range is summed as soon as every host has delivered it, in the fixed order of the hosts, and can be sent back while
the rest still arrives. One instance serves one round key; buffers go back to a pool, but never while a reader or
sender still holds a view of them: those are left to the garbage collector instead of being used again.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from flodl.averaging.regions import ALIGNMENT, Bytes
from flodl.averaging.wire_image import WireImage
from flodl.errors import RemoteProtocolError
from flodl.ids import HostName, RoundKey
from flodl.messages import Layout


class BufferPool:
    """Byte buffers that are used again; thread-safe."""

    def __init__(self, spare: int) -> None:
        """Keeps at most ``spare`` unused buffers."""
        self._spare = spare
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """A buffer of exactly ``size`` bytes with any content."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.size == size:
                    return self._free.pop(index)
        return np.empty(size, np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Hand back a buffer that nobody holds a view of."""
        with self._lock:
            self._free = [*self._free, buffer][-self._spare :] if self._spare else []


class HostSums:
    """Sums the images of several hosts for one round key; thread-safe."""

    def __init__(
        self, key: RoundKey, layout: Layout, hosts: Sequence[HostName], pool: BufferPool, bf16: bool = False
    ) -> None:
        """``hosts``: at least one, in the order of addition. Memory: ``len(hosts) + 1`` images, in the wire's form."""
        if not hosts or len(set(hosts)) != len(hosts):
            raise ValueError(f"hosts must be distinct and at least one, got {tuple(hosts)}")
        self.key = key
        self._form = form = WireImage(layout, bf16)
        self._pool = pool
        self._lock = threading.Lock()
        self._received = {host: pool.take(form.total_bytes) for host in hosts}
        self._arrived = dict.fromkeys(hosts, 0)
        self._result = pool.take(form.total_bytes)
        self._claimed = 0
        self._summed_bytes = 0
        self._holds = 0
        self._is_closed = False

    @property
    def hosts(self) -> tuple[HostName, ...]:
        """Who takes part, in the order of addition."""
        return tuple(self._received)

    @property
    def total_bytes(self) -> int:
        """Size of one image on the wire."""
        return self._form.total_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the whole result has been summed."""
        with self._lock:
            return self._summed_bytes == self.total_bytes

    @contextmanager
    def receiving(self, host: HostName, offset: int, length: int) -> Iterator[memoryview]:
        """Where to ``recv_into`` bytes ``[offset, offset + length)`` of this host's image; call ``landed`` afterwards.

        Raises:
            RemoteProtocolError: The host takes no part, the range is outside the image or behind a gap, or the round
                is closed.
        """
        with self._hold():
            self._check(host, offset, length)
            yield self._received[host][offset : offset + length].data

    def landed(self, host: HostName, offset: int, length: int) -> list[tuple[int, int]]:
        """Count received bytes and sum what every host has delivered; returns ranges (offset, length) of new results.

        A host sends its image in order. Bytes that arrive again, after a reconnect, must equal those before.

        Raises:
            RemoteProtocolError: As ``receiving``.
        """
        with self._hold():
            with self._lock:
                self._check_range(host, offset, length)
                self._arrived[host] = max(self._arrived[host], offset + length)
                start, stop = self._claimed, min(self._arrived.values())
                if stop < self.total_bytes:
                    stop -= stop % ALIGNMENT
                self._claimed = max(start, stop)
            if stop <= start:
                return []
            self._form.sum_range(self._result, list(self._received.values()), start, stop)
            with self._lock:
                self._summed_bytes += stop - start
            return [(start, stop - start)]

    def add_chunk(self, host: HostName, offset: int, data: bytes | memoryview) -> list[tuple[int, int]]:
        """``receiving`` and ``landed`` for bytes that are already here."""
        with self.receiving(host, offset, len(data)) as view:
            view[:] = data
        return self.landed(host, offset, len(data))

    @contextmanager
    def sending(self, offset: int, length: int) -> Iterator[memoryview]:
        """A range of the result that ``landed`` has returned, to send.

        Raises:
            RemoteProtocolError: The round is closed.
        """
        with self._hold():
            yield self._result[offset : offset + length].data.toreadonly()

    def close(self) -> None:
        """Drop the round. Readers and senders that still hold views keep them; nobody else gets that memory."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            buffers = [*self._received.values(), self._result] if self._holds == 0 else []
        for buffer in buffers:
            self._pool.give(buffer)

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise RemoteProtocolError(f"round {self.key} is closed")
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1

    def _check(self, host: HostName, offset: int, length: int) -> None:
        with self._lock:
            self._check_range(host, offset, length)

    def _check_range(self, host: HostName, offset: int, length: int) -> None:
        if host not in self._arrived:
            raise RemoteProtocolError(f"round {self.key}: host {host} takes no part, expected {sorted(self._arrived)}")
        arrived, total = self._arrived[host], self.total_bytes
        if length <= 0 or not 0 <= offset <= arrived or offset + length > total:
            raise RemoteProtocolError(
                f"round {self.key}: host {host} sent bytes [{offset}, {offset + length}), expected to go on "
                f"at {arrived} of {total}"
            )
