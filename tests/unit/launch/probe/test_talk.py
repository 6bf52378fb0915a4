"""The conversation with a host: through noise, old and broken interpreters, and silence. Real processes, real ssh."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import HostUnreachable
from flodl.launch.logins import Logins, open_over_ssh
from flodl.launch.plan import HostKind, HostPlan
from flodl.launch.probe import talk
from flodl.launch.probe.facts import Facts
from flodl.launch.probe.talk import Channel, Interview, OldPython, open_local
from tests.unit.launch.conftest import site
from tests.unit.launch.ssh_site import SshSite, executable

__all__ = ["site"]

LIMIT_S = 30.0
CONTROLLER = ("127.0.0.1:1",)


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await body()

    return asyncio.run(limited())


def request(folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "script": ["train.py"],
        "places": [["project", str(folder)]],
        "packages": ["flodl", "no-such-package"],
        "modules": ["json", "no_such_module"],
        "gpus": False,
        "smi_timeout_s": 1.0,
        "torch_timeout_s": 1.0,
        "own_run": "",
        "env": {},
        "code": {},
    }


def local(folder: Path, python: str) -> HostPlan:
    return HostPlan("box", HostKind.LOCAL, ("cpu",), python, str(folder), ("train.py",))


def ask(host: HostPlan, folder: Path, open_channel: Callable[[HostPlan, str], Awaitable[Channel]]) -> Facts:
    async def body() -> Facts:
        interview = Interview(host)
        channel = await open_channel(host, interview.nonce)
        try:
            return await interview.facts(channel, request(folder))
        finally:
            await channel.close()

    facts: Facts = run(body)
    return facts


def ask_here(folder: Path, python: str = sys.executable) -> Facts:
    return ask(local(folder, python), folder, lambda host, nonce: open_local(host, nonce, CONTROLLER))


def test_this_machine_describes_itself(tmp_path: Path) -> None:
    facts = ask_here(tmp_path)
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.packages["no-such-package"] == ""
    assert facts.packages["flodl"]
    assert facts.missing_modules == ("no_such_module",)
    assert facts.script == f"{tmp_path}/train.py not found"
    assert facts.places[0].total_bytes > facts.places[0].free_bytes > 0
    assert facts.limits["nofile"] > 0


def test_module_beside_the_script_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "no_such_module.py").write_text("")
    facts = ask_here(tmp_path)
    assert (facts.missing_modules, facts.script) == ((), "")


def test_project_cannot_stand_in_for_the_standard_library(tmp_path: Path) -> None:
    for name in ("json", "socket", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not that one')")
    assert ask_here(tmp_path).missing_modules == ("no_such_module",)


def test_interpreter_that_prints_is_understood(tmp_path: Path) -> None:
    noisy = executable(
        tmp_path / "noisy", f'printf "Welcome\\n\\377\\nFDL1 abc 3\\n"; exec {sys.executable} -X importtime "$@"'
    )
    assert ask_here(tmp_path, str(noisy)).packages["flodl"]


def test_old_interpreter_says_how_old_it_is(tmp_path: Path) -> None:
    shim = "import sys; sys.version_info = (2, 7, 18, 'final', 0); c = sys.argv[2]; sys.argv[1:3] = []; exec(c)"
    old = executable(tmp_path / "old", f'exec {sys.executable} -c "{shim}" "$@"')
    with pytest.raises(OldPython, match=r"2\.7\.18"):
        ask_here(tmp_path, str(old))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "echo cannot find libpython >&2; exit 3",
            "ended with code 3 before it answered; it said:\ncannot find libpython",
        ),
        ("kill -9 $$", "ended with code 137"),
        ("exit 127", "not found"),
        (
            'printf "\\nFDL1 python %s 3.11.2\\n\\nFDL1 %s 2\\n{}" "$3" "$3"; cat >/dev/null',
            "Facts.hostname: expected to be present",
        ),
        ('printf "\\nFDL1 %s 99999999\\n" "$3"; cat >/dev/null', "expected a length"),
    ],
)
def test_interpreter_that_does_not_answer_is_quoted(tmp_path: Path, body: str, words: str) -> None:
    broken = executable(tmp_path / "broken", body)
    with pytest.raises(HostUnreachable) as caught:
        ask_here(tmp_path, str(broken))
    assert caught.value.stage == "start"
    assert words in caught.value.reason


def test_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostUnreachable, match="interpreter /no/python not found"):
        ask_here(tmp_path, "/no/python")


def test_host_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "FACTS_TIMEOUT_S", 0.2)
    silent = executable(tmp_path / "silent", "echo wait for it; exec sleep 60")
    with pytest.raises(HostUnreachable, match=r"no answer within 0\.2 s; it said:\nwait for it"):
        ask_here(tmp_path, str(silent))


def wrapper(folder: Path, end: str) -> tuple[Path, Callable[[], list[int]]]:
    """An interpreter that starts others which outlive it, one of them in a session of its own, and their pids."""
    start = f"sleep 1000 & echo $! >> {folder}/pids; setsid sh -c 'echo $$ >> {folder}/pids; exec sleep 1000' &"
    wait = f"until [ $(wc -l < {folder}/pids) = 2 ]; do :; done"
    path = executable(folder / "wrapper", f"{start} {wait}; {end}")
    return path, lambda: [int(line) for line in (folder / "pids").read_text().split()]


def is_running(pid: int) -> bool:
    """A killed orphan may stay a zombie where nobody reaps; it runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("end", "answers"), [("wait", False), (f'{sys.executable} "$@"', True)])
def test_wrapper_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., object], end: str, answers: bool
) -> None:
    if not answers:
        monkeypatch.setattr(talk, "FACTS_TIMEOUT_S", 1.0)
    monkeypatch.setattr(talk, "CLOSE_TIMEOUT_S", 0.5)
    path, pids = wrapper(tmp_path, end)
    try:
        if answers:
            assert ask_here(tmp_path, str(path)).packages["flodl"]
        else:
            with pytest.raises(HostUnreachable, match=r"no answer within 1 s"):
                ask_here(tmp_path, str(path))
        wait_until(lambda: not is_running(pids()[0]), 5.0, "the end of the wrapper's child")
    finally:
        for pid in pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_half_a_version_is_no_old_one(tmp_path: Path) -> None:
    vague = executable(tmp_path / "vague", 'printf "\\nFDL1 python %s 3\\n" "$3"; exit 4')
    with pytest.raises(HostUnreachable, match="ended with code 4"):
        ask_here(tmp_path, str(vague))


def test_hosts_dial_each_other_and_the_controller_and_are_told_apart(tmp_path: Path) -> None:
    async def body() -> Any:
        first, second = (Interview(local(tmp_path, sys.executable)) for _ in range(2))
        channels = [await open_local(each.host, each.nonce, CONTROLLER) for each in (first, second)]
        try:
            facts = [
                await each.facts(channel, request(tmp_path))
                for each, channel in zip((first, second), channels, strict=True)
            ]
            peer = {"addresses": ["127.0.0.1"], "port": facts[1].port, "source": "127.0.0.1"}
            peers = {
                "right": {**peer, "token": second.token},
                "somebody else": {**peer, "token": first.token},
                "nobody": {**peer, "addresses": [], "token": ""},
            }
            with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                controllers = [unused.getsockname(), server.getsockname()]
                return controllers[1], await first.reach(channels[0], {"peers": peers, "controllers": controllers})
        finally:
            for channel in channels:
                await channel.close()

    _, (reach, skew_s) = run(body)
    assert (reach.peers["right"].address, reach.peers["right"].error) == ("127.0.0.1", "")
    assert "127.0.0.1: connects, then" in reach.peers["somebody else"].error
    assert reach.peers["nobody"].error == "no address to dial"
    assert (reach.controller.address, reach.controller.source, reach.controller.error) == ("127.0.0.1",) * 2 + ("",)
    assert abs(skew_s) < 1.0


def test_program_ends_with_its_session(tmp_path: Path) -> None:
    async def body() -> int | None:
        interview = Interview(local(tmp_path, sys.executable))
        channel = await open_local(interview.host, interview.nonce, CONTROLLER)
        await interview.facts(channel, request(tmp_path))
        await channel.close()
        return await channel.exit_code()

    assert run(body) == 0


# ----------------------------------------------------------------------------------------------------------------- ssh
def ask_over_ssh(site: SshSite, host: Callable[[], HostPlan], folder: Path, times: int = 1) -> list[Facts]:
    async def body() -> list[Facts]:
        async with site.serving():
            site.trust()
            logins, plan = Logins(), host()
            try:
                found = []
                for _ in range(times):
                    interview, login = Interview(plan), await logins.open(plan)
                    channel = await open_over_ssh(plan, interview.nonce, login, CONTROLLER, 1)
                    found.append(await interview.facts(channel, request(folder)))
                    await channel.close()
                return found
            finally:
                await logins.close()

    facts: list[Facts] = run(body)
    return facts


def test_host_is_asked_through_banners_with_one_login(site: SshSite, tmp_path: Path) -> None:
    site.noise, site.noise_stderr = b"*** Welcome \xff ***\nFDL1 \n", b"rc: command not found\n"
    first, second = ask_over_ssh(site, lambda: site.host(tmp_path, sys.executable), tmp_path, times=2)
    assert first.packages == second.packages
    assert site.connections == 1


def test_interpreter_that_is_missing_over_ssh_is_named(site: SshSite, tmp_path: Path) -> None:
    with pytest.raises(HostUnreachable, match="interpreter /no/python not found"):
        ask_over_ssh(site, lambda: site.host(tmp_path, "/no/python"), tmp_path)


def test_folder_that_is_missing_is_a_fact(site: SshSite, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    (facts,) = ask_over_ssh(site, lambda: site.host(gone, sys.executable), gone)
    assert [each.is_folder for each in facts.places] == [False]


def test_interpreter_is_looked_for_in_the_projects_folder_and_at_home(site: SshSite, tmp_path: Path) -> None:
    for folder in (tmp_path, site.home):
        executable(folder / "py thon", f'exec {sys.executable} "$@"')
    assert ask_over_ssh(site, lambda: site.host(tmp_path, "./py thon"), tmp_path)
    assert ask_over_ssh(site, lambda: site.host(tmp_path, "~/py thon"), tmp_path)


def test_session_that_was_taken_is_not_closed_with_the_others(site: SshSite, tmp_path: Path) -> None:
    async def body() -> tuple[bool, bool]:
        async with site.serving():
            site.trust()
            logins = Logins()
            hosts = [dataclasses.replace(site.host(tmp_path, sys.executable), name=name) for name in "ab"]
            kept, closed = [await logins.open(host) for host in hosts]
            assert logins.take("a") is kept
            assert logins.take("a") is None
            await logins.close()
            states = kept.connection.is_closed(), closed.connection.is_closed()
            await kept.close()
            return states

    assert run(body) == (False, True)


def test_request_carries_no_secret_and_is_one_line(tmp_path: Path) -> None:
    line = talk.request_line(request(tmp_path / "new\nline"))
    assert line.count(b"\n") == 1
    assert json.loads(line)["folder"] == str(tmp_path / "new\nline")
