"""What rsync takes for ssh: words and bytes pass it unchanged, through pipes that do not block, until one ends."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from flodl.launch.sync import relay

LIMIT_S = 30.0
MUCH = os.urandom(1 << 12) * 1000


@dataclass
class Ends:
    """The relay, and this side of its three sockets: what rsync says, what rsync hears, and the session."""

    process: "subprocess.Popen[bytes]"
    said: socket.socket
    heard: socket.socket
    session: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    pairs = [socket.socketpair() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for ours, theirs in pairs:
            stack.enter_context(ours)
            stack.enter_context(theirs)
            ours.settimeout(LIMIT_S)
        (_, stdin), (_, stdout), (_, session) = pairs
        stdin.setblocking(False)
        stdout.setblocking(False)
        command = [
            sys.executable,
            "-I",
            "-S",
            relay.__file__,
            str(session.fileno()),
            "host",
            "rsync",
            "--server",
            "",
            ".",
        ]
        process = subprocess.Popen(command, stdin=stdin, stdout=stdout, pass_fds=(session.fileno(),))
        for _, theirs in pairs:
            theirs.close()
        yield Ends(process, *(ours for ours, _ in pairs))
        process.kill()
        process.wait(LIMIT_S)


def received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def test_command_comes_first_word_by_word(ends: Ends) -> None:
    words = b"4\0rsync\0--server\0\0.\0"
    assert received(ends.session, len(words)) == words


def test_many_bytes_pass_both_ways_at_once(ends: Ends) -> None:
    header = len(b"4\0rsync\0--server\0\0.\0")
    senders = [threading.Thread(target=sock.sendall, args=(MUCH,)) for sock in (ends.said, ends.session)]
    for sender in senders:
        sender.start()
    assert received(ends.session, header + len(MUCH))[header:] == MUCH
    assert received(ends.heard, len(MUCH)) == MUCH
    for sender in senders:
        sender.join(LIMIT_S)


def test_end_of_the_session_ends_it(ends: Ends) -> None:
    ends.session.close()
    assert ends.process.wait(LIMIT_S) in (0, 1)
    assert ends.heard.recv(1) == b""
