"""How preflight's program gets onto a host, and where ssh sessions stay until daemons are started through them."""

from typing import TYPE_CHECKING

from flodl.launch.plan import HostKind, HostPlan
from flodl.launch.probe.talk import Channel, open_local

if TYPE_CHECKING:
    from flodl.launch.logins import Logins


class Doors:
    """Opens a channel on any host of a run.

    ``configured`` are the controller's addresses that hosts are told, ``here`` is the one for hosts that are this
    machine, ``port`` the controller's.
    """

    def __init__(self, configured: tuple[str, ...], here: str, port: int) -> None:
        self._configured, self._here, self._port = configured, here, port
        self._logins: Logins | None = None

    @property
    def logins(self) -> "Logins":
        """The ssh sessions; asyncssh takes 0.3 s to import, and only hosts elsewhere need it."""
        if self._logins is None:
            from flodl.launch.logins import Logins

            self._logins = Logins()
        return self._logins

    async def open(self, host: HostPlan, nonce: str) -> Channel:
        """Start the program on ``host``; its answers carry ``nonce``.

        Raises:
            ConfigError: an ssh option that cannot be honoured.
            HostUnreachable: with the stage that failed and a remedy.
        """
        if host.kind is HostKind.LOCAL:
            return await open_local(host, nonce, self._configured or (self._here,))
        from flodl.launch.logins import open_over_ssh

        login = await self.logins.open(host)
        return await open_over_ssh(host, nonce, login, self._configured, self._port)

    async def close(self) -> None:
        """Close the sessions that nobody has taken."""
        if self._logins is not None:
            await self._logins.close()
