"""The join window of real runs on this machine: who is waited for, who starts it, and what is said about it."""

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flodl.launch.rundir import TOKEN_BYTES, write_token_file
from tests.runs import BIN, CLEAN_S, END_S, JOB, Fdl, Launched
from tests.witness import witness_run

pytestmark = pytest.mark.timeout(240)

SIZE = 403


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def cluster(folder: Path, *workers: dict[str, Any], **join: Any) -> Path:
    """A cluster file of this machine with a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = folder / "c.yml"
    controller = {"host": "127.0.0.1", "port": port, "join": join}
    path.write_text(yaml.safe_dump({"cluster": {"controller": controller, "workers": [*workers]}}))
    return path


def here(ranks: int) -> dict[str, Any]:
    return {"host": "localhost", "local_devices": ["cpu"] * ranks}


def managed(fdl: Fdl) -> dict[str, Any]:
    """A worker that would dial in, with a join token that nobody proves."""
    home = Path(fdl.env["FDL_STATE_HOME"])
    home.mkdir(mode=0o700, parents=True)
    write_token_file(home / "join.token", bytes(range(TOKEN_BYTES)))
    return {"host": "node-c", "daemon": "managed", "local_devices": ["cpu"]}


def launched(fdl: Fdl, file: Path, log: Path, epochs: int = 2) -> Launched:
    return fdl.job(options=("-c", file), step_ms=5, size=SIZE, batch_size=4, epochs=epochs, log=log)


def status(fdl: Fdl) -> dict[str, Any]:
    return dict(json.loads(fdl.call("status", "--json").stdout))


@pytest.mark.long
def test_held_window_without_a_roster_starts_with_those_who_came_when_a_person_says_so(
    fdl: Fdl, tmp_path: Path, log: Path
) -> None:
    run = launched(fdl, cluster(tmp_path, start="manual", min_rank_start=2), log)
    run.wait_for_text("when fdl start says so, with 2 ranks at least")

    early = fdl.call("start")
    assert early.returncode == 2
    assert "cannot be started: too few ranks: 0 of 2 ranks are there" in early.stderr
    guest = fdl.join(run, "--devices", "cpu,cpu", "--host", "walker", "--path", str(JOB.parent))
    guest.wait_for_text("host walker is there; run")
    assert (status(fdl)["phase"], status(fdl)["join"]["is_held"]) == ("waiting", True)
    assert "waiting: 2 of 2 ranks are there, fdl start starts the run" in fdl.call("status").stdout
    started = fdl.call("start", run.run_id[:15])
    assert (started.returncode, started.stdout) == (0, f"run {run.run_id} (job) starts with 2 ranks on walker\n")
    again = fdl.call("start")
    assert (again.returncode, "it does not wait to be started" in again.stderr) == (2, True)

    attached = subprocess.run(
        [BIN / "fdl", "attach", "job"],
        env=fdl.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.wait() == attached.returncode == 0, attached.stderr + run.story()
    assert f"run {run.run_id} completed" in attached.stderr
    assert "joined: completed after 2 epoch(s)" in attached.stdout
    assert guest.wait() == 0, guest.story()
    seen = witness_run(run.folder, log, size=SIZE, epochs=2)
    assert (seen.faults, seen.samples, seen.ranks) == ([], 2 * SIZE, [0, 1])
    assert "joined as" not in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_walk_in_with_another_script_is_sent_away_and_the_roster_starts_without_it(fdl: Fdl, tmp_path: Path) -> None:
    for name, more in (("mine", ""), ("there", "\n# another one\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.py").write_text(JOB.read_text() + more)
    run = fdl.launch("-c", cluster(tmp_path, here(1), start="manual"), "job.py", folder=tmp_path / "mine")
    run.wait_for_text("fdl start starts the run")
    guest = fdl.join(run, "--devices", "cpu", "--host", "extra", "--path", tmp_path / "there")
    guest.wait_for_text("host extra is there")

    assert fdl.call("start").returncode == 0

    assert guest.wait() == 4, guest.story()
    words = "rank 0 on localhost and rank 1 on extra do not agree on: script (job.py "
    assert f"host extra cannot take part: rank 1: {words}" in guest.stderr
    assert "Every host must have the same script" in guest.stderr
    assert run.wait() == 0, run.story()
    (refused,) = run.events("join_refused")
    assert words in refused["detail"]
    assert "rank 0 on localhost and rank 1 on extra" in run.log("daemon-extra.log")
    run.wait_until_clean()


@pytest.mark.long
def test_quorum_starts_without_the_host_that_never_came_and_names_it(fdl: Fdl, tmp_path: Path, log: Path) -> None:
    file = cluster(
        tmp_path, here(1), managed(fdl), min_rank_start=1, target_ranks=2, join_timeout=2, max_join_timeout=9
    )
    run = launched(fdl, file, log)

    assert run.wait() == 0, run.story()
    (degraded,) = run.events("degraded_start")
    assert degraded["detail"] == "starting with 1 rank, without node-c (is managed, and has not dialled in)"
    assert f"fdl: degraded_start: {degraded['detail']}" in run.stdout
    run.wait_until_clean()


def test_too_few_at_the_hard_limit_fail_with_5_and_the_names_of_those_who_never_came(
    fdl: Fdl, tmp_path: Path, log: Path
) -> None:
    file = cluster(tmp_path, here(1), managed(fdl), min_rank_start=2, join_timeout=2, max_join_timeout=2)
    run = launched(fdl, file, log)

    assert run.wait() == 5, run.story()
    assert f"run {run.run_id} failed: the run cannot start: 1 of 2 ranks are there\n" in run.stderr
    assert "first failure: host node-c: join: is managed, and has not dialled in\n" in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_walk_in_that_leaves_before_the_start_is_not_counted_any_more(fdl: Fdl, tmp_path: Path, log: Path) -> None:
    run = launched(fdl, cluster(tmp_path, min_rank_start=2), log)
    run.wait_for_text("it starts with 2 ranks")
    guest = fdl.join(run, "--devices", "cpu", "--host", "walker", "--path", str(JOB.parent))
    guest.wait_for_text("host walker is there")

    guest.process.send_signal(signal.SIGINT)

    assert guest.wait() == 130, guest.story()
    assert "the run has not started" in guest.stderr
    fdl.wait_until(lambda: status(fdl)["join"]["ranks"] == 0, CLEAN_S, run.story)
    again = fdl.join(run, "--devices", "cpu,cpu", "--host", "walker", "--path", str(JOB.parent))
    assert run.wait() == 0, run.story()
    assert again.wait() == 0, again.story()
    run.wait_until_clean()


@pytest.mark.long
def test_attached_terminal_stops_the_run_as_the_launching_one_would(fdl: Fdl, tmp_path: Path) -> None:
    run = fdl.job(step_ms=20, epochs=10_000)
    run.wait_for_training()
    run.kill("launcher", number=signal.SIGHUP)
    assert run.wait(CLEAN_S) == 129, run.story()

    said = tmp_path / "attached"
    with (
        said.open("wb") as out,
        subprocess.Popen(
            [BIN / "fdl", "attach"], env=fdl.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as viewer,
    ):
        fdl.wait_until(lambda: "version" in said.read_text(), END_S, said.read_text)
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(END_S * fdl.deadline_factor) == 130
    assert "fdl: stopping in order" in said.read_text()
    assert run.wait_for_end()["exit_code"] == 130
    run.wait_until_clean()
