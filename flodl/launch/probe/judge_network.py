"""From whom hosts could dial to findings about the network between them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from flodl.launch.plan import HostPlan
from flodl.launch.probe.facts import Facts, Interface, Reach
from flodl.launch.probe.finding import Finding, Level, ok

CLOCK_WARN_S: Final = 5.0
"""flodl compares no host's clock with another's; people compare lines of logs."""

MAX_PEERS: Final = 16
"""Whom one host tries: in larger clusters each its next neighbours, so that every host is dialled by as many."""

_VARIABLE: Final = "NCCL_SOCKET_IFNAME"


def peers_of(names: Sequence[str], name: str) -> list[str]:
    """Whom host ``name`` shall dial: all others, or in a large cluster those that follow it."""
    at = names.index(name)
    return [*names[at + 1 :], *names[:at]][:MAX_PEERS]


def addresses_of(host: HostPlan, facts: Facts) -> list[str]:
    """Where others dial it: on the interface that the cluster file names, else on any."""
    named = [each for each in facts.interfaces if is_named(host, each.name)]
    return [address for each in named or facts.interfaces for address in each.addresses][:8]


def source_of(host: HostPlan, facts: Facts) -> str:
    """From which address it dials its peers; empty where the cluster file leaves that to the system."""
    if not host.env.get(_VARIABLE):
        return ""
    return next((each.addresses[0] for each in facts.interfaces if is_named(host, each.name) and each.addresses), "")


def is_named(host: HostPlan, interface: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME of the host means this interface: a prefix, or with ``=`` in front the name."""
    words = host.env.get(_VARIABLE, "").split(",")
    return any(interface == word[1:] if word[:1] == "=" else word and interface.startswith(word) for word in words)


def judge_network(
    hosts: Mapping[str, tuple[HostPlan, Facts]], reaches: Mapping[str, Reach], skews_s: Mapping[str, float]
) -> list[Finding]:
    """Clock, interface, MTU, and who could not be dialled. ``skews_s``: how far each clock is ahead of ours."""
    direct = {name: known for name, known in hosts.items() if not known[0].tunnel}
    used = {name: _used(host, facts, reaches.get(name)) for name, (host, facts) in direct.items()}
    found: list[Finding] = []
    for name, (host, facts) in hosts.items():
        found += [_clock(name, skews_s[name])] if name in skews_s else []
        if host.tunnel:
            found.append(ok("controller", name, "through ssh"))
            continue
        found += [_interface(host, facts, used[name])] if len(hosts) > 1 or host.env.get(_VARIABLE) else []
        if name in reaches:
            found += [_controller(name, reaches[name]), *_peers(host, reaches[name])]
    return found + _mtus(used)


def _used(host: HostPlan, facts: Facts, reach: Reach | None) -> Interface | None:
    """The interface of its training traffic, as far as it is known."""
    if host.env.get(_VARIABLE):
        return next((each for each in facts.interfaces if is_named(host, each.name)), None)
    source = reach.controller.source if reach else ""
    return next((each for each in facts.interfaces if source in each.addresses), None)


def _clock(host: str, skew_s: float) -> Finding:
    if abs(skew_s) <= CLOCK_WARN_S:
        return ok("clock", host, f"{round(skew_s, 2) + 0.0:+.2f} s")
    where = "ahead of" if skew_s > 0 else "behind"
    words = f"its clock is {abs(skew_s):.1f} s {where} this machine's"
    remedy = (
        "there: timedatectl set-ntp true (or another NTP service). The run does not mind; times in logs will differ"
    )
    return Finding("clock", host, Level.WARN, words, f"within {CLOCK_WARN_S:g} s", remedy)


def _interface(host: HostPlan, facts: Facts, used: Interface | None) -> Finding:
    variable = host.env.get(_VARIABLE, "")
    there = ", ".join(each.name for each in facts.interfaces if each.addresses) or "none with an address"
    if variable and not variable.startswith("^") and (used is None or not used.addresses):
        words, remedy = f"no interface {variable} with an address", f"set `nccl_socket_ifname` of worker {host.name}"
        return Finding("interface", host.name, Level.ERROR, words, f"one of: {there}", remedy)
    return ok("interface", host.name, used.name if used else there)


def _controller(host: str, reach: Reach) -> Finding:
    if not reach.controller.error:
        return ok("controller", host, reach.controller.address)
    words = f"it cannot dial the controller: {reach.controller.error}"
    remedy = (
        "open `controller.port` in this machine's firewall; `controller.host` or `advertise` has to be an address "
        "that the host reaches"
    )
    return Finding("controller", host, Level.ERROR, words, "", remedy)


def _peers(host: HostPlan, reach: Reach) -> list[Finding]:
    if not reach.peers:
        return []
    lost = {name: each.error for name, each in reach.peers.items() if each.error}
    if not lost:
        return [ok("peers", host.name, f"{len(reach.peers)} reached")]
    words = "; ".join(f"{name} cannot be dialled ({error})" for name, error in list(lost.items())[:4])
    more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
    remedy = (
        "nccl_* modes and --plain need every worker to reach every other on any port: open the firewall, name a "
        "common network with `nccl_socket_ifname`, or use a cpu_* mode"
    )
    return [Finding("peers", host.name, Level.WARN, words + more, "all workers", remedy)]


def _mtus(used: Mapping[str, Interface | None]) -> list[Finding]:
    known = {name: interface for name, interface in used.items() if interface is not None}
    sizes = sorted({interface.mtu for interface in known.values()})
    if len(sizes) < 2:
        return [ok("mtu", name, str(interface.mtu)) for name, interface in known.items()]
    remedy = f"the same on every host, as: ip link set DEVICE mtu {sizes[0]}"
    return [
        Finding("mtu", name, Level.WARN, f"{each.name} has MTU {each.mtu}", f"one for all; there are {sizes}", remedy)
        if each.mtu != sizes[0]
        else ok("mtu", name, str(each.mtu))
        for name, each in known.items()
    ]
