"""At which addresses a run's connections are under TLS. Nothing here resolves a name."""

from enum import StrEnum

from flodl.config.address import is_loopback


class TlsMode(StrEnum):
    """AUTO: at every address that is not loopback. ON: everywhere. OFF: nowhere."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def covers(self, address: str) -> bool:
        """Whether connections to ``address``, an IP literal, are under TLS."""
        return self is TlsMode.ON or (self is TlsMode.AUTO and not is_loopback(address))

    def through(self, address: str) -> "TlsMode":
        """What to want at this end of a forwarded port, which is loopback whatever ``address`` the far end dials."""
        return TlsMode.ON if self.covers(address) else TlsMode.OFF
