"""Speaks to a run's controller as a client: asks it over the control protocol, reads its state over HTTP.

Blocking sockets with a deadline each: a viewer has one question at a time and wants to start in milliseconds.

Over HTTP the controller proves nothing, so under TLS the read token goes only to the holder of the run's certificate:
the one that the run's directory names, or one that has proven the run's token with it before.
"""

import http.client
import json
import secrets
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlencode

from flodl import __version__
from flodl.config.address import format_address
from flodl.config.tls import TlsMode
from flodl.errors import ConfigError, JoinRefused, PeerLost, RemoteProtocolError
from flodl.ids import HostName, RankId
from flodl.launch.bootstrap import Bootstrap
from flodl.launch.document import DocumentFault, load
from flodl.launch.reported import reported
from flodl.launch.rundir import ControllerInfo, RunDir
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
)
from flodl.runtime.reason import reason_of
from flodl.runtime.tls import NO_TLS, client_context, hash_of, is_turned_away
from flodl.wire.codec import Vocabulary, decode, encode
from flodl.wire.frames import FRAME_BYTES, PRE_AUTH_FRAME_BYTES, PREAMBLE, FrameDecoder, frame
from flodl.wire.handshake import (
    NONCE_BYTES,
    Channel,
    ClientHandshake,
    FromAccepting,
    Peer,
    Role,
    derive_read_token,
    is_host_name,
)

TIMEOUT_S: Final = 10.0
FOLLOW_TIMEOUT_S: Final = 600.0
"""A quiet stream is normal; a controller that is gone resets the connection, and a frozen one is noticed elsewhere."""

MAX_LINE_BYTES: Final = 8 << 20


class ControllerClient:
    """A client of one controller. Connections are opened per call."""

    def __init__(
        self,
        run_id: str,
        token: bytes,
        address: str,
        port: int,
        pid: int | None = None,
        tls: TlsMode = TlsMode.AUTO,
        certificate: bytes = b"",
    ) -> None:
        """``tls`` says at which addresses we want TLS; ``certificate`` is the hash of the run's, empty where it is not
        known beforehand.
        """
        self._run_id = run_id
        self._token = token
        self._address = address
        self._port = port
        self._pid = pid
        self._tls = tls
        self._certificate = certificate
        self._where = f"controller {format_address(address, port)}"

    @classmethod
    def of(cls, run: RunDir, info: ControllerInfo) -> "ControllerClient":
        """A client of the controller that ``run`` announced.

        Raises:
            ConfigError: the run's token cannot be read.
        """
        certificate = bytes.fromhex(info.certificate)
        return cls(run.run_id, run.read_token(), info.address, info.port, info.pid, info.tls, certificate)

    def stop(self, source: str, *, abort: bool, exit_code: int) -> str:
        """Ask for an orderly stop, or for an end at once (``abort``).

        Returns:
            The run's phase when the controller heard it.

        Raises:
            PeerLost: the controller cannot be reached or closed the connection.
            JoinRefused: it did not let us in.
            RemoteProtocolError: it broke the protocol.
        """
        return str(self._ask(StopRequest(source, abort, exit_code), StopAccepted).phase)

    def start(self, source: str) -> tuple[int, tuple[HostName, ...]]:
        """Ask that the join window closes now and the run starts.

        Returns:
            How many ranks start, and on which hosts.

        Raises:
            ConfigError: it may not start now; the message says why.
            PeerLost: the controller cannot be reached or closed the connection.
            JoinRefused: it did not let us in.
            RemoteProtocolError: it broke the protocol.
        """
        reply = self._ask(StartRequest(source), StartAccepted | Declined)
        if isinstance(reply, Declined):
            raise ConfigError(f"run {self._run_id} cannot be started: {reply.reason}")
        return int(reply.ranks), tuple(reply.hosts)

    def drain(self, host: HostName, source: str) -> tuple[RankId, ...]:
        """Ask that ``host`` leaves at the next commit.

        Returns:
            Its ranks that take part now.

        Raises:
            ConfigError: it may not leave; the message says why.
            PeerLost: the controller cannot be reached or closed the connection.
            JoinRefused: it did not let us in.
            RemoteProtocolError: it broke the protocol.
        """
        reply = self._ask(DrainRequest(host, source), DrainAccepted | Declined)
        if isinstance(reply, Declined):
            raise ConfigError(f"host {host} cannot be drained: {reply.reason}")
        return tuple(reply.ranks)

    def state(self) -> dict[str, Any]:
        """The run's snapshot, ``GET /state.json``.

        Raises:
            PeerLost: the controller cannot be reached, or answered with an error.
        """
        with self._get("/state.json", {}, TIMEOUT_S) as response:
            try:
                data = json.loads(response.read(64 << 20))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error, "/state.json") from None
        return reported(data) or {}

    def follow(self, path: str, query: dict[str, str | int]) -> Iterator[dict[str, Any]]:
        """The JSON lines of ``path`` (``/events`` or ``/logs``) until the controller ends the stream.

        Raises:
            PeerLost: the controller cannot be reached, or the stream broke.
        """
        with self._get(path, query, FOLLOW_TIMEOUT_S) as response:
            try:
                while line := response.readline(MAX_LINE_BYTES):
                    data = json.loads(line) if line.strip() else None
                    if isinstance(data, dict):
                        yield data
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error, path) from None

    def ask_bootstrap(self, host: HostName) -> Bootstrap | Declined:
        """Ask what a daemon needs on a machine that joins as ``host``.

        Returns:
            The bootstrap, without secret, addresses and devices; or why the run cannot take the host in yet.

        Raises:
            JoinRefused: the run does not take it in; the message says why.
            PeerLost: the controller cannot be reached or closed the connection.
            RemoteProtocolError: it broke the protocol.
        """
        reply = self._ask(AskBootstrap(host), BootstrapGiven | Declined)
        if isinstance(reply, BootstrapGiven):
            return read_bootstrap(reply.document)
        if reply.is_early:
            return Declined(reply.reason, True)
        raise JoinRefused(f"{self._where} does not take host {host} in: {reply.reason}")

    def _ask(self, request: FromClient, allowed: Vocabulary) -> Any:
        """The controller's answer, one of ``allowed``."""
        try:
            with self._connect() as sock:
                words = self._shake_hands(sock)
                words.send(request)
                return words.receive(allowed)
        except (OSError, EOFError) as error:
            raise self._lost(error) from None

    def _connect(self) -> socket.socket:
        """A connection, under TLS where we want it."""
        sock = socket.create_connection((self._address, self._port), TIMEOUT_S)
        try:
            if not self._tls.covers(str(sock.getpeername()[0])):
                return sock
            return client_context().wrap_socket(sock)
        except ssl.SSLError as error:
            sock.close()
            if is_turned_away(error):
                raise JoinRefused(f"{self._where}: {NO_TLS}") from None
            raise
        except BaseException:
            sock.close()
            raise

    def _lost(self, error: Exception, path: str = "") -> PeerLost:
        if not isinstance(error, TimeoutError):
            named = "" if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else path
            return PeerLost(": ".join(part for part in (self._where, named, reason_of(error)) if part))
        pid = "" if self._pid is None else f" (pid {self._pid})"
        at = f" of run {self._run_id}" if self._run_id else ""
        remedy = f"kill -KILL {self._pid or 'PID'}, then fdl launch --resume {self._run_id or 'RUN'}"
        return PeerLost(
            f"{self._where}{pid}{at} does not answer: timed out\n"
            f"  its process is stopped or hangs, or the network drops what is sent: try again; if it stays so, on its "
            f"machine: {remedy}"
        )

    def _get(self, path: str, query: dict[str, str | int], timeout_s: float) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address, self._port)
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {"Authorization": f"Bearer {derive_read_token(self._token)}", "Connection": "close"}
        try:
            connection.sock = sock = self._connect_trusted()
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            sock.settimeout(timeout_s)
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise self._lost(error, path) from None
        if response.status != http.HTTPStatus.OK:
            said = response.read(1024).decode("ascii", "replace")
            raise PeerLost(f"{self._where}: {path}: {response.status} {said}")
        return response

    def _connect_trusted(self) -> socket.socket:
        """A connection on which the read token may be said: under TLS to the holder of the run's certificate only."""
        sock = self._connect()
        try:
            if isinstance(sock, ssl.SSLSocket):
                self._check_certificate(hash_of(sock))
        except BaseException:
            sock.close()
            raise
        return sock

    def _check_certificate(self, seen: bytes) -> None:
        if not self._certificate:
            with self._connect() as sock:
                self._shake_hands(sock)
        if seen != self._certificate:
            raise JoinRefused(f"{self._where}: its certificate is not the run's: someone sits in between")

    def _shake_hands(self, sock: socket.socket) -> "_Words":
        """Prove the token to each other; the certificate that belongs to the proof is the run's.

        Raises:
            JoinRefused: it did not let us in.
            PeerLost: it closed the connection, or is no controller.
        """
        words = _Words(sock)
        sock.sendall(PREAMBLE)
        peer = Peer(Role.CLIENT, Channel.CONTROL, "client", __version__)
        certificate = hash_of(sock) if isinstance(sock, ssl.SSLSocket) else b""
        handshake = ClientHandshake(self._token, self._run_id, secrets.token_bytes(NONCE_BYTES), peer, certificate)
        to_send = handshake.start()
        try:
            while not handshake.done:
                for word in to_send:
                    words.send(word)
                if handshake.refusal:
                    raise JoinRefused(f"{self._where}: {handshake.refusal}", is_wrong_token=handshake.is_wrong_secret)
                to_send = handshake.receive(words.receive(FromAccepting))
            words.trust()
        except RemoteProtocolError as error:
            raise PeerLost(f"{self._where} speaks another protocol: check the port ({error})") from None
        self._certificate = certificate
        return words


def read_bootstrap(document: str) -> Bootstrap:
    """What a controller gives a machine that comes by itself.

    Raises:
        RemoteProtocolError: it is none.
    """
    try:
        given = load(Bootstrap, document)
    except DocumentFault as fault:
        raise RemoteProtocolError(f"bootstrap: {fault}") from None
    if not is_host_name(given.run_id):  # it names a file here
        raise RemoteProtocolError("bootstrap: a run id that cannot be one")
    return given


class _Words:
    """Messages over a blocking socket, one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder(PRE_AUTH_FRAME_BYTES, expect_preamble=False)
        self._payloads: list[bytes] = []

    def send(self, message: Any) -> None:
        self._sock.sendall(frame(encode(message)))

    def trust(self) -> None:
        """The other side has proven itself: longer frames may come."""
        self._payloads += self._decoder.raise_limit(FRAME_BYTES)

    def receive(self, allowed: Any) -> Any:
        while not self._payloads:
            data = self._sock.recv(1 << 16)
            if not data:
                raise EOFError("it closed the connection")
            self._payloads += self._decoder.feed(data)
        return decode(self._payloads.pop(0), allowed)
