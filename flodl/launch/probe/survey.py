"""Asks all hosts at once, lets them try each other, and has the answers judged.

Two rounds with one barrier between them: hosts dial each other only when all of them listen. A host that cannot be
asked is a finding like any other, and holds up nobody for longer than its own deadlines.
"""

import asyncio
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flodl import __version__
from flodl.config.address import split_address
from flodl.errors import FlodlError, HostUnreachable
from flodl.ids import HostName
from flodl.launch.devices import asks_for_gpus
from flodl.launch.plan import HostKind, HostPlan, RunSpec, SyncMode
from flodl.launch.probe import collect
from flodl.launch.probe.facts import Facts, Reach
from flodl.launch.probe.finding import CHECKS, Finding, Level, ok
from flodl.launch.probe.judge import (
    PACKAGES,
    Reference,
    judge_host,
    judge_old_python,
    judge_together,
    judge_unreachable,
)
from flodl.launch.probe.judge_network import addresses_of, judge_network, peers_of, source_of
from flodl.launch.probe.script import Needed, needed_by
from flodl.launch.probe.talk import SMI_TIMEOUT_S, TORCH_TIMEOUT_S, Channel, Interview, OldPython

Open = Callable[[HostPlan, str], Awaitable[Channel]]
"""Starts the program on a host, with a nonce; raises HostUnreachable."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Survey:
    """All findings, by check and host, and the errors of hosts that could not be asked; ``asked_count`` were tried."""

    findings: tuple[Finding, ...]
    unreachable: Mapping[HostName, HostUnreachable]
    duration_s: float
    asked_count: int

    def of(self, host: HostName, level: Level) -> list[Finding]:
        """What was found on one host at this level."""
        return [finding for finding in self.findings if finding.host == host and finding.level is level]


@dataclass(slots=True)
class _Asked:
    """One host on its way through the two rounds."""

    interview: Interview
    channel: Channel | None = None
    facts: Facts | None = None
    needed: Needed = field(default_factory=Needed)
    reach: Reach | None = None
    skew_s: float = 0.0
    error: HostUnreachable | None = None
    findings: list[Finding] = field(default_factory=list)


async def survey(spec: RunSpec, open_channel: Open) -> Survey:
    """Ask every host of ``spec`` but those that dial in by themselves; never raises for a host's sake.

    Args:
        spec: the run that is to be started, or a plan for it.
        open_channel: how a host is reached.
    """
    started_s = time.monotonic()
    needed = asyncio.create_task(asyncio.to_thread(needed_by, spec))
    asked = {host.name: _Asked(Interview(host)) for host in spec.hosts if host.kind is not HostKind.MANAGED}
    try:
        await asyncio.gather(*(_first(each, spec, needed, open_channel) for each in asked.values()))
        heard = {name: each for name, each in asked.items() if each.facts is not None and each.channel is not None}
        await asyncio.gather(*(_second(each, heard) for each in heard.values()))
    finally:
        await asyncio.gather(*(each.channel.close() for each in asked.values() if each.channel))
    managed = [host.name for host in spec.hosts if host.kind is HostKind.MANAGED]
    findings = [ok("ssh", name, "dials in by itself") for name in managed]
    findings += [finding for each in asked.values() for finding in each.findings]
    findings += _judged(asked, is_copied=spec.sync.mode is not SyncMode.OFF)
    order = {host.name: place for place, host in enumerate(spec.hosts)}
    findings.sort(key=lambda one: (CHECKS.index(one.check), order[one.host]))
    errors = {name: each.error for name, each in asked.items() if each.error is not None}
    return Survey(tuple(findings), errors, time.monotonic() - started_s, len(asked))


def reference() -> Reference:
    """This machine's versions."""
    return Reference(__version__, platform.python_version(), collect.version("torch"))


async def _first(each: _Asked, spec: RunSpec, needed: asyncio.Task[Needed], open_channel: Open) -> None:
    host, started_s = each.interview.host, time.monotonic()
    try:
        each.channel = await open_channel(host, each.interview.nonce)
        if host.kind is HostKind.SSH:
            each.findings.append(ok("ssh", host.name, f"{time.monotonic() - started_s:.2f} s"))
        each.needed = await needed
        each.facts = await each.interview.facts(each.channel, _request(host, spec, each.needed))
    except OldPython as old:
        each.findings.append(judge_old_python(host, old.version))
    except Exception as error:  # noqa: BLE001  # of whatever library: one host's trouble is a finding
        each.error = _unreachable(host, error)
        each.findings.append(judge_unreachable(each.error, each.channel is not None or host.kind is HostKind.LOCAL))


async def _second(each: _Asked, heard: Mapping[HostName, _Asked]) -> None:
    host, channel, facts = each.interview.host, each.channel, each.facts
    assert channel is not None
    assert facts is not None
    source = source_of(host, facts)
    peers: dict[str, Any] = {}
    direct = [name for name, other in heard.items() if not other.interview.host.tunnel]
    for name in peers_of(direct, host.name) if host.name in direct else ():
        peer = heard[name]
        assert peer.facts is not None
        addresses = addresses_of(peer.interview.host, peer.facts)
        peers[name] = {
            "addresses": addresses,
            "port": peer.facts.port,
            "token": peer.interview.token,
            "source": source,
        }
    controllers = [split_address(address, 0) for address in channel.controllers]
    try:
        each.reach, each.skew_s = await each.interview.reach(channel, {"peers": peers, "controllers": controllers})
    except Exception as error:  # noqa: BLE001  # as above
        each.error = _unreachable(host, error)
        each.findings.append(judge_unreachable(each.error, is_probed=False))


def _unreachable(host: HostPlan, error: Exception) -> HostUnreachable:
    if isinstance(error, HostUnreachable):
        return error
    if not isinstance(error, (FlodlError, OSError)):
        _log.info("host %s cannot be asked", host.name, exc_info=error)
    return HostUnreachable(host.name, "start", str(error) or type(error).__name__)


def _request(host: HostPlan, spec: RunSpec, needed: Needed) -> dict[str, Any]:
    data = host.env.get("FDL_DATA_PATH")
    places = [("project", host.cwd), ("temporary", ""), ("shared memory", "/dev/shm")]
    return {
        "folder": host.cwd,
        "script": list(host.script),
        "env": {**spec.env, **host.env},
        "places": places + ([("data", data)] if data else []),
        "packages": PACKAGES,
        "modules": needed.modules,
        "code": needed.code_for(host),
        "gpus": asks_for_gpus(host.devices),
        "smi_timeout_s": SMI_TIMEOUT_S,
        "torch_timeout_s": TORCH_TIMEOUT_S,
        "own_run": spec.run_id,
    }


def _judged(asked: Mapping[HostName, _Asked], *, is_copied: bool) -> list[Finding]:
    here = reference()
    hosts = {name: (each.interview.host, each.facts) for name, each in asked.items() if each.facts is not None}
    found = [
        finding
        for name, (host, facts) in hosts.items()
        for finding in judge_host(host, facts, here, asked[name].needed.vital, is_copied)
    ]
    reaches = {name: each.reach for name, each in asked.items() if each.reach is not None}
    skews_s = {name: each.skew_s for name, each in asked.items() if each.reach is not None}
    return [*found, *judge_network(hosts, reaches, skews_s), *judge_together(hosts, found)]
