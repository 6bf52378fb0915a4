"""Rules that span several workers: rank numbers, and one machine given twice. Pure but for the injected resolver."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

from flodl.config.problems import Finding

Resolve: TypeAlias = Callable[[str], frozenset[str]]
"""From a host name to the IP addresses that it resolves to here; empty when it does not. Never raises."""

RESOLVE_TIMEOUT_S = 5.0
"""All names together; a name that a slow DNS server has not answered by then is compared by its text alone."""

MAX_RESOLVER_THREADS = 16
"""Lookups at a time."""

_LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker as far as telling machines apart goes.

    ``host`` is the roster name, ``target`` what is dialled (an ssh target or the host), ``port`` the ssh port and
    ``jump`` the jump host, empty without one: behind a jump host or a port forward one address can be many machines.
    """

    index: int
    host: str
    target: str
    port: int
    jump: str


def resolve_host(name: str) -> frozenset[str]:
    """Ask the system's resolver; empty on any failure. May block for as long as the DNS servers let it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(str(entry[4][0]) for entry in found)


def resolve_nothing(name: str) -> frozenset[str]:
    """Compare IP literals and names as they are written."""
    return frozenset()


def machine_findings(machines: Sequence[Machine], resolve: Resolve) -> list[Finding]:
    """Find workers that are the same machine as an earlier one.

    Names are compared without regard to case, then by the addresses that ``resolve`` gives; every loopback address is
    this machine. Paths start at ``workers``.
    """
    names = [machine.target for machine in machines if not machine.jump]
    addresses = resolve_all(names, resolve, RESOLVE_TIMEOUT_S)
    seen: dict[tuple[str, int, str], Machine] = {}
    findings: list[Finding] = []
    for machine in machines:
        name = _fold(machine.host)
        reached = {_fold(machine.target)} | (set() if machine.jump else addresses[machine.target])
        identities = [(name, 0, ""), *((address, machine.port, machine.jump) for address in sorted(reached))]
        twin = next(((seen[identity], identity) for identity in identities if identity in seen), None)
        if twin is None:
            seen |= dict.fromkeys(identities, machine)
            continue
        earlier, (shared, _, _) = twin
        findings.append(
            Finding(
                path=("workers", machine.index, "host"),
                expected=f"another machine than workers[{earlier.index}].host `{earlier.host}` (both are {shared})",
                fix="list each machine once, with all its devices in `local_devices`",
            )
        )
    return findings


def rank_findings(ranks: Sequence[tuple[int, ...] | None]) -> list[Finding]:
    """Check the ``ranks`` of all workers, None where a worker has none: together exactly 0 … n-1, or none at all.

    Paths start at ``workers``.
    """
    if all(own is None for own in ranks):
        return []
    findings: list[Finding] = []
    total = sum(len(own or ()) for own in ranks)
    unused = min(set(range(total)) - {rank for own in ranks for rank in own or ()}, default=0)
    every = f"over all workers exactly 0 to {total - 1}, each once"
    owner: dict[int, int] = {}
    for index, own in enumerate(ranks):
        if own is None:
            missing = Finding(("workers", index, "ranks"), "`ranks` on every worker, or on none", read="no `ranks`")
            findings.append(missing)
        for place, rank in enumerate(own or ()):
            path = ("workers", index, "ranks", place)
            if rank in owner:
                findings.append(Finding(path, f"{every}; workers[{owner[rank]}] has {rank} already"))
            elif rank >= total and None not in ranks:
                findings.append(Finding(path, f"{every}; nobody has {unused}"))
            owner.setdefault(rank, index)
    return findings


def resolve_all(names: Iterable[str], resolve: Resolve, timeout_s: float) -> dict[str, frozenset[str]]:
    """Resolve all names side by side; one without an answer within ``timeout_s`` seconds has no addresses."""
    resolved = {name: _normal({name}) for name in names}
    wanted = [name for name, addresses in resolved.items() if not addresses]
    waiting: SimpleQueue[str] = SimpleQueue()
    answers: SimpleQueue[tuple[str, frozenset[str]]] = SimpleQueue()
    for name in wanted:
        waiting.put(name)

    def work() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except Empty:
                return
            answers.put((name, resolve(name)))

    # Daemon threads: a getaddrinfo that hangs can be neither ended nor allowed to hold up the exit of the process.
    for _ in range(min(len(wanted), MAX_RESOLVER_THREADS)):
        threading.Thread(target=work, name="flodl-resolve", daemon=True).start()
    deadline_s = time.monotonic() + timeout_s
    for _ in wanted:
        try:
            name, found = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except Empty:
            break
        resolved[name] = _normal(found)
    return resolved


def _normal(texts: Iterable[str]) -> frozenset[str]:
    """The IP addresses among ``texts`` in one spelling, all of loopback as one."""
    addresses = set()
    for text in texts:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            if _fold(text) == "localhost":
                addresses.add(_LOOPBACK)
            continue
        mapped = getattr(address, "ipv4_mapped", None) or address
        addresses.add(_LOOPBACK if mapped.is_loopback else str(mapped))
    return frozenset(addresses)


def _fold(name: str) -> str:
    return name.casefold().removesuffix(".")
