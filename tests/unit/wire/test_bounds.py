"""What the scan of raw MessagePack finds, one case per first byte that matters."""

import msgpack
import pytest

from flodl.wire.bounds import bounds_fault


def nested_arrays(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def nested_maps(depth: int) -> bytes:
    return b"\x81\x01" * depth + b"\xc0"


@pytest.mark.parametrize("nested", [nested_arrays, nested_maps])
def test_depth_is_allowed_up_to_the_limit_and_refused_one_above(nested):
    assert bounds_fault(nested(5), 5, 100) is None
    assert bounds_fault(nested(6), 5, 100) == "nested deeper than 5"


def test_depth_counts_open_containers_not_all_of_them():
    siblings = msgpack.packb([[1], [2], [[3]], [], [[4]]])

    assert bounds_fault(siblings, 3, 100) is None
    assert bounds_fault(siblings, 2, 100) == "nested deeper than 2"


@pytest.mark.parametrize(
    ("data", "elements"),
    [
        (b"\xc0", 1),
        (b"\x93\x01\x02\x03", 4),
        (b"\x82\x01\x02\x03\x04", 5),
        (b"\x9f" + b"\xc0" * 15, 16),
        (b"\x8f" + b"\xc0" * 30, 31),
        (b"\xdc\x01\x02" + b"\xc0" * 258, 259),
        (b"\xdd\x00\x00\x01\x02" + b"\xc0" * 258, 259),
        (b"\xde\x01\x02" + b"\xc0" * 516, 517),
        (b"\xdf\x00\x00\x01\x02" + b"\xc0" * 516, 517),
        (b"\x92\x92\x01\x02\x81\x01\x02", 7),
    ],
)
def test_elements_are_counted_with_keys_and_containers(data, elements):
    assert bounds_fault(data, 4, elements) is None
    assert bounds_fault(data, 4, elements - 1) == (f"more than {elements - 1} elements" if elements > 1 else None)


def test_a_huge_announcement_is_refused_though_nothing_follows():
    assert bounds_fault(b"\xdd\xff\xff\xff\xff", 4, 1000) == "more than 1000 elements"
    assert bounds_fault(b"\xdf\xff\xff\xff\xff", 4, 1000) == "more than 1000 elements"


def test_many_announcements_add_up():
    assert bounds_fault(b"\xdc\x01\x00" * 3, 9, 1000) is None
    assert bounds_fault(b"\xdc\x01\x00" * 4, 9, 1000) == "more than 1000 elements"


PAYLOADS = [
    None,
    True,
    False,
    0,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**32 - 1,
    2**32,
    2**64 - 1,
    -1,
    -32,
    -33,
    -128,
    -129,
    -32768,
    -32769,
    -(2**31),
    -(2**31) - 1,
    -(2**63),
    1.5,
    "",
    "a" * 31,
    "a" * 32,
    "a" * 255,
    "a" * 256,
    "a" * 65536,
    b"",
    b"\x91" * 255,
    b"\x91" * 256,
    b"\x91" * 65536,
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_every_scalar_is_stepped_over_exactly(payload):
    """Behind the scalar stands a container that breaks the limit: it is found only from the right position."""
    data = msgpack.packb(["x", payload, []])[:-1] + nested_arrays(3)

    assert bounds_fault(data, 4, 100) is None
    assert bounds_fault(data, 3, 100) == "nested deeper than 3"


def test_a_four_byte_float_is_stepped_over_exactly():
    assert bounds_fault(b"\x92\xca\x91\x91\x91\x91\x91\xc0", 2, 100) is None
    assert bounds_fault(b"\x92\xca\x91\x91\x91\x91\x91\x91\xc0", 2, 100) == "nested deeper than 2"


@pytest.mark.parametrize("code", [0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8])
def test_extension_types_and_the_unused_byte_are_refused(code):
    assert bounds_fault(bytes([0x91, code]) + b"\x00" * 20, 4, 100) == "a type that no message has"


def test_bytes_behind_the_value_are_left_to_the_unpacker():
    assert bounds_fault(b"\xc0" + nested_arrays(9), 1, 100) is None
    assert bounds_fault(b"\x91\x90" + nested_arrays(9), 2, 100) is None


@pytest.mark.parametrize("data", [b"", b"\x91", b"\xdd\x00", b"\xdb\xff\xff\xff\xff", b"\xcb\x00"])
def test_bytes_cut_short_are_left_to_the_unpacker(data):
    assert bounds_fault(data, 1, 1000) is None
