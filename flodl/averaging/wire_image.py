"""How an image crosses a network hop: byte for byte, or with its float32 region in bfloat16.

Narrowed, an image is the bfloat16 of every element of the float32 region, padding included, and behind it the float64
and raw regions as they are. bfloat16 is the upper half of a float32, rounded to nearest, ties to even; infinities stay,
a NaN stays a NaN. Sums are made in float32, in the order of their sources, and rounded once, so that every receiver of
the same bytes widens them to the same values. NumPy only, like ``regions``; byte order is the machine's, as in images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from flodl.averaging.regions import BLOCK_BYTES, Bytes, sum_range
from flodl.messages import Layout

_Floats: TypeAlias = npt.NDArray[np.float32]
_Halves: TypeAlias = npt.NDArray[np.uint16]

_NARROW_BLOCK: Final = BLOCK_BYTES // 2
"""Bytes of bfloat16 that stand for one block of float32."""

_QUIET: Final = 0x40
"""The bit of a bfloat16 that keeps a NaN a NaN when the lower half held all of its payload."""


@dataclass(frozen=True, slots=True)
class WireImage:
    """The form of one round's images on the network; ``is_bf16``: float32 as bfloat16. Offsets are on the wire."""

    layout: Layout
    is_bf16: bool = False

    @property
    def total_bytes(self) -> int:
        """Size of one image on the wire."""
        return self.layout.total_bytes - self._narrow_bytes

    def encode(self, image: Bytes, start: int, stop: int, scratch: Bytes) -> Bytes:
        """Bytes ``[start, stop)`` of the wire's form of ``image``: a view of it, or of ``scratch``, at least as long.

        ``start`` and ``stop`` are even.
        """
        shift, narrow_stop = self._narrow_bytes, min(stop, self._narrow_bytes)
        if start >= self._narrow_bytes:
            return image[start + shift : stop + shift]
        for lo, hi in _blocks(start, narrow_stop):
            _narrow(image[2 * lo : 2 * hi].view(np.float32), scratch[lo - start : hi - start].view(np.uint16))
        scratch[narrow_stop - start : stop - start] = image[narrow_stop + shift : stop + shift]
        return scratch[: stop - start]

    def decode(self, data: Bytes, start: int, image: Bytes) -> None:
        """Put wire bytes ``[start, start + len(data))`` into their place in ``image``; both bounds are even."""
        shift, stop = self._narrow_bytes, start + data.size
        narrow_stop = min(stop, self._narrow_bytes)
        for lo, hi in _blocks(start, narrow_stop):
            _widen(data[lo - start : hi - start].view(np.uint16), image[2 * lo : 2 * hi].view(np.float32))
        rest = max(start, narrow_stop)
        image[rest + shift : stop + shift] = data[rest - start :]

    def sum_range(self, result: Bytes, sources: Sequence[Bytes], start: int, stop: int) -> None:
        """``result[start:stop] = Σ sources[·][start:stop]`` over images in the wire's form; see ``regions.sum_range``.

        ``start`` and ``stop`` are multiples of ``regions.ALIGNMENT`` or the end.
        """
        shift = self._narrow_bytes
        for lo, hi in _blocks(start, min(stop, shift)):
            total = np.empty((hi - lo) // 2, np.float32)
            _widen(sources[0][lo:hi].view(np.uint16), total)
            addend = np.empty_like(total)
            for source in sources[1:]:
                _widen(source[lo:hi].view(np.uint16), addend)
                total += addend
            _narrow(total, result[lo:hi].view(np.uint16))
        if stop > shift:
            rest = self.layout if not shift else Layout(0, self.layout.f64_count, self.layout.raw_bytes)
            tails = [source[shift:] for source in sources]
            sum_range(rest, result[shift:], tails, max(start - shift, 0), stop - shift)

    @property
    def _narrow_bytes(self) -> int:
        return self.layout.f64_offset // 2 if self.is_bf16 else 0


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for lo in range(start, stop, _NARROW_BLOCK):
        yield lo, min(lo + _NARROW_BLOCK, stop)


def _narrow(values: _Floats, out: _Halves) -> None:
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    out[:] = rounded
    bad = np.isnan(values)
    if bad.any():
        out[bad] = (bits[bad] >> np.uint32(16)) | np.uint32(_QUIET)


def _widen(halves: _Halves, out: _Floats) -> None:
    bits = out.view(np.uint32)
    bits[:] = halves
    bits <<= np.uint32(16)
