"""What goes into a bundle for a bug report, and what never does."""

import base64
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import ConfigError
from flodl.launch import debug_bundle, rundir
from flodl.launch.debug_bundle import REDACTED, forms_of, redacted, write_bundle
from flodl.launch.rundir import RunDir
from flodl.wire.handshake import derive_host_secret, derive_join_secret, derive_read_token

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    made = rundir.create("20260101-000000-aaaa")
    asked = {
        "name": "train",
        "cwd": str(tmp_path),
        "cluster_file": "c.yml",
        "script": ["train.py", "--lr", "0.1", "--api-key", "hush", "--password=hush", "--token"],
        "env": {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "hush"},
        "hosts": [{"name": "node-a", "script": ["train.py", "--secret", "hush"], "env": {"HF_TOKEN": "hush"}}, 7],
    }
    made.write("run.json", json.dumps(asked))
    (tmp_path / "c.yml").write_text(
        "cluster:\n  controller: {host: 127.0.0.1}\n  workers: [{host: node-a, env: {HF_TOKEN: hush}}]\n"
        "  env: {NCCL_DEBUG: INFO, WANDB_API_KEY: hush}\n"
    )
    made.write("outcome.json", '{"status": "failed"}')
    (made.path / "events.jsonl").write_text('{"event": "first"}\n{"event": "second"}\n')
    (made.logs / "controller.log").write_text("line one\nline two\n")
    return made


def contents(path: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            assert member.mode == 0o600
            found[member.name.partition("/")[2]] = file.read()
    return found


def read(path: Path, name: str) -> Any:
    return json.loads(contents(path)[name])


def test_bundle_holds_what_was_asked_what_happened_and_versions(run: RunDir, tmp_path: Path) -> None:
    done = write_bundle(run, tmp_path / "b.tar.gz", 1, {"gpus.json": {"gpus": []}})
    assert stat.S_IMODE(done.path.stat().st_mode) == 0o600
    assert done.names == (
        "versions.json", "run.json", "cluster.json", "outcome.json", "gpus.json", "events.jsonl",
        "logs/controller.log",
    )  # fmt: skip
    found = contents(done.path)
    assert found["events.jsonl"] == b'{"event": "second"}\n'
    assert found["logs/controller.log"] == b"line two\n"
    assert read(done.path, "contents.json") == {"files": list(done.names), "left_out": []}
    assert read(done.path, "versions.json")["packages"]["click"]


def test_values_that_may_be_secrets_are_left_out_and_the_others_are_not(run: RunDir, tmp_path: Path) -> None:
    path = write_bundle(run, tmp_path / "b.tar.gz", 10).path
    assert b"hush" not in b"".join(contents(path).values())
    asked = read(path, "run.json")
    assert asked["script"] == ["train.py", "--lr", "0.1", "--api-key", REDACTED, f"--password={REDACTED}", "--token"]
    assert asked["env"] == {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": REDACTED}
    assert asked["hosts"][0]["env"] == {"HF_TOKEN": REDACTED}
    values = {row["key"]: row["value"] for row in read(path, "cluster.json")["values"]}
    assert values["env.NCCL_DEBUG"] == "INFO"
    assert values["workers[0].env.HF_TOKEN"] == REDACTED


@pytest.mark.parametrize("form", range(7))
def test_secrets_of_the_run_are_blotted_out_wherever_they_stand(run: RunDir, tmp_path: Path, form: int) -> None:
    token = run.read_token()
    secrets = [token, derive_host_secret(token, "node-a"), bytes.fromhex(derive_read_token(token))]
    planted = b"\n".join(forms_of(secret)[form % len(forms_of(secret))] for secret in secrets)
    (run.logs / "rank0.stderr.log").write_bytes(b"before " + planted + b" after\n")
    log = contents(write_bundle(run, tmp_path / "b.tar.gz", 100).path)["logs/rank0.stderr.log"]
    for secret in secrets:
        assert not any(each in log for each in forms_of(secret))
    assert log.count(REDACTED.encode()) >= len(secrets)


def test_join_token_of_walk_ins_is_blotted_out_too(run: RunDir, tmp_path: Path) -> None:
    token = bytes(range(32))
    rundir.write_token_file(tmp_path / "join.token", token)
    asked = json.loads(run.run_json.read_text())
    run.write("run.json", json.dumps({**asked, "join": {"token_file": str(tmp_path / "join.token")}}))
    secrets = [token, derive_join_secret(token, "node-a")]
    (run.logs / "head.stdout.log").write_text("".join(f"{secret.hex()}\n" for secret in secrets))
    log = contents(write_bundle(run, tmp_path / "b.tar.gz", 100).path)["logs/head.stdout.log"]
    assert log == b"<redacted>\n<redacted>\n"


@pytest.mark.parametrize("before", [b"", b"x", b"xy"])
def test_secret_within_longer_base64_is_found(run: RunDir, tmp_path: Path, before: bytes) -> None:
    token = run.read_token()
    (run.logs / "head.stdout.log").write_bytes(base64.b64encode(before + token + b"tail"))
    log = contents(write_bundle(run, tmp_path / "b.tar.gz", 100).path)["logs/head.stdout.log"]
    assert REDACTED.encode() in log


def test_private_key_in_a_log_is_blotted_out_even_when_its_end_is_missing(run: RunDir, tmp_path: Path) -> None:
    (run.logs / "rank0.stdout.log").write_text(f"a\n{KEY}\nz\n")
    (run.logs / "rank1.stdout.log").write_text(KEY[:70])
    found = contents(write_bundle(run, tmp_path / "b.tar.gz", 100).path)
    assert found["logs/rank0.stdout.log"] == b"a\n<redacted>\nz\n"
    assert b"b3Blbn" not in found["logs/rank1.stdout.log"]


def test_pipe_among_the_logs_is_left_out(run: RunDir, tmp_path: Path) -> None:
    os.mkfifo(run.logs / "rank7.stderr.log")
    assert "logs/rank7.stderr.log" not in contents(write_bundle(run, tmp_path / "b.tar.gz", 10).path)


def test_existing_file_is_not_replaced_and_a_folder_that_is_not_there_is_named(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "b.tar.gz"
    target.write_text("mine")
    with pytest.raises(ConfigError, match="exists already; -o names another file"):
        write_bundle(run, target, 10)
    assert target.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        write_bundle(run, link, 10)
    with pytest.raises(ConfigError, match="No such file or directory"):
        write_bundle(run, tmp_path / "gone" / "b.tar.gz", 10)


def test_what_finds_no_room_is_named_and_flodls_own_words_come_first(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_bundle, "TOTAL_BYTES", 20_000)
    for name in ("rank0.stdout", "rank0.stderr", "daemon-node-a"):
        (run.logs / f"{name}.log").write_text("x" * 5999 + "\n")
    done = write_bundle(run, tmp_path / "b.tar.gz", 9999)
    assert done.names[-3:] == ("logs/controller.log", "logs/daemon-node-a.log", "logs/rank0.stderr.log")
    assert done.left_out == ("logs/rank0.stdout.log",)
    assert read(done.path, "contents.json")["left_out"] == ["logs/rank0.stdout.log"]


def test_damaged_run_gives_what_is_left_of_it(run: RunDir, tmp_path: Path) -> None:
    run.token_path.unlink()
    (run.path / "run.json").write_text("{")
    done = write_bundle(run, tmp_path / "b.tar.gz", 10)
    assert done.names == ("versions.json", "outcome.json", "events.jsonl", "logs/controller.log")


def test_cluster_file_that_cannot_be_read_any_more_says_why(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text("clusters: 1\n")
    error = read(write_bundle(run, tmp_path / "b.tar.gz", 10).path, "cluster.json")["error"]
    assert "clusters" in error


def test_run_that_was_asked_for_in_another_shape_keeps_nothing_of_its_environment() -> None:
    assert redacted({"env": ["TOKEN=x"], "script": None}) == {"env": REDACTED, "script": None}
