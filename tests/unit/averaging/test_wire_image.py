"""The wire's form of an image: torch's bfloat16, to the bit, in any pieces; sums in float32, rounded once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.averaging import wire_image
from flodl.averaging.regions import ALIGNMENT, Bytes, sum_range
from flodl.averaging.wire_image import WireImage
from flodl.messages import Layout

LAYOUT = Layout(f32_count=1001, f64_count=77, raw_bytes=33)
LAYOUTS = [LAYOUT, Layout(1, 0, 0), Layout(16, 0, 5), Layout(0, 3, 9), Layout(0, 0, 70), Layout(100_000, 1, 1)]
SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF,
     0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x00008000, 0x00018000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF],
    np.uint32,
)  # fmt: skip


def image_of(layout: Layout, seed: int, raw: bool = True) -> Bytes:
    rng = np.random.default_rng(seed)
    image = np.zeros(layout.total_bytes, np.uint8)
    f32, f64 = rng.standard_normal(layout.f32_count).astype(np.float32), rng.standard_normal(layout.f64_count)
    image[: f32.nbytes] = f32.view(np.uint8)
    image[layout.f64_offset : layout.f64_offset + f64.nbytes] = f64.view(np.uint8)
    if raw:
        image[layout.raw_offset : layout.raw_offset + layout.raw_bytes] = rng.integers(0, 256, layout.raw_bytes)
    return image


def encoded(form: WireImage, image: Bytes, cut: int) -> Bytes:
    scratch = np.empty(form.total_bytes, np.uint8)
    pieces = [(at, min(at + cut, form.total_bytes)) for at in range(0, form.total_bytes, cut)]
    return np.concatenate([form.encode(image, start, stop, scratch).copy() for start, stop in pieces])


def decoded(form: WireImage, data: Bytes, cut: int) -> Bytes:
    image = np.full(form.layout.total_bytes, 255, np.uint8)
    for start in range(0, form.total_bytes, cut):
        form.decode(data[start : start + cut], start, image)
    return image


def narrowed(values: np.ndarray) -> np.ndarray:
    """torch's own rounding."""
    return torch.from_numpy(values.copy()).bfloat16().float().numpy()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_float32_is_rounded_as_torch_does(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, 4096, np.uint32)
    bits[: SPECIAL.size] = SPECIAL
    layout = Layout(bits.size, 0, 0)
    form = WireImage(layout, is_bf16=True)
    image = bits.view(np.uint8)

    result = decoded(form, encoded(form, image, form.total_bytes), form.total_bytes).view(np.float32)

    wanted = narrowed(bits.view(np.float32))
    is_nan = np.isnan(wanted)
    assert (np.isnan(result) == is_nan).all()
    assert (result.view(np.uint32)[~is_nan] == wanted.view(np.uint32)[~is_nan]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cut", [64, 320, 4096, 1 << 20])
def test_only_float32_is_rounded_whatever_the_pieces(layout: Layout, cut: int) -> None:
    form, image = WireImage(layout, is_bf16=True), image_of(layout, 1)

    data = encoded(form, image, cut)
    back = decoded(form, data, 4096)

    assert data.size == form.total_bytes == layout.total_bytes - layout.f64_offset // 2
    assert (back[: layout.f64_offset].view(np.float32) == narrowed(image[: layout.f64_offset].view(np.float32))).all()
    assert (back[layout.f64_offset :] == image[layout.f64_offset :]).all()


def test_blocks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    form, image = WireImage(Layout(100_000, 1, 1), is_bf16=True), image_of(Layout(100_000, 1, 1), 2)
    whole = encoded(form, image, form.total_bytes)
    monkeypatch.setattr(wire_image, "_NARROW_BLOCK", 64)

    assert (encoded(form, image, form.total_bytes) == whole).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_rounding_the_wire_carries_the_image(layout: Layout) -> None:
    form, image = WireImage(layout), image_of(layout, 3)

    assert form.total_bytes == layout.total_bytes
    assert (encoded(form, image, 64) == image).all()
    assert (decoded(form, image, 64) == image).all()


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_sums_are_made_in_float32_and_rounded_once(is_bf16: bool, layout: Layout, hosts: int) -> None:
    form = WireImage(layout, is_bf16)
    images = [image_of(layout, seed, raw=seed == 0) for seed in range(hosts)]
    sent = [encoded(form, image, 4096) for image in images]
    received = [decoded(form, data, 4096) for data in sent]
    plain = np.empty(layout.total_bytes, np.uint8)
    sum_range(layout, plain, received, 0, plain.size)

    result = np.empty(form.total_bytes, np.uint8)
    for start in range(0, result.size, 5 * ALIGNMENT):
        form.sum_range(result, sent, start, min(start + 5 * ALIGNMENT, result.size))

    assert (result == encoded(form, plain, 4096)).all()
