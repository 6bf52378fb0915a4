"""What the controller answers to clients: people's commands, which have proven the run's token."""

from typing import Final, assert_never

from flodl.core.events import DrainAsked, JobEvent, StartAsked, StopAsked
from flodl.core.job import JobCore
from flodl.core.plain import PlainCore
from flodl.ids import HostName
from flodl.launch.document import dump
from flodl.launch.plan import RunSpec, guest_bootstrap, walk_in_bootstrap
from flodl.messages import (
    AskBootstrap,
    BootstrapGiven,
    Declined,
    DrainAccepted,
    DrainRequest,
    FromClient,
    StartAccepted,
    StartRequest,
    StopAccepted,
    StopRequest,
    ToClient,
)
from flodl.wire.handshake import is_host_name

NO_NAME: Final = "that is no host's name"

MAX_SOURCE_CHARS: Final = 100
"""Of a client's own name, which goes into the event log."""


class ClientDesk:
    """Asks the core what may be, and changes nothing itself: what the core shall hear is returned as an event."""

    def __init__(self, core: JobCore | PlainCore, spec: RunSpec) -> None:
        self._core, self._spec = core, spec

    def answer(self, message: FromClient) -> tuple[ToClient, JobEvent | None]:
        """The reply, and the event that the core has to hear before it is sent, if any."""
        match message:
            case StopRequest(source, abort, exit_code):
                return StopAccepted(str(self._core.phase)), StopAsked(_shortened(source), abort, exit_code)
            case StartRequest(source):
                return self._start(_shortened(source))
            case DrainRequest(host, source):
                return self._drain(host, _shortened(source))
            case AskBootstrap(host):
                return self._introduce(host), None
            case _:
                assert_never(message)

    def _introduce(self, host: str) -> ToClient:
        if not is_host_name(host):
            return Declined(NO_NAME, is_early=False)
        refusal = self._core.refusal(host)
        if refusal:
            return Declined(refusal, self._core.may_come_later(host))
        return BootstrapGiven(dump(guest_bootstrap(self._spec, host)))

    def introduce_walk_in(self, host: HostName) -> ToClient:
        """What a host needs that has proven its join secret; ``host`` is the name that goes with it."""
        refusal = self._core.refusal(host)
        if refusal:
            return Declined(refusal, self._core.may_come_later(host))
        return BootstrapGiven(dump(walk_in_bootstrap(self._spec, host)))

    def _start(self, source: str) -> tuple[ToClient, JobEvent | None]:
        refusal = self._core.start_refusal()
        if refusal:
            return Declined(refusal, is_early=False), None
        window = self._core.startup.window
        return StartAccepted(window.rank_count, tuple(window.joined)), StartAsked(source)

    def _drain(self, host: str, source: str) -> tuple[ToClient, JobEvent | None]:
        refusal = self._core.drain_refusal(host) if is_host_name(host) else NO_NAME
        if refusal:
            return Declined(refusal, is_early=False), None
        return DrainAccepted(self._core.membership.on_host(host, self._core.membership.live)), DrainAsked(host, source)


def _shortened(source: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in source[:MAX_SOURCE_CHARS])
