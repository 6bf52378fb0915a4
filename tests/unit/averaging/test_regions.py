"""Slices cover an image exactly once; a blocked sum equals the plain one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.averaging.regions import BLOCK_BYTES, slice_bounds, sum_range
from flodl.messages import Layout

layouts = st.builds(Layout, st.integers(0, 5000), st.integers(0, 500), st.integers(0, 500))


@given(layout=layouts, slices=st.integers(1, 9))
def test_slices_cover_the_image_without_gap_or_overlap(layout: Layout, slices: int) -> None:
    bounds = [slice_bounds(layout, index, slices) for index in range(slices)]

    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == layout.total_bytes
    assert all(start % 64 == 0 for start, _ in bounds)


@pytest.mark.parametrize(("index", "slices"), [(0, 0), (3, 3), (-1, 3)])
def test_an_impossible_slice_is_refused(index: int, slices: int) -> None:
    with pytest.raises(ValueError, match="slice"):
        slice_bounds(Layout(1, 0, 0), index, slices)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_blocked_sum_has_the_bits_of_the_plain_sum_in_order(count: int) -> None:
    layout = Layout(BLOCK_BYTES // 2 + 3, 5, 9)
    rng = np.random.default_rng(count)
    images = [np.zeros(layout.total_bytes, np.uint8) for _ in range(count)]
    floats = [rng.standard_normal(layout.f32_count).astype(np.float32) for _ in images]
    for image, values in zip(images, floats, strict=True):
        image[: values.nbytes] = values.view(np.uint8)
    result = np.full(layout.total_bytes, 255, np.uint8)

    sum_range(layout, result, images, 0, layout.total_bytes)

    plain = floats[0].copy()
    for values in floats[1:]:
        plain += values
    assert result[: plain.nbytes].tobytes() == plain.tobytes()
    assert not result[plain.nbytes :].any()
