"""What a host's inbox holds, refuses and gives back."""

import errno
import os
from collections.abc import Iterator

import pytest

from flodl.core.events import StateLanded
from flodl.errors import RemoteProtocolError
from flodl.wire.chunks import ChunkHeader, ChunkKind
from flodl_daemon import inbox as module
from flodl_daemon.inbox import HostInbox

LIMIT_BYTES = 100


@pytest.fixture
def inbox() -> Iterator[HostInbox]:
    made = HostInbox(LIMIT_BYTES)
    made.open()
    yield made
    made.close()


def take(inbox: HostInbox, transfer: int, offset: int, data: bytes, total: int) -> StateLanded | None:
    header = ChunkHeader(ChunkKind.STATE_DOWN, transfer, offset, len(data), total)
    return inbox.take(header, memoryview(data))


def content(inbox: HostInbox) -> bytes:
    return os.pread(inbox.fd, 2 * LIMIT_BYTES, 0)


def test_state_lands_with_its_last_chunk_as_long_as_it_is(inbox: HostInbox) -> None:
    assert take(inbox, 7, 0, b"abc", 5) is None
    assert take(inbox, 7, 3, b"de", 5) == StateLanded(7)
    assert content(inbox) == b"abcde"


def test_new_state_takes_the_place_of_one_that_did_not_land(inbox: HostInbox) -> None:
    take(inbox, 7, 0, b"abcd", 50)
    assert take(inbox, 8, 0, b"x", 1) == StateLanded(8)
    assert content(inbox) == b"x"


@pytest.mark.parametrize(("transfer", "offset", "total"), [(7, 3, 5), (7, 1, 5), (8, 2, 5), (7, 2, 6)])
def test_chunk_that_does_not_follow_on_the_one_before_is_refused(
    inbox: HostInbox, transfer: int, offset: int, total: int
) -> None:
    take(inbox, 7, 0, b"ab", 5)
    with pytest.raises(RemoteProtocolError, match="does not follow on byte 2"):
        take(inbox, transfer, offset, b"c", total)


def test_state_that_is_larger_than_the_machine_is_refused_at_once_and_read_past(inbox: HostInbox) -> None:
    refused = take(inbox, 7, 0, b"ab", LIMIT_BYTES + 1)
    assert refused == StateLanded(7, "no memory for a state of 101 bytes: this machine has 100 bytes")
    assert take(inbox, 7, 2, b"c" * 99, LIMIT_BYTES + 1) is None
    assert content(inbox) == b""
    assert take(inbox, 8, 0, b"x", 1) == StateLanded(8)


def test_memory_that_runs_out_is_told_once(inbox: HostInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    take(inbox, 7, 0, b"ab", 5)
    monkeypatch.setattr(module.os, "pwrite", fail)
    assert take(inbox, 7, 2, b"c", 5) == StateLanded(7, "no memory for a state of 5 bytes: Cannot allocate memory")
    assert take(inbox, 7, 3, b"de", 5) is None
    assert content(inbox) == b""


def test_inbox_is_emptied_of_the_very_state_that_all_have_taken(inbox: HostInbox) -> None:
    take(inbox, 7, 0, b"abc", 3)
    inbox.empty(6)
    assert content(inbox) == b"abc"
    inbox.empty(7)
    assert content(inbox) == b""
