"""The image digest: equal bytes, equal digest; one flipped bit, another digest."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.averaging.digest import image_digest

BLOCK_BYTES = 4096 * 32 * 8
SIZES = [64, 4096, BLOCK_BYTES, BLOCK_BYTES + 64, 3 * BLOCK_BYTES - 64]


def image_of(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


IMAGES = {size: image_of(size) for size in SIZES}
DIGESTS = {size: image_digest(image) for size, image in IMAGES.items()}


@settings(max_examples=60, deadline=None)
@given(size=st.sampled_from(SIZES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_single_flipped_bit_changes_the_digest(size: int, place: float, bit: int) -> None:
    image = IMAGES[size].clone()
    image[int(place * size)] ^= 1 << bit

    assert image_digest(image) != DIGESTS[size]


@pytest.mark.parametrize("size", SIZES)
def test_equal_bytes_in_other_memory_have_the_same_digest(size: int) -> None:
    copy = torch.frombuffer(bytearray(IMAGES[size].numpy().tobytes()), dtype=torch.uint8)

    assert image_digest(copy) == DIGESTS[size]


def test_exchanged_words_change_the_digest() -> None:
    image = IMAGES[BLOCK_BYTES].clone()
    words = image.view(torch.int64)
    words[5], words[6] = words[6].clone(), words[5].clone()

    assert image_digest(image) != DIGESTS[BLOCK_BYTES]


def test_exchanged_blocks_change_the_digest() -> None:
    image = torch.cat([IMAGES[BLOCK_BYTES], image_of(BLOCK_BYTES + 64)[:BLOCK_BYTES]])
    exchanged = torch.cat([image[BLOCK_BYTES:], image[:BLOCK_BYTES]])

    assert image_digest(image) != image_digest(exchanged)
