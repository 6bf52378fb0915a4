"""The machine of the launch itself: room for the run's directory, its project, and its port."""

import socket

from flodl.errors import PreflightError
from flodl.launch import rundir
from flodl.launch.plan import HostKind, RunSpec
from flodl.launch.probe import collect
from flodl.launch.probe.facts import Place
from flodl.launch.probe.finding import Finding, Level, ok
from flodl.launch.probe.judge import judge_disk, judge_modules, size_words
from flodl.launch.probe.script import imported_by
from flodl.launch.probe.survey import reference
from flodl.runtime.ports import listen, port_of

HERE = "(here)"
"""This machine, as the controller's; no host can be called so."""


def look_here(spec: RunSpec) -> list[Finding]:
    """Versions, what the head would import, and room for what a run leaves behind."""
    versions = reference()
    place = Place(**collect.place("run directory", str(rundir.state_home())))
    return [
        ok("python", HERE, versions.python),
        ok("flodl", HERE, versions.flodl),
        ok("torch", HERE, versions.torch)
        if versions.torch
        else Finding("torch", HERE, Level.ERROR, "no torch", "", "the head runs your script: install torch here, too"),
        *_modules(spec),
        judge_disk(HERE, place) or ok("disk", HERE, f"{size_words(place.free_bytes)} free"),
    ]


def _modules(spec: RunSpec) -> list[Finding]:
    """The head runs the script here, unless the run is plain; a host of this machine with the same interpreter says it
    itself.
    """
    is_asked = any(host.kind is HostKind.LOCAL and host.python == spec.python for host in spec.hosts)
    if is_asked or spec.plain is not None:
        return []
    missing = collect.missing_modules(imported_by(spec), spec.cwd, spec.script, spec.env)
    otherwise = "for the head runs the script here, too"
    return [judge_modules(HERE, spec.python, missing, "here", otherwise)] if missing else []


def try_port(spec: RunSpec) -> tuple[Finding, list[socket.socket]]:
    """Listen as the controller would: the sockets are the caller's, and hosts can be asked to dial them."""
    try:
        sockets = listen(spec.bind_host, spec.port, rundir.port_remedy(spec.port))
    except PreflightError as error:
        reason, _, remedy = str(error).partition("\n")
        return Finding("port", HERE, Level.ERROR, reason, "", remedy.strip()), []
    return ok("port", HERE, f"{spec.bind_host}:{port_of(sockets)}"), sockets
