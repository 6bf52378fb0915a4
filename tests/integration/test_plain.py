"""Scripts as people have them for torchrun, launched with --plain: real DDP over Gloo, real failures, real restarts."""

import json
import re
import signal
import socket
from contextlib import closing
from typing import Any

import pytest

from tests.runs import DDP, END_S, JOB, Fdl, Launched

pytestmark = pytest.mark.timeout(240)

LONG = ("--steps", 100_000, "--step-ms", 20)
STEP = "takes its first step"


def plain(fdl: Fdl, *script: object, options: tuple[object, ...] = (), ranks: int = 2) -> Launched:
    return fdl.launch("--stop-timeout", 5, "--local", ranks, "--plain", *options, *(script or (DDP,)))


def training(fdl: Fdl, *arguments: object, options: tuple[object, ...] = ()) -> Launched:
    """A long run in which every rank has done a step."""
    run = plain(fdl, DDP, *LONG, *arguments, options=options)
    for rank in range(2):
        run.wait_for_log(f"rank{rank}.stdout.log", STEP)
    return run


def environments(run: Launched, rank: int) -> list[dict[str, str]]:
    """What the rank found in its environment in each start."""
    return [json.loads(found) for found in re.findall(r"environment (\{.*\})", run.log(f"rank{rank}.stdout.log"))]


def outcome(run: Launched) -> dict[str, Any]:
    found = run.read("outcome.json")
    assert found is not None
    return found


# -------------------------------------------------------------------------------------------------------- start to end
@pytest.mark.long
def test_script_for_torchrun_trains_over_its_ranks_without_a_head(fdl: Fdl) -> None:
    run = plain(fdl, ranks=3)

    assert run.wait() == 0, run.story()
    assert len(re.findall("of 3 is done: all alike True", run.stdout)) == 3
    for rank in range(3):
        (env,) = environments(run, rank)
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["GROUP_RANK"]) == (
            str(rank),
            str(rank),
            "3",
            "0",
        )
        assert (env["TORCHELASTIC_RUN_ID"], env["TORCHELASTIC_RESTART_COUNT"]) == (run.run_id, "0")
    assert run.log("head.stdout.log") == ""
    run.wait_until_clean()


def test_killed_rank_starts_all_again_and_another_shell_sees_and_stops_it(fdl: Fdl) -> None:
    words = fdl.folder / "words"
    run = training(fdl, "--last-words", words, options=("--max-restarts", 2))
    run.kill("rank1")
    logs = [f"rank{rank}.stdout.log" for rank in range(2)]
    fdl.wait_until(lambda: all(run.log(name).count(STEP) == 2 for name in logs), END_S, run.story)

    for rank in range(2):
        found = [(env["RANK"], env["TORCHELASTIC_RESTART_COUNT"]) for env in environments(run, rank)]
        assert found == [(str(rank), "0"), (str(rank), "1")]
    state = json.loads(fdl.call("status", "--json").stdout)
    assert (state["phase"], state["plain"]["restarts"]) == ("running", 1)
    assert [rank["state"] for rank in state["ranks"]] == ["live", "live"]
    assert all(rank["uptime_s"] > 0 for rank in state["ranks"])
    assert "2 of 2 ranks alive  restart 1 of 2  up " in fdl.call("status").stdout
    assert STEP in fdl.call("tail", "--rank", "1").stdout
    refused = fdl.call("drain", "localhost")
    assert (refused.returncode, "use fdl stop" in refused.stderr) == (2, True), refused.stderr

    stopped = fdl.call("stop", timeout_s=END_S)
    assert stopped.returncode == 0, stopped.stderr
    assert run.wait(END_S) == 143, run.story()
    assert all(int(words.with_suffix(f".{rank}").read_text()) > 0 for rank in range(2)), "each had its grace"
    run.wait_until_clean()


@pytest.mark.long
def test_rank_finds_what_torchrun_gives_it(fdl: Fdl) -> None:
    script = fdl.folder / "environment.py"
    script.write_text("import json, os\nprint('environment', json.dumps(dict(os.environ)))\n")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--max-restarts", 3, "--log-dir", "logs", "-r", 3)
    assert fdl.python(*torchrun, script).returncode == 0
    (log,) = fdl.folder.glob("logs/*/attempt_0/1/stdout.log")
    theirs = json.loads(log.read_text().removeprefix("environment "))

    run = plain(fdl, script, options=("--max-restarts", 3))
    assert run.wait() == 0, run.story()
    (ours,) = environments(run, 1)

    differing = {name for name in theirs if ours.get(name) != theirs[name]}
    assert differing == {
        "MASTER_ADDR",  # localhost
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",  # torchrun's word to itself
    }
    assert {name for name in ours if name.startswith("TORCH")} <= theirs.keys()


@pytest.mark.long
def test_frozen_rank_is_told_of_and_does_not_hold_up_a_stop(fdl: Fdl) -> None:
    run = training(fdl)
    pid = run.pid_of("rank1")

    run.kill("rank1", number=signal.SIGSTOP)
    run.wait_for_event("rank_frozen")

    assert f"kill -CONT {pid} lets it go on" in run.events("rank_frozen")[0]["detail"]
    status = fdl.call("status").stdout
    assert "2 of 2 ranks alive, 1 frozen" in status
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_to_the_launcher_stops_the_run(fdl: Fdl, number: signal.Signals, code: int) -> None:
    run = training(fdl)

    run.kill("launcher", number=number)

    assert run.wait(END_S) == code, run.story()
    run.wait_until_clean()


@pytest.mark.long
def test_script_with_a_trainer_is_told_to_leave_plain_out(fdl: Fdl) -> None:
    run = plain(fdl, JOB, ranks=1)

    assert run.wait() == 2, run.story()
    assert "leave --plain out" in run.stderr
    run.wait_until_clean()


# ----------------------------------------------------------------------------------------------------------- failures
@pytest.mark.long
def test_rank_that_fails_ends_the_others_and_gives_the_run_its_code(fdl: Fdl) -> None:
    run = plain(fdl, DDP, *LONG, "--fail-rank", 1)

    assert run.wait() == 7, run.story()
    assert "first failure: rank 1 on localhost (cpu:1): exited with code 7" in run.stderr
    assert "rank 1 is told to fail by exit:7" in run.stderr
    failure = outcome(run)["failure"]
    assert (failure["rank"], failure["kind"], failure["exit_code"]) == (1, "exit", 7)
    run.wait_until_clean()


@pytest.mark.long
def test_exception_of_a_rank_is_the_headline(fdl: Fdl) -> None:
    run = plain(fdl, DDP, *LONG, "--fail-rank", 1, "--fail-with", "raise")

    assert run.wait() == 1, run.story()
    assert "exited with code 1: RuntimeError: told to fail" in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_killed_rank_ends_the_run_with_its_signal(fdl: Fdl) -> None:
    run = training(fdl)

    run.kill("rank1")

    assert run.wait(END_S) == 137, run.story()
    assert "first failure: rank 1 on localhost (cpu:1): ended by signal 9" in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_killed_controller_leaves_no_rank(fdl: Fdl) -> None:
    run = training(fdl)

    run.kill("controller")

    assert run.wait(END_S) == 1, run.story()
    assert "has vanished without a word" in run.stderr
    assert "--resume" not in run.stderr, "the script's checkpoints are its own"
    run.wait_until_clean()


@pytest.mark.long
def test_killed_launcher_leaves_the_run_alone(fdl: Fdl) -> None:
    run = training(fdl)

    run.kill("launcher")

    assert run.wait(END_S) == -signal.SIGKILL
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert (run.wait_for_end()["status"], run.wait_for_end()["exit_code"]) == ("stopped", 143)
    run.wait_until_clean()


@pytest.mark.long
def test_killed_daemon_leaves_no_rank(fdl: Fdl) -> None:
    run = training(fdl)

    run.kill("daemon")

    assert run.wait(END_S) == 5, run.story()
    assert "host_lost" in run.stdout
    run.wait_until_clean()


# ----------------------------------------------------------------------------------------------------------- restarts
@pytest.mark.long
def test_restarted_ranks_go_on_from_the_scripts_own_checkpoint(fdl: Fdl) -> None:
    options = ("--max-restarts", 2)
    arguments = (
        "--checkpoint",
        fdl.folder / "model.pt",
        "--fail-rank",
        1,
        "--fail-starts",
        1,
        "--fail-with",
        "signal:9",
    )
    run = plain(fdl, DDP, *arguments, options=options)

    assert run.wait() == 0, run.story()
    assert len(re.findall("of 2 is done: all alike True", run.stdout)) == 2
    for rank in range(2):
        counts = [env["TORCHELASTIC_RESTART_COUNT"] for env in environments(run, rank)]
        assert counts == ["0", "1"]
        assert "goes on from step" in run.log(f"rank{rank}.stdout.log")
    assert [record["fields"]["restart"] for record in run.events("restarting")] == [1]
    assert [loss["rank"] for loss in outcome(run)["losses"]] == [1]
    run.wait_until_clean()


@pytest.mark.long
def test_rank_that_always_fails_ends_the_run_behind_its_restarts(fdl: Fdl) -> None:
    run = plain(fdl, DDP, *LONG, "--fail-rank", 0, options=("--max-restarts", 1))

    assert run.wait() == 7, run.story()
    assert "after 1 restart" in outcome(run)["message"]
    run.wait_until_clean()


@pytest.mark.long
def test_port_that_a_stranger_takes_costs_no_restart(fdl: Fdl) -> None:
    ready = fdl.folder / "ready"
    run = plain(fdl, DDP, "--wait-for", ready)
    run.wait_for_log("rank0.stdout.log", "port ")
    port = int(re.findall(r"port (\d+)", run.log("rank0.stdout.log"))[0])

    with closing(socket.create_server(("", port))):
        ready.touch()
        run.wait_for_event("port_taken")

    assert run.wait() == 0, run.story()
    counts = [env["TORCHELASTIC_RESTART_COUNT"] for env in environments(run, 0)]
    assert counts == ["0", "0"]
    run.wait_until_clean()
