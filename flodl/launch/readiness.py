"""``fdl probe``: whether this machine and all hosts could take part in a run, without starting one."""

import asyncio
import dataclasses

from flodl.config.address import format_address
from flodl.launch import listening
from flodl.launch.plan import RunSpec
from flodl.launch.probe.doors import Doors
from flodl.launch.probe.finding import CHECKS
from flodl.launch.probe.here import HERE, look_here, try_port
from flodl.launch.probe.survey import Survey, survey


def readiness(spec: RunSpec) -> Survey:
    """All findings about ``spec``'s hosts and this machine (``HERE``), in the order of ``CHECKS``."""
    return asyncio.run(_readiness(spec))


async def _readiness(spec: RunSpec) -> Survey:
    port, sockets = try_port(spec)
    try:
        if sockets:
            address, number = listening.dial_address(sockets[0])
            announced = listening.announced(spec.advertise, sockets[0])
        else:  # whoever has the port answers there: hosts can still be asked whether they reach it
            address, number = spec.bind_host, spec.port
            announced = (format_address(spec.advertise or spec.bind_host, spec.port),)
        doors = Doors(announced, format_address(address, number), number)
        try:
            found = await survey(spec, doors.open)
        finally:
            await doors.close()
    finally:
        for sock in sockets:
            sock.close()
    findings = [*look_here(spec), port, *found.findings]
    findings.sort(key=lambda one: CHECKS.index(one.check))
    return dataclasses.replace(found, findings=tuple(findings))


def hosts_of(spec: RunSpec) -> list[str]:
    """The columns of a report: this machine, then the hosts."""
    return [HERE, *(host.name for host in spec.hosts)]
