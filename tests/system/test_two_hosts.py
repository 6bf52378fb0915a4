"""The same script, unchanged, on two hosts over ssh: one rank on the first, two on the second."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.runs import BIN, CLEAN_S, DIGITS, END_S, JOB, Fdl, Launched
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MODES = ["nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync", "cpu_async"]
GOOD_ACCURACY = 0.95
GRACE_S = 5.0


@pytest.fixture
def cluster(hosts: Lab, tmp_path: Path) -> Path:
    workers = [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)]
    return hosts.cluster(tmp_path / "two-hosts.yml", workers)


def endless(fdl: Fdl, cluster: Path, **flags: object) -> Launched:
    run = fdl.job(options=("-c", cluster), step_ms=20, epochs=10_000, grandchild=True, **flags)
    run.wait_for_training()
    return run


def finite(fdl: Fdl, cluster: Path, log: Path, **flags: object) -> Launched:
    run = fdl.job(options=("-c", cluster), step_ms=40, size=1603, batch_size=8, log=log, grandchild=True, **flags)
    run.wait_for_training(version=2)
    return run


# ----------------------------------------------------------------------------------------------------- the whole matrix
@pytest.mark.parametrize("mode", [*MODES[:2], *(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[2:])])
def test_every_sample_is_merged_once_and_all_ranks_end_alike(fdl: Fdl, cluster: Path, log: Path, mode: str) -> None:
    run = fdl.job(options=("-c", cluster), mode=mode, size=101, batch_size=4, epochs=2, log=log)

    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=101, epochs=2)
    assert (seen.faults, seen.samples, seen.ranks) == ([], 202, [0, 1, 2])
    run.wait_until_clean()


def test_hosts_that_exchange_bfloat16_end_alike_too(fdl: Fdl, cluster: Path, log: Path) -> None:
    run = fdl.job(
        options=("-c", cluster), mode="cpu_cadence", bf16_wire=True, outer="SlowMomentum", size=101, epochs=2, log=log
    )

    assert run.wait() == 0, run.story()
    assert witness_run(run.folder, log, size=101, epochs=2).faults == []
    run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_digits_are_learned_on_two_hosts(fdl: Fdl, cluster: Path, mode: str) -> None:
    run = fdl.launch("-c", cluster, DIGITS, "--mode", mode)

    assert run.wait() == 0, run.story()
    assert float(re.findall(r"held-out accuracy (\d\.\d+)", run.stdout)[-1]) >= GOOD_ACCURACY
    run.wait_until_clean()


def test_status_tail_and_stop_from_another_shell(fdl: Fdl, hosts: Lab, cluster: Path) -> None:
    run = endless(fdl, cluster)

    state = json.loads(fdl.call("status", "--json").stdout)
    assert [(host["host"], host["state"]) for host in state["hosts"]] == [(h.name, "alive") for h in hosts.hosts]
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1, 2]
    assert all(rank["rate"] > 0 and 0 < rank["share"] < 1 for rank in state["ranks"])
    assert sum(rank["share"] for rank in state["ranks"]) == pytest.approx(1.0)

    followed = fdl.folder / "followed"
    with followed.open("wb") as out:
        follower = subprocess.Popen(
            [str(BIN / "fdl"), "tail", "-f", "--rank", "2", "-n", "100"], env=fdl.env, stdout=out
        )
    fdl.wait_until(lambda: "rank 2 takes its first step" in followed.read_text(), 10, followed.read_text)

    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    assert follower.wait(CLEAN_S * fdl.deadline_factor) == 0
    assert "rank 0" not in followed.read_text()
    assert "rank 1" not in followed.read_text()
    assert "joined: stopped" in run.stdout
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------------- join and drain
@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "run.token"
    path.touch(0o600)
    return path


@pytest.mark.long
def test_machine_that_no_roster_knows_joins_by_address_and_token(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path, token: Path
) -> None:
    first, second = hosts.hosts
    run = finite(fdl, hosts.cluster(tmp_path / "one.yml", [hosts.worker(first, 1)], is_elastic=True), log, epochs=5)
    token.write_bytes((run.folder / "token").read_bytes())
    address, port = run.address

    there = ("ip", "netns", "exec", second.name)
    guest = fdl.join(
        run, f"{address}:{port}", "--token-file", token, "--devices", "cpu,cpu", "--host", "walker", under=there
    )

    guest.wait_for_text("rank 1 takes part")
    guest.wait_for_text("rank 2 takes part")
    assert "flodl_daemon" in " ".join(run.leftovers_on(second.namespace))
    assert run.wait() == 0, run.story()
    assert guest.wait() == 0, guest.story()
    seen = witness_run(run.folder, log, size=1603, epochs=5)
    assert (seen.faults, seen.samples, seen.ranks) == ([], 5 * 1603, [0, 1, 2])
    run.wait_until_clean()


def test_world_that_only_shrinks_lets_nobody_in(fdl: Fdl, hosts: Lab, tmp_path: Path, token: Path) -> None:
    run = endless(fdl, hosts.cluster(tmp_path / "one.yml", [hosts.worker(hosts.hosts[0], 1)]))
    token.write_bytes((run.folder / "token").read_bytes())
    address, port = run.address

    done = fdl.call("join", f"{address}:{port}", "--token-file", str(token), "--devices", "cpu", "--host", "walker")

    assert done.returncode == 4
    assert "host walker in: the run has started without it, and join.elastic is false" in done.stderr
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)
    run.wait_until_clean()


def test_drained_host_leaves_in_order_and_every_sample_is_merged_once(
    fdl: Fdl, hosts: Lab, cluster: Path, log: Path
) -> None:
    run = finite(fdl, cluster, log)
    first, second = hosts.hosts

    done = fdl.call("drain", second.name, timeout_s=END_S)

    assert (done.returncode, done.stderr) == (0, ""), run.story()
    assert done.stdout.splitlines() == [
        f"host {second.name} leaves run {run.run_id} (job) at the next commit, without loss: rank 1, 2",
        f"host {second.name} has left; the run goes on",
    ]
    fdl.wait_until(lambda: not run.leftovers_on(second.namespace), CLEAN_S, run.story)
    refused = fdl.call("drain", first.name)
    assert refused.returncode == 2
    assert f"without {first.name} only 0 ranks would be left" in refused.stderr
    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=1603, epochs=2, lost=[1, 2])
    assert (seen.faults, seen.samples) == ([], 3206)
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert outcome["losses"] == []
    run.wait_until_clean()


# -------------------------------------------------------------------------------------------------------------- kill -9
def test_killed_daemon_leaves_its_host_clean_and_the_others_go_on(
    fdl: Fdl, hosts: Lab, cluster: Path, log: Path
) -> None:
    run = finite(fdl, cluster, log)

    run.kill("daemon", hosts.hosts[1].namespace)

    fdl.wait_until(lambda: not run.leftovers_on(hosts.hosts[1].namespace), CLEAN_S, run.story)
    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=1603, epochs=2, lost=[1, 2])
    assert (seen.faults, seen.samples) == ([], 3206)
    assert f"1 loss was tolerated: host {hosts.hosts[1].name}" in run.stderr
    run.wait_until_clean()


def test_killed_controller_takes_everything_with_it_on_all_hosts(fdl: Fdl, cluster: Path) -> None:
    run = endless(fdl, cluster)

    run.kill("controller")

    run.wait_until_clean(GRACE_S + CLEAN_S)
    assert run.wait(END_S) == 1, run.story()


@pytest.mark.long
def test_killed_launcher_leaves_a_run_that_goes_on(fdl: Fdl, cluster: Path, log: Path) -> None:
    run = finite(fdl, cluster, log)

    run.kill("launcher")

    assert run.run_id in fdl.call("status").stdout
    assert run.wait_for_end()["exit_code"] == 0
    assert witness_run(run.folder, log, size=1603, epochs=2).faults == []
    run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_killed_rank_is_survived_without_losing_a_sample(fdl: Fdl, cluster: Path, log: Path, mode: str) -> None:
    run = finite(fdl, cluster, log, mode=mode)

    run.kill("rank1")

    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=1603, epochs=2, lost=[1])
    assert (seen.faults, seen.samples) == ([], 3206)
    run.wait_until_clean()


@pytest.mark.long
def test_host_whose_cable_is_pulled_is_given_up_and_stops_by_itself(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path
) -> None:
    workers = [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)]
    liveness = {"heartbeat_s": 1, "suspect_s": 4, "dead_s": 8}
    cluster = hosts.cluster(tmp_path / "c.yml", workers, liveness=liveness, on_disconnect_s=10)
    run = finite(fdl, cluster, log)

    hosts.cut(hosts.hosts[1])
    try:
        assert run.wait() == 0, run.story()
        fdl.wait_until(lambda: not run.leftovers_on(hosts.hosts[1].namespace), 10 + GRACE_S + CLEAN_S, run.story)
    finally:
        hosts.heal(hosts.hosts[1])
        hosts.hang_up(hosts.hosts[1])
    assert "silent for" in (run.folder / "events.jsonl").read_text()
    assert witness_run(run.folder, log, size=1603, epochs=2, lost=[1, 2]).faults == []
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("raise", 1, "ValueError: planted on rank 2"),
        pytest.param("_exit-7", 7, "exited with code 7", marks=pytest.mark.long),
        pytest.param("exit-text", 1, "planted text", marks=pytest.mark.long),
        pytest.param("exit-0", 2, "without finishing", marks=pytest.mark.long),
        pytest.param("exit-3", 3, "exited with code 3", marks=pytest.mark.long),
    ],
)
def test_failure_of_the_script_on_one_rank_is_the_headline(
    fdl: Fdl, hosts: Lab, cluster: Path, fault: str, code: int, words: str
) -> None:
    run = fdl.job(options=("-c", cluster), fault=fault, fault_rank=2, epochs=10_000, step_ms=5, grandchild=True)

    assert run.wait() == code, run.story()
    first = run.stderr.partition("first failure: ")[2]
    assert first.startswith(f"rank 2 on {hosts.hosts[1].name} (cpu:1): "), run.story()
    assert words in first
    run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["segv", "kill"])
def test_rank_that_dies_by_a_signal_is_survived_and_named(fdl: Fdl, hosts: Lab, cluster: Path, fault: str) -> None:
    run = fdl.job(options=("-c", cluster), fault=fault, fault_rank=2, size=400, step_ms=5)

    assert run.wait() == 0, run.story()
    assert f"1 loss was tolerated: rank 2 on {hosts.hosts[1].name}" in run.stderr
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------------------ bad input
def test_host_key_that_is_not_known_is_refused_with_its_fingerprint(fdl: Fdl, cluster: Path, hosts: Lab) -> None:
    (fdl.home / ".ssh" / "known_hosts").write_text("")
    run = fdl.launch("-c", cluster, JOB)

    assert run.wait() == 4, run.story()
    for host in hosts.hosts:
        assert f"host {host.name}: host key: " in run.stderr
    assert "SHA256:" in run.stderr
    assert "known_hosts" in run.stderr
    run.wait_until_clean()


def test_every_host_that_fails_is_named_with_its_stage_and_a_remedy(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    nobody = {"target": hosts.nobody, "user": "root", "options": ["ConnectTimeout=5"]}
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    locked = {"target": hosts.hosts[1].address, "user": "root", "identity_file": str(stranger)}
    workers = [
        hosts.worker(hosts.hosts[0], 1, python="/no/such/python"),
        hosts.worker(hosts.hosts[1], 1, ssh=locked),
        {"host": "absent", "ssh": nobody, "local_devices": ["cpu"]},
    ]
    run = fdl.launch("-c", hosts.cluster(tmp_path / "c.yml", workers), JOB)

    assert run.wait() == 4, run.story()
    assert f"host {hosts.hosts[0].name}: preflight: interpreter /no/such/python not found" in run.stderr
    assert f"host {hosts.hosts[1].name}: auth: " in run.stderr
    assert "host absent: connect: " in run.stderr
    run.wait_until_clean()
