"""The CPU plane on one host: contributions and their sum in one block of shared memory.

The block is a memfd made by the daemon and inherited by its ranks: ``[result][slot 0] … [slot slots-1]``, each
``Layout.total_bytes`` long. Who writes when is the protocol's business (``messages``: a rank writes its slot, then its
slice of the result once every contribution is written). A rank that was removed may still write into the block until
its process has ended, so the daemon opens no round before it has reaped the ranks that are no part of it.
Imports no torch: the daemon uses the same class to stream the result.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from flodl.averaging.regions import Bytes, slice_bounds, sum_range
from flodl.messages import Layout


class SharedPlane:
    """One process's view of its host's block of shared memory."""

    def __init__(self, fd: int, slots: int, slot: int | None = None) -> None:
        """``fd`` is the inherited memfd, ``slot`` this process's place among ``slots``; None in the daemon."""
        if slot is not None and not 0 <= slot < slots:
            raise ValueError(f"slot {slot} of {slots}: must be in [0, slots)")
        self._fd = fd
        self._slots = slots
        self._slot = slot
        self._map: mmap.mmap | None = None
        self._block: Bytes = np.empty(0, np.uint8)

    def contribution(self, layout: Layout) -> memoryview:
        """This process's slot: writable bytes [total_bytes], the same memory at every call while the layout stays.

        Raises:
            OSError: The block had to grow and the host has no memory left for it.
        """
        if self._slot is None:
            raise ValueError("a daemon has no slot of its own: construct SharedPlane with one to contribute")
        return self._image(layout, self._slot + 1).data

    def result(self, layout: Layout) -> memoryview:
        """The area of the host's sum and, once published, of the consensus: writable bytes [total_bytes].

        Raises:
            OSError: The block had to grow and the host has no memory left for it.
        """
        return self._image(layout, 0).data

    def reduce_slice(self, layout: Layout, index: int, slices: int, slots: Sequence[int]) -> None:
        """Sum slice ``index`` of ``slices`` over ``slots``, in ascending slot order, into the result area.

        Raises:
            ValueError: No slots, a slot that does not exist or is named twice, or an impossible slice.
            OSError: The block had to grow and the host has no memory left for it.
        """
        ordered = sorted(set(slots))
        if not ordered or len(ordered) != len(slots) or not 0 <= ordered[0] <= ordered[-1] < self._slots:
            raise ValueError(f"cannot reduce slots {tuple(slots)} of {self._slots}")
        start, stop = slice_bounds(layout, index, slices)
        sources = [self._image(layout, slot + 1) for slot in ordered]
        sum_range(layout, self._image(layout, 0), sources, start, stop)

    def _image(self, layout: Layout, index: int) -> Bytes:
        size = layout.total_bytes
        needed = size * (self._slots + 1)
        if needed > self._block.size:
            self._grow(needed)
        return self._block[index * size : (index + 1) * size]

    def _grow(self, needed: int) -> None:
        # posix_fallocate never shrinks, so processes may race here, and it reports a host without memory as an
        # error now instead of SIGBUS at the first touch. The old map lives as long as somebody holds a view of it.
        os.posix_fallocate(self._fd, 0, needed)
        self._map = mmap.mmap(self._fd, needed)
        self._block = np.frombuffer(self._map, np.uint8)
