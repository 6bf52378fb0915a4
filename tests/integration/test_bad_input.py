"""Bad input: one clear message with what to do, the right exit code, and nothing left running."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.runs import JOB, Fdl

pytestmark = pytest.mark.timeout(240)


def cluster_file(path: Path, port: int, **worker: object) -> Path:
    """One CPU rank here."""
    workers = [{"host": "localhost", "local_devices": ["cpu"], **worker}]
    document = {"cluster": {"controller": {"host": "127.0.0.1", "port": port}, "workers": workers}}
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def no_run_was_started(fdl: Fdl) -> bool:
    return not list(Path(fdl.env["FDL_STATE_HOME"]).glob("runs/*"))


def test_unreadable_cluster_file_is_named(fdl: Fdl, tmp_path: Path) -> None:
    done = fdl.call("launch", "-c", str(tmp_path), str(JOB))

    assert (done.returncode, no_run_was_started(fdl)) == (2, True)
    assert str(tmp_path) in done.stderr
    assert "a readable cluster file" in done.stderr


def test_invalid_cluster_file_is_named_with_line_and_near_key(fdl: Fdl, tmp_path: Path) -> None:
    path = tmp_path / "fdl.cluster.yml"
    path.write_text("cluster:\n  controller: {host: 127.0.0.1}\n  wokers: []\n")

    done = fdl.call("launch", "-c", str(path), str(JOB))

    assert (done.returncode, no_run_was_started(fdl)) == (2, True)
    assert f"{path}:3" in done.stderr
    assert "workers" in done.stderr


def test_missing_script_is_named(fdl: Fdl) -> None:
    done = fdl.call("launch", "--local", "2", str(JOB.with_name("jobs.py")))

    assert (done.returncode, no_run_was_started(fdl)) == (2, True)
    assert f"{JOB.with_name('jobs.py')} not found; did you mean job.py?" in done.stderr


def test_port_in_use_is_named_within_two_seconds(fdl: Fdl, tmp_path: Path, taken_port: int) -> None:
    path = cluster_file(tmp_path / "c.yml", taken_port)

    started_s = time.monotonic()
    done = fdl.call("launch", "-c", str(path), str(JOB))

    assert time.monotonic() - started_s < 2 * fdl.deadline_factor
    assert (done.returncode, no_run_was_started(fdl)) == (3, True)
    assert f"port {taken_port}" in done.stderr
    assert "controller.port" in done.stderr


def test_interpreter_that_is_not_there_is_named(fdl: Fdl, tmp_path: Path, free_port: int) -> None:
    run = fdl.launch("-c", cluster_file(tmp_path / "c.yml", free_port, python="/no/such/python"), JOB)

    assert run.wait() == 3, run.story()
    assert "first failure: host localhost: preflight: interpreter /no/such/python not found" in run.stderr
    assert "set `python` of worker localhost" in run.stderr
    run.wait_until_clean()


def test_model_factory_that_raises_is_the_headline(fdl: Fdl) -> None:
    run = fdl.job(broken_model=True)

    assert run.wait() == 1, run.story()
    assert "RuntimeError: planted in build_model" in run.stderr.partition("first failure: ")[2]
    run.wait_until_clean()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param({"size": 0}, "dataset has length 0", marks=pytest.mark.long),
        ({"size": 5, "batch_size": 6}, "batch_size 6 is larger than the dataset of 5 samples; lower batch_size"),
    ],
)
def test_impossible_settings_are_refused_with_what_to_change(fdl: Fdl, flags: dict[str, int], words: str) -> None:
    run = fdl.job(**flags)

    assert run.wait() == 2, run.story()
    assert (run.stdout + run.stderr).count("in your script, most recent call last:") == 1, "the headline shows it, once"
    assert words in run.stderr
    assert f'File "{JOB}", line' in run.stderr
    assert "flodl/spec/knobs.py" not in run.stdout + run.stderr
    assert "flodl/spec/knobs.py" in run.log("head.stderr.log")
    run.wait_until_clean()


def test_dataset_smaller_than_the_ranks_is_refused_with_what_to_change(fdl: Fdl) -> None:
    run = fdl.job(options=("--local", 3), size=2, batch_size=1)

    assert run.wait() == 2, run.story()
    assert "first failure: the dataset has 2 samples for 3 ranks" in run.stderr
    assert "use at most 2 ranks" in run.stderr
    run.wait_until_clean()
