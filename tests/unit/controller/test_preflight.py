"""Which hosts preflight keeps out of a run, and in which words."""

from flodl.controller.hosts import exclusion
from flodl.core.events import HostFailed
from flodl.errors import HostUnreachable
from flodl.launch.probe.finding import Finding, Level, ok
from flodl.launch.probe.survey import Survey

DISK = Finding("disk", "a", Level.ERROR, "/tmp: full", "", "free space")
TORCH = Finding("torch", "a", Level.ERROR, "2.0", "2.13", "install it")


def survey(*findings: Finding, **unreachable: HostUnreachable) -> Survey:
    return Survey(findings, unreachable, 0.1, 1)


def test_warnings_keep_nobody_out() -> None:
    assert exclusion(survey(ok("ssh", "a", ""), Finding("clock", "a", Level.WARN, "late")), "a") is None


def test_all_errors_of_a_host_are_one_absence_with_all_remedies() -> None:
    found = survey(DISK, TORCH, Finding("disk", "b", Level.ERROR, "other"))
    words = "disk: /tmp: full; torch: 2.0 (expected 2.13)"
    assert exclusion(found, "a") == HostFailed("a", "preflight", words, "free space\n  install it")


def test_host_that_was_not_reached_keeps_its_stage() -> None:
    error = HostUnreachable("a", "auth", "refused", "ssh-copy-id")
    found = survey(Finding("ssh", "a", Level.ERROR, "auth: refused"), a=error)
    assert exclusion(found, "a") == HostFailed("a", "auth", "refused", "ssh-copy-id")


def test_host_without_its_interpreter_was_reached_and_is_unfit() -> None:
    error = HostUnreachable("a", "start", "interpreter /x not found", "set it")
    found = survey(Finding("python", "a", Level.ERROR, "interpreter /x not found"), a=error)
    assert exclusion(found, "a") == HostFailed("a", "preflight", "interpreter /x not found", "set it")


def test_host_without_an_address_to_dial_is_unfit() -> None:
    error = HostUnreachable("a", "join", "only this machine can dial", "set controller.host")
    finding = Finding("controller", "a", Level.ERROR, "only this machine can dial", "", "set controller.host")
    failed = exclusion(survey(finding, a=error), "a")
    assert failed == HostFailed("a", "preflight", "controller: only this machine can dial", "set controller.host")
