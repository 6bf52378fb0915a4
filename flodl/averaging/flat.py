"""A model as one flat image: what a rank contributes to a round, and what it adopts from it.

Image (``messages.Layout``): float32 sums (parameters, then float buffers), float64 sums (likewise), raw bytes of
integer and bool buffers. Padding is zero. ``tensors`` states which tensors travel how.

Nothing here allocates after the first use of a buffer, except where a tensor lives on another device than the image.
A contribution of weight 0 is filled with -0.0, the exact neutral element of float addition (0.0 + -0.0 is 0.0), so
that a round in which one rank has weight 1 and all others 0 reproduces that rank's values to the bit.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from flodl.averaging.digest import BLOCK_BYTES, ImageDigest
from flodl.averaging.tensors import Carriage, Entry, discover, parameter_names
from flodl.core.disagreement import TENSOR_DIGEST_BYTES
from flodl.errors import ConfigError
from flodl.messages import Layout

_WIDEST = 8
"""Bytes of the widest element; images and the tensors of the raw region start at multiples of it."""

_MAX_CACHED_IMAGES = 4
"""A rank alternates between a side buffer, its slot and the result area; a parked buffer must not stay cached long."""

_NEUTRAL = -0.0
_TINY_NORM = 1e-12


class FlatModel:
    """Packs a model's tensors into an image, and adopts an image back into them, in place."""

    def __init__(self, model: nn.Module) -> None:
        """Discover the tensors of ``model``, which must be built and on its device.

        Raises:
            ConfigError: A tensor that cannot be averaged, by name.
        """
        self._model, self._names = model, parameter_names(model)
        self._entries = discover(model)
        self._groups = _group(self._entries)
        self._raw = _place_raw(self._entries)
        self._device = self._entries[0].tensor().device if self._entries else torch.device("cpu")
        self._images: dict[tuple[int, int], _Image] = {}
        self._staging: torch.Tensor | None = None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self.layout = Layout(
            f32_count=_count(self._entries, Carriage.MEAN32),
            f64_count=_count(self._entries, Carriage.MEAN64),
            raw_bytes=self._raw[-1].stop if self._raw else 0,
        )

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._device

    def allocate(self) -> torch.Tensor:
        """A new image on the model's device: uint8 [total_bytes], zeros."""
        return torch.zeros(self.layout.total_bytes, dtype=torch.uint8, device=self._device)

    def pack(self, out: torch.Tensor, weight: float, buffer_weight: float, include_raw: bool) -> bool:
        """Write this rank's contribution; returns whether every value of it is finite.

        Args:
            out: uint8 [total_bytes], contiguous, on the model's device or the CPU (shared memory).
            weight: This rank's share of the parameters, 0 to 1. 0 writes zeros whatever the parameters hold.
            buffer_weight: The same for float buffers.
            include_raw: Whether this rank is the source of integer and bool buffers; else zeros are written.

        Raises:
            ConfigError: A tensor changed shape or dtype since construction, or a parameter was added.
        """
        self._refuse_added()
        near = out if out.device == self._device else self._staged()
        image = self._image(near)
        is_finite = True
        for group, views in zip(self._groups, image.groups, strict=True):
            share = weight if group.is_parameter else buffer_weight
            is_finite &= self._pack_group(group.entries, views, share, near)
        self._finish_pack(image, include_raw)
        if near is not out:
            out.copy_(near)
        return is_finite

    def pack_zeros(self, out: torch.Tensor, include_raw: bool) -> None:
        """Write the contribution of a rank whose values are not finite: zeros; raw bytes as in ``pack``."""
        self.pack(out, 0.0, 0.0, include_raw)

    def rescale(
        self, src: torch.Tensor, out: torch.Tensor, weight: float, buffer_weight: float, include_raw: bool
    ) -> None:
        """``pack`` from an image of weight 1 (``src``, on the model's device) instead of from the model."""
        near = self.near(out)
        source, target = self._image(src), self._image(near)
        for group, given, views in zip(self._groups, source.groups, target.groups, strict=True):
            share = weight if group.is_parameter else buffer_weight
            if share == 0.0:
                views.flat.fill_(_NEUTRAL)
            else:
                torch.mul(given.flat, share, out=views.flat)
        for gap in target.gaps:
            gap.zero_()
        if include_raw:
            target.raw_region.copy_(source.raw_region)
        else:
            target.raw_region.zero_()
        if near is not out:
            out.copy_(near)

    def blend(self, src: torch.Tensor, alpha: float) -> None:
        """``local ← (1 − alpha) · local + alpha · consensus`` for parameters and float buffers (EASGD); others stay.

        ``src`` is the consensus' image, ``alpha`` in (0, 1].
        """
        near = self.near(src)
        if near is not src:
            near.copy_(src)
        image = self._image(near)
        for group, views in zip(self._groups, image.groups, strict=True):
            for entry, center in zip(group.entries, views.tensors, strict=True):
                local = entry.tensor()
                if local.dtype == center.dtype:
                    local.lerp_(center, alpha)
                else:
                    local.copy_(local.to(center.dtype).lerp_(center, alpha))

    def adopt(self, src: torch.Tensor, take_raw: bool) -> None:
        """Copy the consensus into parameters and buffers, cast to their dtypes; shapes and strides stay.

        ``src`` is an image as in ``pack``. Without ``take_raw`` integer and bool buffers keep their values.
        """
        image = self._image(self.near(src))
        for group, views in zip(self._groups, image.groups, strict=True):
            _copy_all([entry.tensor() for entry in group.entries], views.tensors)
        if take_raw:
            _copy_all([place.entry.tensor() for place in self._raw], image.raw)

    def examine(self, src: torch.Tensor) -> tuple[str, float]:
        """The digest of a sum, and how far this rank is from it: ``‖pre − post‖ / ‖post‖`` over the parameters.

        The digest is equal on all ranks and both planes exactly when the bytes are; the divergence, taken before
        ``adopt``, is NaN when this rank's parameters are not finite. On the CPU both are taken of one block after the
        other, so that memory is read once; and norms of blocks are exact where one of 100 million values is 1 % off.
        """
        near = self.near(src)
        image, digest, done, difference, norm = self._image(near), ImageDigest(), 0, 0.0, 0.0
        for group, views in zip(self._groups, image.groups, strict=True):
            for entry, view in zip(group.entries, views.tensors, strict=True) if group.is_parameter else ():
                for pre, post in self._pieces(entry.tensor(), view, near):
                    while self._is_on_cpu and done <= post.data_ptr() - near.data_ptr():
                        digest.update(src[done : done + BLOCK_BYTES])
                        done += BLOCK_BYTES
                    scratch = torch.sub(pre, post, out=self._scratch_like(post))
                    difference += float(torch.linalg.vector_norm(scratch)) ** 2
                    norm += float(torch.linalg.vector_norm(post)) ** 2
        digest.update(src[done:])
        return digest.hexdigest(), math.sqrt(difference) / max(math.sqrt(norm), _TINY_NORM)

    def near(self, src: torch.Tensor) -> torch.Tensor:
        """``src`` on the model's device: itself, or a copy that the next call overwrites."""
        return src if src.device == self._device else self._staged().copy_(src)

    def parameters(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parameters in ``image``, on the model's device: 1-D views, float32 then float64, where there are any."""
        views = zip(self._groups, self._image(image).groups, strict=True)
        return tuple(view.flat for group, view in views if group.is_parameter and group.entries)

    def copy_rest(self, target: torch.Tensor, src: torch.Tensor) -> None:
        """Copy everything but the parameters from image to image, both on the model's device."""
        to, of = self._image(target), self._image(src)
        for group, mine, theirs in zip(self._groups, to.groups, of.groups, strict=True):
            if not group.is_parameter:
                mine.flat.copy_(theirs.flat)
        to.raw_region.copy_(of.raw_region)

    def tensor_digests(self, src: torch.Tensor) -> dict[str, bytes]:
        """A digest of 8 bytes of each tensor in an image, by name, and of what no tensor covers. Slow: 1 s per GB."""
        image = self._image(self.near(src))
        found: dict[str, bytes] = {}
        for group, views in zip(self._groups, image.groups, strict=True):
            found |= {entry.name: _digest8([view]) for entry, view in zip(group.entries, views.tensors, strict=True)}
        found |= {place.entry.name: _digest8([view]) for place, view in zip(self._raw, image.raw, strict=True)}
        found["(padding)"] = _digest8(image.gaps)
        return found

    def fingerprint(self) -> Mapping[str, str]:
        """What must be equal on all ranks: names, shapes, dtypes and carriage, never values."""
        return {
            "parameters": _fingerprint([entry for entry in self._entries if entry.is_parameter]),
            "buffers": _fingerprint([entry for entry in self._entries if not entry.is_parameter]),
        }

    @property
    def _is_on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def _pieces(
        self, own: torch.Tensor, view: torch.Tensor, image: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A tensor beside its place in ``image``, on the CPU cut where the image's blocks end: what fits a cache."""
        if not self._is_on_cpu or not own.is_contiguous():
            yield own, view
            return
        flat_own, flat_view, size = own.view(-1), view.view(-1), view.element_size()
        start, stop = 0, (BLOCK_BYTES - (view.data_ptr() - image.data_ptr()) % BLOCK_BYTES) // size
        while start < flat_own.numel():
            yield flat_own[start:stop], flat_view[start:stop]
            start, stop = stop, stop + BLOCK_BYTES // size

    def _refuse_added(self) -> None:
        """Each rank would keep values of its own in them, unseen by every digest."""
        added = sorted(parameter_names(self._model) - self._names)
        if added:
            raise ConfigError(
                f"parameter {added[0]} was added after training had started, and only what is there before is "
                "averaged: create every parameter in the model factory"
            )

    def _staged(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = self.allocate()
        return self._staging

    def _image(self, data: torch.Tensor) -> "_Image":
        key = (data.data_ptr(), data.numel())
        image = self._images.get(key)
        if image is None:
            if data.numel() != self.layout.total_bytes or data.dtype != torch.uint8:
                raise ValueError(
                    f"an image of this model is uint8 [{self.layout.total_bytes}], got {data.dtype} [{data.numel()}]"
                )
            while len(self._images) >= _MAX_CACHED_IMAGES:
                self._images.pop(next(iter(self._images)))
            image = self._images[key] = _view_image(data, self.layout, self._groups, self._raw)
        return image

    def _pack_group(self, entries: Sequence[Entry], views: "_GroupViews", share: float, image: torch.Tensor) -> bool:
        if share == 0.0:
            views.flat.fill_(_NEUTRAL)
            return True
        sums: list[torch.Tensor] = []
        for entry, view in zip(entries, views.tensors, strict=True):
            for own, place in self._pieces(entry.tensor(), view, image):
                if own.dtype == place.dtype:
                    torch.mul(own, share, out=place)
                else:
                    place.copy_(own).mul_(share)
                sums.append(place.sum())
        # Sums are a quick look: one that is not finite may be of huge values that are.
        return not sums or bool(torch.isfinite(torch.stack(sums)).all()) or bool(torch.isfinite(views.flat).all())

    def _finish_pack(self, image: "_Image", include_raw: bool) -> None:
        for gap in image.gaps:
            gap.zero_()
        if include_raw:
            _copy_all(image.raw, [place.entry.tensor() for place in self._raw])
        else:
            image.raw_region.zero_()

    def _scratch_like(self, tensor: torch.Tensor) -> torch.Tensor:
        scratch = self._scratch.get(tensor.dtype)
        if scratch is None or scratch.numel() < tensor.numel():
            largest = max(entry.shape.numel() for entry in self._entries if entry.is_parameter)
            scratch = self._scratch[tensor.dtype] = torch.empty(largest, dtype=tensor.dtype, device=self._device)
        return scratch[: tensor.numel()].view(tensor.shape)


# ------------------------------------------------------------------------------------------------- places in the image
@dataclass(frozen=True, slots=True)
class _Group:
    """Entries that lie side by side: one carriage, all parameters or all buffers."""

    carriage: Carriage
    is_parameter: bool
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class _RawPlace:
    """Bytes ``[start, stop)`` of the raw region."""

    entry: Entry
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _GroupViews:
    """``flat``: all elements of the group, 1-D; ``tensors``: the same memory in the entries' shapes."""

    flat: torch.Tensor
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Image:
    """Typed views of one buffer. ``gaps`` is the padding that no view covers."""

    groups: Sequence[_GroupViews]
    raw: Sequence[torch.Tensor]
    raw_region: torch.Tensor
    gaps: Sequence[torch.Tensor]


def _group(entries: Sequence[Entry]) -> tuple[_Group, ...]:
    return tuple(
        _Group(carriage, is_parameter, tuple(_select(entries, carriage, is_parameter)))
        for carriage in (Carriage.MEAN32, Carriage.MEAN64)
        for is_parameter in (True, False)
    )


def _select(entries: Sequence[Entry], carriage: Carriage, is_parameter: bool) -> list[Entry]:
    return [entry for entry in entries if entry.carriage is carriage and entry.is_parameter is is_parameter]


def _count(entries: Sequence[Entry], carriage: Carriage) -> int:
    return sum(entry.shape.numel() for entry in entries if entry.carriage is carriage)


def _place_raw(entries: Sequence[Entry]) -> tuple[_RawPlace, ...]:
    places: list[_RawPlace] = []
    start = 0
    for entry in entries:
        if entry.carriage is Carriage.RAW:
            stop = start + entry.shape.numel() * entry.dtype.itemsize
            places.append(_RawPlace(entry, start, stop))
            start = (stop + _WIDEST - 1) // _WIDEST * _WIDEST
    return tuple(places)


def _view_image(data: torch.Tensor, layout: Layout, groups: Sequence[_Group], raw: Sequence[_RawPlace]) -> _Image:
    if data.data_ptr() % _WIDEST:
        raise ValueError(f"an image must start at a multiple of {_WIDEST} bytes")
    f32_stop = layout.f32_count * 4
    f64_stop = layout.f64_offset + layout.f64_count * 8
    regions = {
        Carriage.MEAN32: data[:f32_stop].view(torch.float32),
        Carriage.MEAN64: data[layout.f64_offset : f64_stop].view(torch.float64),
    }
    used = dict.fromkeys(regions, 0)
    views = []
    for group in groups:
        region = regions[group.carriage]
        start = used[group.carriage]
        tensors = []
        for entry in group.entries:
            first, used[group.carriage] = used[group.carriage], used[group.carriage] + entry.shape.numel()
            tensors.append(region[first : used[group.carriage]].view(entry.shape))
        views.append(_GroupViews(region[start : used[group.carriage]], tensors))
    raw_region = data[layout.raw_offset :]
    return _Image(
        groups=views,
        raw=[raw_region[p.start : p.stop].view(p.entry.dtype).view(p.entry.shape) for p in raw],
        raw_region=raw_region,
        gaps=(
            data[f32_stop : layout.f64_offset],
            data[f64_stop : layout.raw_offset],
            *(raw_region[a.stop : b.start] for a, b in pairwise(raw)),
            raw_region[layout.raw_bytes :],
        ),
    )


# ---------------------------------------------------------------------------------------------------- moving the values
def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _digest8(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=TENSOR_DIGEST_BYTES)
    for tensor in tensors:
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def _fingerprint(entries: Sequence[Entry]) -> str:
    lines = "\n".join(entry.describe() for entry in entries)
    elements = sum(entry.shape.numel() for entry in entries)
    return f"{len(entries)} tensors, {elements} elements, sha256 {hashlib.sha256(lines.encode()).hexdigest()[:16]}"
