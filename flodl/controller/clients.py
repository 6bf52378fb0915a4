"""What the controller answers to clients: people's commands, which have proven the run's token."""

from typing import Final, assert_never

from flodl.core.events import DrainAsked, JobEvent, StopAsked
from flodl.core.job import JobCore
from flodl.messages import Declined, DrainAccepted, DrainRequest, FromClient, StopAccepted, StopRequest, ToClient
from flodl.wire.handshake import is_host_name

MAX_SOURCE_CHARS: Final = 100
"""Of a client's own name, which goes into the event log."""


class ClientDesk:
    """Asks the core what may be, and changes nothing itself: what the core shall hear is returned as an event."""

    def __init__(self, core: JobCore) -> None:
        self._core = core

    def answer(self, message: FromClient) -> tuple[ToClient, JobEvent | None]:
        """The reply, and the event that the core has to hear before it is sent, if any."""
        match message:
            case StopRequest(source, abort, exit_code):
                return StopAccepted(str(self._core.phase)), StopAsked(_shortened(source), abort, exit_code)
            case DrainRequest(host, source):
                return self._drain(host, _shortened(source))
            case _:
                assert_never(message)

    def _drain(self, host: str, source: str) -> tuple[ToClient, JobEvent | None]:
        refusal = self._core.drain_refusal(host) if is_host_name(host) else "that is no host's name"
        if refusal:
            return Declined(refusal, is_early=False), None
        return DrainAccepted(self._core.membership.on_host(host, self._core.membership.live)), DrainAsked(host, source)


def _shortened(source: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in source[:MAX_SOURCE_CHARS])
