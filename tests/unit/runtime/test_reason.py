"""Errors of connections in the operating system's words."""

import errno
import socket
import ssl

import pytest

from flodl.runtime.reason import reason_of


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EHOSTUNREACH, "Connect call failed ('10.0.0.5', 22)"), "No route to host"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('::1', 22, 0, 0)"), "Connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 9), [Errno 113] Connect call failed"),
            "Connection refused, No route to host",
        ),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(ssl.SSL_ERROR_SSL, "[SSL: WRONG_VERSION_NUMBER] wrong"), "[SSL: WRONG_VERSION_NUMBER] wrong"),
        (OSError("[Errno 99999999999999999999] far off"), "[Errno 99999999999999999999] far off"),
        (OSError("no errno"), "no errno"),
        (ValueError(), "ValueError"),
    ],
)
def test_reason_is_the_operating_systems(error: Exception, words: str) -> None:
    assert reason_of(error) == words
