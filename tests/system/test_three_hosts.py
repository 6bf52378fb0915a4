"""Three hosts and the ways by which they come: sent for, by themselves, through a tunnel; and who does not get in."""

import secrets
import sys
from pathlib import Path

import pytest

from flodl.wire.handshake import derive_host_secret
from tests.runs import Fdl, Launched
from tests.system.lab import Host, Lab, is_listening
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
SIZE, EPOCHS = 1603, 2
LONG = 8
"""Epochs for hosts that come by themselves while the others train."""


def launch(fdl: Fdl, cluster: Path, log: Path, epochs: int = EPOCHS) -> Launched:
    flags = {"mode": "cpu_cadence", "size": SIZE, "batch_size": 8, "step_ms": 20, "epochs": epochs}
    return fdl.job(options=("-c", cluster), log=log, **flags)


def check_merged(run: Launched, log: Path, ranks: int, epochs: int = EPOCHS) -> None:
    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, SIZE, epochs)
    assert (seen.faults, seen.samples, seen.ranks) == ([], epochs * SIZE, list(range(ranks)))


def check_complete(run: Launched, log: Path, ranks: int) -> None:
    check_merged(run, log, ranks)
    run.wait_until_clean()


def hosts_of(run: Launched) -> list[str]:
    state = run.read("state.json")
    assert state is not None
    return [host["host"] for host in state["hosts"]]


# ----------------------------------------------------------------------------------------------------- who gets in
def test_fan_out_starts_three_hosts_at_once(fdl: Fdl, three: Lab, tmp_path: Path, log: Path) -> None:
    workers = [three.worker(host, ranks) for host, ranks in zip(three.hosts, (1, 2, 1), strict=True)]
    run = launch(fdl, three.cluster(tmp_path / "c.yml", workers), log)

    check_complete(run, log, 4)
    assert hosts_of(run) == [host.name for host in three.hosts]


def test_tunnelled_host_behind_a_firewall_trains_with_two_others(
    fdl: Fdl, three: Lab, tmp_path: Path, log: Path
) -> None:
    port, shut_off = three.free_port(), three.hosts[2]
    workers = [three.worker(host, 1, tunnel=host is shut_off) for host in three.hosts]
    with three.fence(shut_off, port):
        assert not three.reaches(shut_off, port)
        run = launch(fdl, three.cluster(tmp_path / "c.yml", workers, port), log)
        check_complete(run, log, 3)

    state = run.read("state.json")
    assert state is not None
    assert [host["tunnelled"] for host in state["hosts"]] == [False, False, True]


def test_walk_ins_join_with_the_tokens_that_were_made_for_them(fdl: Fdl, three: Lab, tmp_path: Path, log: Path) -> None:
    first, *others = three.hosts
    port = three.free_port()
    cluster = three.cluster(tmp_path / "c.yml", [three.worker(first, 1)], port, is_elastic=True)
    for host in others:
        assert fdl.call("join-config", host.name, "-c", str(cluster)).returncode == 0
    run = launch(fdl, cluster, log, epochs=LONG)
    run.wait_for_training()
    kits = Path(fdl.env["FDL_STATE_HOME"]) / "walk-ins"
    guests = [
        fdl.join(
            run,
            f"{three.address}:{port}",
            *("--persist", "--token-file", kits / host.name / "daemon.token"),
            *("--devices", "cpu", "--host", host.name),
            under=("ip", "netns", "exec", host.name),
        )
        for host in others
    ]
    try:
        fdl.wait_until(lambda: len(run.events("newcomer_ready")) == 2, 60, run.story)
        check_merged(run, log, 3, epochs=LONG)
        assert set(hosts_of(run)) == {host.name for host in three.hosts}
    finally:
        for guest in guests:
            guest.process.terminate()
    assert [guest.wait() for guest in guests] == [0, 0]
    run.wait_until_clean()


def test_manual_start_waits_for_walk_ins_and_for_the_word(fdl: Fdl, three: Lab, tmp_path: Path, log: Path) -> None:
    port = three.free_port()
    join = {"start": "manual", "min_rank_start": 3, "elastic": True}
    cluster = three.cluster(tmp_path / "c.yml", [], port, controller={"join": join})
    for host in three.hosts:
        assert fdl.call("join-config", host.name, "-c", str(cluster)).returncode == 0
    run = launch(fdl, cluster, log)
    run.wait_for_event("window_open")
    kits = Path(fdl.env["FDL_STATE_HOME"]) / "walk-ins"
    guests = []
    try:
        for count, host in enumerate(three.hosts):
            early = fdl.call("start")
            assert (early.returncode, f"too few ranks: {count} of 3 ranks are there" in early.stderr) == (2, True)
            own = ("--persist", "--token-file", kits / host.name / "daemon.token", "--devices", "cpu")
            under = ("ip", "netns", "exec", host.name)
            guests.append(fdl.join(run, f"{three.address}:{port}", *own, "--host", host.name, under=under))
            fdl.wait_until(lambda want=count + 1: len(run.events("host_joined")) == want, 60, run.story)
        run.wait_for_event("window_held")
        assert run.events("spawning") == []

        started = fdl.call("start")

        assert started.returncode == 0, started.stderr
        assert started.stdout.endswith(f"starts with 3 ranks on {', '.join(host.name for host in three.hosts)}\n")
        check_merged(run, log, 3)
    finally:
        for guest in guests:
            guest.process.terminate()
    assert [guest.wait() for guest in guests] == [0, 0, 0]
    run.wait_until_clean()


# ----------------------------------------------------------------------------------------------- who does not get in
def stranger(lab: Lab, host: Host, run: Launched, tls: str, *words: object) -> str:
    """What the controller answers to somebody on ``host``."""
    address, port = run.address
    return lab.call(host, sys.executable, HERE / "stranger.py", address, port, tls, *words).strip()


def test_impostor_is_refused_and_disturbs_nobody(fdl: Fdl, three: Lab, tmp_path: Path, log: Path) -> None:
    member, victim, elsewhere = three.hosts
    workers = [three.worker(host, 1) for host in (member, victim)]
    run = launch(fdl, three.cluster(tmp_path / "c.yml", workers, is_elastic=True), log)
    run.wait_for_training(version=2)

    stolen = derive_host_secret(bytes.fromhex((run.folder / "token").read_text()), member.name).hex()
    claims = [
        (elsewhere, "daemon", victim.name, secrets.token_hex(32)),  # knows nothing
        (member, "daemon", victim.name, stolen),  # a member as another one
        (member, "client", "client", stolen),  # a member as a person
        (member, "head", "head", stolen),  # a member as the head
    ]
    answers = [stranger(three, host, run, "tls", "claim", run.run_id, *words) for host, *words in claims]

    assert [answer.startswith("refused: ") for answer in answers] == [True] * len(claims), answers
    said = run.log("controller.log")
    assert said.count("bad peer: where=") >= len(claims)
    assert member.address in said
    assert stolen not in said
    check_complete(run, log, 2)
    assert run.events("host_lost") == []


def test_replayed_join_is_refused_and_disturbs_nobody(fdl: Fdl, three: Lab, tmp_path: Path, log: Path) -> None:
    member, between, thief = three.hosts
    port = three.free_port()
    cluster = three.cluster(
        tmp_path / "c.yml",
        [three.worker(member, 1)],
        port,
        controller={"advertise": between.address},
        security={"tls": "off"},  # or there would be nothing to record
    )
    relay = (sys.executable, HERE / "relay.py", between.address, port, three.address, "plain", tmp_path / "heard")
    with three.running(between, *relay, ready=lambda: is_listening(between.address, port)):
        run = launch(fdl, cluster, log)
        run.wait_for_training(version=2)
        joins = [path for path in tmp_path.glob("heard.*") if b"HostHello" in path.read_bytes()]
        assert len(joins) == 2  # control and bulk
        answers = [stranger(three, thief, run, "plain", "replay", path) for path in joins]
        assert all(answer.startswith("refused: ") for answer in answers), answers
        assert thief.address in run.log("controller.log")
        check_merged(run, log, 1)
    run.wait_until_clean()
    assert run.events("host_lost") == []
