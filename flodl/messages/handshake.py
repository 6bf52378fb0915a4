"""How a connection begins, on both sides."""

from dataclasses import dataclass

from flodl.ids import HostName


@dataclass(frozen=True, slots=True)
class Hello:
    """First word of a connecting peer. ``role`` is daemon, head or client; ``channel`` control or bulk."""

    protocol: int
    run_id: str
    role: str
    channel: str
    host: HostName
    nonce: bytes
    flodl_version: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's fresh nonce and its proof over both nonces, so that trust is mutual."""

    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The peer's proof."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is open. ``controller_version`` is flodl's version at the controller."""

    controller_version: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection closes after this; ``reason`` is written for a person."""

    reason: str
