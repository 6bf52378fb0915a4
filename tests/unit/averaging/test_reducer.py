"""HostSums: ranges are summed once every host delivered them, in the hosts' order, and memory is used again safely."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.averaging.reducer import BufferPool, HostSums
from flodl.averaging.regions import sum_range
from flodl.averaging.wire_image import WireImage
from flodl.errors import RemoteProtocolError
from flodl.ids import RoundKey
from flodl.messages import Layout

KEY = RoundKey(1, 7, 0)
LAYOUT = Layout(f32_count=1001, f64_count=77, raw_bytes=33)
TOTAL = LAYOUT.total_bytes


def image(seed: int, raw: bool) -> np.ndarray:
    """A contribution: random floats, raw bytes at the source only, zero padding."""
    rng = np.random.default_rng(seed)
    data = np.zeros(TOTAL, np.uint8)
    data[: LAYOUT.f32_count * 4] = rng.standard_normal(LAYOUT.f32_count).astype(np.float32).view(np.uint8)
    f64 = rng.standard_normal(LAYOUT.f64_count).view(np.uint8)
    data[LAYOUT.f64_offset : LAYOUT.f64_offset + f64.size] = f64
    if raw:
        data[LAYOUT.raw_offset : LAYOUT.raw_offset + LAYOUT.raw_bytes] = rng.integers(0, 256, LAYOUT.raw_bytes)
    return data


def total_of(images: list[np.ndarray]) -> bytes:
    result = np.empty(TOTAL, np.uint8)
    sum_range(LAYOUT, result, images, 0, TOTAL)
    return result.tobytes()


def result_of(sums: HostSums) -> bytes:
    with sums.sending(0, TOTAL) as view:
        return bytes(view)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), hosts=st.integers(1, 4), longest=st.sampled_from([50, 700, TOTAL]))
def test_any_interleaving_of_chunks_gives_the_bits_of_the_ordered_sum(seed: int, hosts: int, longest: int) -> None:
    choices = random.Random(seed)
    names = [f"h{index}" for index in range(hosts)]
    images = [image(index, raw=index == hosts - 1) for index in range(hosts)]
    sums = HostSums(KEY, LAYOUT, names, BufferPool(0))
    sent = dict.fromkeys(range(hosts), 0)
    completed: list[tuple[int, int]] = []

    while open_hosts := [index for index in sent if sent[index] < TOTAL]:
        index = choices.choice(open_hosts)
        length = min(choices.randint(1, longest), TOTAL - sent[index])
        chunk = images[index][sent[index] : sent[index] + length].tobytes()
        completed += sums.add_chunk(names[index], sent[index], chunk)
        sent[index] += length

    assert sums.is_complete
    assert result_of(sums) == total_of(images)
    ends = [0, *(offset + length for offset, length in completed)]
    assert [offset for offset, _ in completed] == ends[:-1]
    assert ends[-1] == TOTAL


def test_narrow_images_arrive_in_any_pieces_and_every_host_gets_the_same_bytes() -> None:
    names = ["a", "b", "c"]
    form = WireImage(LAYOUT, is_bf16=True)
    scratch = np.empty(form.total_bytes, np.uint8)
    sent = [form.encode(image(index, raw=index == 0), 0, form.total_bytes, scratch).copy() for index in range(3)]
    sums = HostSums(KEY, LAYOUT, names, BufferPool(0), bf16=True)
    completed: list[tuple[int, int]] = []

    for start in range(0, form.total_bytes, 100):
        for index, name in enumerate(names):
            completed += sums.add_chunk(name, start, sent[index][start : start + 100].tobytes())

    total = np.empty(form.total_bytes, np.uint8)
    form.sum_range(total, sent, 0, form.total_bytes)
    assert sums.is_complete
    assert sum(length for _, length in completed) == sums.total_bytes == form.total_bytes < TOTAL
    with sums.sending(0, sums.total_bytes) as view:
        assert bytes(view) == total.tobytes()


def test_hosts_that_deliver_at_once_from_threads_are_summed_completely() -> None:
    names = [f"h{index}" for index in range(4)]
    images = [image(index, raw=index == 0) for index in range(4)]
    sums = HostSums(KEY, LAYOUT, names, BufferPool(0))
    completed: list[tuple[int, int]] = []

    def deliver(index: int) -> None:
        for offset in range(0, TOTAL, 100):
            chunk = images[index][offset : offset + 100].tobytes()
            completed.extend(sums.add_chunk(names[index], offset, chunk))

    threads = [threading.Thread(target=deliver, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert sums.is_complete
    assert result_of(sums) == total_of(images)
    assert sum(length for _, length in completed) == TOTAL


def test_bytes_that_arrive_again_after_a_reconnect_are_counted_once() -> None:
    images = [image(0, raw=True), image(1, raw=False)]
    sums = HostSums(KEY, LAYOUT, ["a", "b"], BufferPool(0))
    sums.add_chunk("a", 0, images[0][:1000].tobytes())
    sums.add_chunk("b", 0, images[1].tobytes())

    sums.add_chunk("a", 0, images[0].tobytes())

    assert sums.is_complete
    assert result_of(sums) == total_of(images)


@pytest.mark.parametrize(
    ("host", "offset", "length"), [("x", 0, 8), ("a", 8, 8), ("a", -8, 8), ("a", 0, 0), ("a", 0, TOTAL + 1)]
)
def test_a_chunk_that_cannot_belong_to_the_round_is_refused(host: str, offset: int, length: int) -> None:
    sums = HostSums(KEY, LAYOUT, ["a", "b"], BufferPool(0))

    with pytest.raises(RemoteProtocolError):
        sums.add_chunk(host, offset, bytes(length))


def test_buffers_are_used_again_by_the_next_round() -> None:
    pool = BufferPool(3)
    first = HostSums(KEY, LAYOUT, ["a", "b"], pool)
    before = {id(first._result), *(id(buffer) for buffer in first._received.values())}
    first.close()

    second = HostSums(RoundKey(1, 8, 0), LAYOUT, ["a", "b"], pool)

    assert {id(second._result), *(id(buffer) for buffer in second._received.values())} == before


def test_memory_that_a_late_reader_still_fills_is_not_used_again() -> None:
    pool = BufferPool(3)
    aborted = HostSums(KEY, LAYOUT, ["a", "b"], pool)
    with aborted.receiving("a", 0, 8) as late:
        aborted.close()
        redo = HostSums(RoundKey(1, 7, 1), LAYOUT, ["a", "b"], pool)
        images = [image(0, raw=True), image(1, raw=False)]
        redo.add_chunk("a", 0, images[0].tobytes())
        redo.add_chunk("b", 0, images[1].tobytes())
        late[:] = b"\xff" * 8

    assert result_of(redo) == total_of(images)
    with pytest.raises(RemoteProtocolError, match="closed"):
        aborted.landed("a", 0, 8)


def test_closing_twice_gives_each_buffer_back_once() -> None:
    pool = BufferPool(9)
    sums = HostSums(KEY, LAYOUT, ["a"], pool)
    sums.close()
    sums.close()

    assert len(pool._free) == 2
