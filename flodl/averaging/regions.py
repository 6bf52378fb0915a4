"""Summing flat images on the host: one blocked pass over a slice, in a fixed order.

NumPy only: the daemon and the controller sum images too, and they import no torch. An image is the byte string that
``messages.Layout`` describes; every region, its padding included, is summed in its own type. Padding is zero in every
image and stays zero in every sum. The raw region is summed as unsigned bytes, which is exact because all images but
the source's hold zeros there.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flodl.messages import Layout

Bytes: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64
"""Regions and slices start at multiples of this: a cache line, and every element type divides it."""

BLOCK_BYTES = 256 * 1024
"""One block of the result and of one source stay in the second-level cache while all sources are added."""


def slice_bounds(layout: Layout, index: int, slices: int) -> tuple[int, int]:
    """The half-open byte range of slice ``index`` of ``slices`` equal ones, multiples of ``ALIGNMENT``.

    Raises:
        ValueError: ``slices`` is not positive or ``index`` is not below it.
    """
    if slices < 1 or not 0 <= index < slices:
        raise ValueError(f"slice {index} of {slices}: the index must be in [0, slices)")
    units = layout.total_bytes // ALIGNMENT
    return units * index // slices * ALIGNMENT, units * (index + 1) // slices * ALIGNMENT


def sum_range(layout: Layout, result: Bytes, sources: Sequence[Bytes], start: int, stop: int) -> None:
    """``result[start:stop] = Σ sources[·][start:stop]``, added in the order of ``sources``.

    Args:
        layout: Describes all images.
        result: uint8 [total_bytes]; may be none of the sources.
        sources: At least one image, uint8 [total_bytes] each.
        start: First byte, a multiple of ``ALIGNMENT``.
        stop: One behind the last byte, a multiple of ``ALIGNMENT``.
    """
    for lo, hi, dtype in _blocks(layout, start, stop):
        out = result[lo:hi].view(dtype)
        if len(sources) == 1:
            out[:] = sources[0][lo:hi].view(dtype)
            continue
        np.add(sources[0][lo:hi].view(dtype), sources[1][lo:hi].view(dtype), out=out)
        for source in sources[2:]:
            np.add(out, source[lo:hi].view(dtype), out=out)


def _blocks(layout: Layout, start: int, stop: int) -> Iterator[tuple[int, int, "np.dtype[Any]"]]:
    regions = (
        (0, layout.f64_offset, np.dtype(np.float32)),
        (layout.f64_offset, layout.raw_offset, np.dtype(np.float64)),
        (layout.raw_offset, layout.total_bytes, np.dtype(np.uint8)),
    )
    for first, last, dtype in regions:
        region_stop = min(last, stop)
        for lo in range(max(first, start), region_stop, BLOCK_BYTES):
            yield lo, min(lo + BLOCK_BYTES, region_stop), dtype
