"""Who is which rank of a plain run, and where the ranks meet: the same in every start.

Invariants: a device keeps its rank however often the ranks are started; a host's place is that of its first rank. It
knows nothing of processes and ports.
"""

from collections.abc import Mapping, Sequence

from flodl.core.actions import JobAction, SendHost
from flodl.core.admission import beyond_tunnels
from flodl.core.membership import Membership
from flodl.ids import HostName, RankId
from flodl.messages import Device, HostHello, PlainGroup, RankSpec, SpawnRanks

LOOPBACK = "127.0.0.1"


class Places:
    """See the module docstring. ``hosts`` are in the order of their first ranks."""

    def __init__(self, devices: Sequence[tuple[HostName, Device]]) -> None:
        """``devices`` in the order of ranks; there is one at least."""
        self.hosts = tuple(dict.fromkeys(host for host, _ in devices))
        self._devices = tuple(devices)

    def new_membership(self) -> Membership:
        """For one start: every device has its rank, and every rank is live."""
        membership = Membership()
        ranks: list[RankId] = [membership.spawn(host, device).rank for host, device in self._devices]
        for rank in ranks:
            membership.mark_ready(rank)
        membership.admit(ranks)
        return membership

    def misfit(self, hello: HostHello) -> str:
        """Why a host that was lost cannot take its place again; empty when it can."""
        before = tuple(device for host, device in self._devices if host == hello.host)
        if before == hello.devices:
            return ""
        return f"host {hello.host} offers other devices than before; its ranks cannot take their places again"

    def orders(self, address: str, port: int, restart: int, max_restarts: int) -> list[JobAction]:
        """What each host is told to start."""
        size, group_size = len(self._devices), len(self.hosts)
        ranked = tuple(enumerate(self._devices))
        orders: list[JobAction] = []
        for place, host in enumerate(self.hosts):
            own = [(rank, device) for rank, (name, device) in ranked if name == host]
            gpus = tuple(device.id for _, device in own if device.kind == "cuda")
            group = PlainGroup(address, port, place, group_size, restart, max_restarts, gpus)
            specs = tuple(RankSpec(rank, local, device) for local, (rank, device) in enumerate(own))
            orders.append(SendHost(host, SpawnRanks(size, specs, group)))
        return orders


def mixture(hello: HostHello) -> str:
    """Why the devices of a host cannot serve a plain run: a script finds its device by its local rank alone."""
    kinds = sorted({device.kind for device in hello.devices})
    if len(kinds) < 2:
        return ""
    return f"host {hello.host} offers {' and '.join(kinds)} devices; a plain run takes one kind per host"


def shut_off(hellos: Sequence[HostHello]) -> str:
    """Why these hosts cannot serve one plain run: its ranks reach each other by themselves. Empty when they can."""
    return "" if len(hellos) < 2 else beyond_tunnels("a plain run", hellos, "leave the tunnel out")


def meeting_point(hosts: Sequence[HostName], hellos: Mapping[HostName, HostHello]) -> tuple[str, str]:
    """Where the first of ``hosts`` can be reached by the others, and else whom it shall find that out with: an address
    of its own, or one of a peer; the other one is empty.
    """
    addresses = [hellos[host].address for host in hosts if host in hellos]
    if len(hosts) == 1:
        return LOOPBACK, ""
    if not _is_loopback(addresses[0]):
        return addresses[0], ""
    peer = next((address for address in addresses if not _is_loopback(address)), "")
    return ("", peer) if peer else (LOOPBACK, "")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
