"""Messages as bytes: the wire form, what is refused and how it is named."""

from dataclasses import dataclass, replace
from typing import get_args

import msgpack
import pytest

from flodl import messages
from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.ids import Grant, Span
from flodl.messages import (
    Answer,
    CadenceSettings,
    Commit,
    EpochReport,
    FromDaemon,
    HeadReady,
    Hello,
    Message,
    Mode,
    RankAlive,
    RankToDaemon,
    Settings,
    StoreReply,
    ToRank,
    WindowDone,
    WindowPlan,
)
from flodl.wire.codec import MAX_DEPTH, MAX_ELEMENTS, decode, encode

ALIVE = RankAlive(rank=3, steps=1000)
PLAN = WindowPlan(rank=1, version=4, min_steps=1, max_steps=2, grants=(Grant(0, (Span(0, 8), Span(16, 8))),))


def test_the_wire_form_is_the_name_and_a_map_of_the_fields():
    assert msgpack.unpackb(encode(ALIVE)) == ["RankAlive", {"rank": 3, "steps": 1000}]


def test_nested_values_are_maps_and_arrays():
    assert msgpack.unpackb(encode(PLAN))[1]["grants"] == [
        {"pass_index": 0, "spans": [{"start": 0, "count": 8}, {"start": 16, "count": 8}]}
    ]


def test_bytes_and_text_stay_apart():
    assert encode(Answer(b"\x01")) == b"\x92\xa6Answer\x81\xa5proof\xc4\x01\x01"


def test_decode_builds_nested_dataclasses_again():
    assert decode(encode(PLAN), ToRank) == PLAN


def test_enums_and_none_travel():
    ready = HeadReady(Settings(10, 2, 1, 0, CadenceSettings(mode=Mode.CPU_SYNC, anchor=3)), {"script": "abc"})

    decoded = decode(encode(ready), messages.FromHead)

    assert decoded == ready
    assert decoded.settings.cadence.mode is Mode.CPU_SYNC


def test_allowed_may_be_a_union_a_class_or_several():
    data = encode(ALIVE)

    assert decode(data, RankToDaemon) == ALIVE
    assert decode(data, RankAlive) == ALIVE
    assert decode(data, (Commit, RankAlive)) == ALIVE


def test_every_message_has_a_name_of_its_own():
    names = [cls.__name__ for cls in get_args(Message)]

    assert len(names) == len(set(names)) >= 50


def test_message_of_another_union_is_refused_by_name():
    with pytest.raises(RemoteProtocolError, match=r"^'RankAlive': not expected here$"):
        decode(encode(ALIVE), ToRank)


def test_unknown_message_is_refused_and_its_name_shortened():
    with pytest.raises(RemoteProtocolError, match=r"^'XXXX': unknown message$"):
        decode(msgpack.packb(["XXXX", {}]), ToRank)
    with pytest.raises(RemoteProtocolError) as caught:
        decode(msgpack.packb(["\n" + "X" * 1000, {}]), ToRank)
    assert str(caught.value) == f"'\\n{'X' * 39}': unknown message"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"rank": 1}, "RankAlive: field steps is missing"),
        ({"rank": 1, "steps": 2, "more": 3}, "RankAlive: unknown field 'more'"),
        ({"rank": "1", "steps": 2}, "RankAlive.rank: expected int, got str"),
        ({"rank": 1, "steps": 2**63}, "RankAlive.steps: int outside 64 bits"),
        ([1, 2], "RankAlive: expected RankAlive, got list"),
        (None, "RankAlive: expected RankAlive, got NoneType"),
    ],
)
def test_fields_that_do_not_fit_are_named(fields, fault):
    with pytest.raises(RemoteProtocolError, match=f"^{fault}$"):
        decode(msgpack.packb(["RankAlive", fields]), RankToDaemon)


def test_a_fault_deep_inside_is_named_with_its_path_and_without_its_value():
    envelope = msgpack.unpackb(encode(PLAN))
    envelope[1]["grants"][0]["spans"][1]["count"] = "secret"

    with pytest.raises(RemoteProtocolError) as caught:
        decode(msgpack.packb(envelope), ToRank)

    assert str(caught.value) == "WindowPlan.grants[0].spans[1].count: expected int, got str"
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "envelope", [None, 1, [], ["RankAlive"], ["RankAlive", {}, {}], [b"RankAlive", {}], [1, {}], {"RankAlive": {}}]
)
def test_anything_but_a_name_with_fields_is_refused(envelope):
    with pytest.raises(RemoteProtocolError, match=r"^message: expected \[name, fields\]$"):
        decode(msgpack.packb(envelope), RankToDaemon)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "ValueError"),
        (encode(ALIVE)[:-1], "ValueError"),
        (encode(ALIVE) + b"\x00", "ExtraData"),
        (b"\x92\xa1\xff\x80", "UnicodeDecodeError"),
        (b"\x92\xa1x\x81\x01\x02", "ValueError"),
    ],
)
def test_bytes_that_are_not_one_value_are_refused(data, error):
    with pytest.raises(RemoteProtocolError, match=rf"^message: not MessagePack \({error}\)$"):
        decode(data, RankToDaemon)


def test_extension_types_are_refused():
    with pytest.raises(RemoteProtocolError, match=r"^message: a type that no message has$"):
        decode(msgpack.packb(["RankAlive", msgpack.Timestamp(1, 0)]), RankToDaemon)


def test_deep_nesting_is_refused_before_it_is_built():
    with pytest.raises(RemoteProtocolError, match=r"^message: nested deeper than 12$"):
        decode(b"\x92\xa9RankAlive" + b"\xdc\x40\x00" * 13, RankToDaemon)
    assert MAX_DEPTH == 12


def test_many_elements_are_refused_before_they_are_built():
    with pytest.raises(RemoteProtocolError, match=r"^message: more than 262144 elements$"):
        decode(b"\x92\xa9RankAlive\xdd\x00\x04\x00\x00", RankToDaemon)
    assert MAX_ELEMENTS == 1 << 18


def test_a_report_of_a_thousand_ranks_is_within_the_limits():
    per_rank = {str(rank): float(rank) for rank in range(1000)}
    counts = {str(rank): rank for rank in range(1000)}
    report = EpochReport(1, 0.5, 9.0, 10, 3, {"acc": 1.0}, per_rank, counts, per_rank, per_rank, counts)

    assert decode(encode(report), messages.ToHead) == report


def test_a_message_with_too_many_elements_is_not_sent():
    reply = StoreReply(rank=0, request=1, found=True, values=(b"",) * MAX_ELEMENTS, number=0)

    with pytest.raises(LocalProtocolError, match=r"^StoreReply: more than 262144 elements$"):
        encode(reply)


def test_a_message_with_many_bytes_and_few_elements_is_sent():
    reply = StoreReply(rank=0, request=1, found=True, values=(b"x" * (MAX_ELEMENTS + 1),), number=0)

    assert decode(encode(reply), ToRank) == reply


def test_what_is_no_message_is_not_sent():
    @dataclass
    class RankAlive:
        rank: int

    with pytest.raises(LocalProtocolError, match=r"^Span: not a message$"):
        encode(Span(0, 1))
    with pytest.raises(LocalProtocolError, match=r"^RankAlive: not a message$"):
        encode(RankAlive(1))


def test_a_field_that_does_not_fit_is_not_sent():
    with pytest.raises(LocalProtocolError, match=r"^WindowPlan\.grants\[0\]: expected Grant, got int$") as caught:
        encode(replace(PLAN, grants=(1,)))
    assert caught.value.__suppress_context__


def test_text_that_is_no_unicode_is_not_sent():
    with pytest.raises(LocalProtocolError, match=r"^Hello: a string that is not Unicode text$"):
        encode(Hello(1, "\ud800", "daemon", "control", "h", b"", ""))


def test_an_integer_in_a_float_field_arrives_as_a_float():
    done = WindowDone(1, 2, 3, 4, 5, True, None, 6, 7, {"acc": (1, 2)})

    decoded = decode(encode(done), FromDaemon)

    assert decoded == done
    assert [type(value) for value in (decoded.loss_sum, decoded.compute_ms, decoded.window_ms)] == [float] * 3
    assert type(decoded.scalars["acc"][0]) is float
