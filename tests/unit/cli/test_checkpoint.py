"""fdl checkpoint: what it prints, with which code it ends, and that nothing of it loads torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import Position, ResumePoint, SaveReason
from flodl.messages import CadenceSettings, Mode, Settings
from flodl_cli.commands.cmd_checkpoint import size_text
from flodl_cli.main import main

SETTINGS = Settings(40, 5, num_epochs=10, seed=0, cadence=CadenceSettings(mode=Mode.CPU_ASYNC))
NOTE = {
    "format": 1,
    "state_dict": {"w": "w", "tied": "w"},
    "parameters": ["w"],
    "whole": {"optimizer": {}, "outer": {"class": None}},
}


def tensor_bytes(names: tuple[str, ...]) -> bytes:
    entries = {
        name: {"dtype": "F32", "shape": [250], "data_offsets": [1000 * place, 1000 * place + 1000]}
        for place, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"flodl": json.dumps(NOTE)}} | entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(1000 * len(names))


@pytest.fixture
def stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint after 3 of 10 epochs."""
    monkeypatch.chdir(tmp_path)
    save(Path("run43"), Position(41, epoch=3, global_step=12345, world_size=3), {"torch": "2.13.0", "evil": "\x1b[2J"})
    return Path("run43")


def save(path: Path, position: Position, versions: dict[str, str]) -> None:
    with BundleWriter(Stem.of(path)) as bundle:
        with bundle.part(".fdl") as part:
            part.write(tensor_bytes(("w", "optim/0/exp_avg")))
        bundle.commit(SaveReason.SINGLE_SURVIVOR, ResumePoint(position, None, SETTINGS), versions)


def fdl(*args: str) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *args])
    return caught.value.code


def test_show_says_what_is_in_it(stem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fdl("show", "run43") == 0

    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["checkpoint"] == "run43"
    assert lines["saved"].endswith("reason SingleSurvivor")
    assert lines["progress"] == "epoch 4/10, 0 samples of it merged, 30% of the run"
    assert lines["consensus"] == "version 41, 12,345 steps of all ranks"
    assert lines["ranks"] == "3 in cpu_async"
    assert lines["cadence"] == "starts afresh"
    assert lines["model"] == "250 parameters, 1 tensors"
    assert lines["holds"] == "model, optimizer"
    assert lines["file"].startswith("run43.fdl, 2.")
    assert lines["versions"] == r"torch 2.13.0, evil \x1b[2J"


def test_show_of_a_finished_run_says_so(stem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(stem, Position(99, epoch=10), {})
    assert fdl("show", "run43.fdl") == 0
    assert "all 10 epochs complete" in capsys.readouterr().out


def test_show_as_json_is_one_document(stem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fdl("show", "--json", "run43.meta.json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["reason"], found["epoch"], found["epochs"], found["cadence"]) == ("SingleSurvivor", 3, 10, None)


def test_verify_says_ok(stem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fdl("verify", "run43") == 0
    assert capsys.readouterr().out.startswith("run43: OK, 2 tensors in 2.")


def test_verify_names_what_is_wrong_and_ends_with_6(stem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(Path("run43.fdl").read_bytes())
    content[-1] = 1
    Path("run43.fdl").write_bytes(content)

    assert fdl("verify", "run43") == 6

    captured = capsys.readouterr()
    assert "fdl: run43.fdl is damaged: its SHA-256 is" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", ["show", "verify", "export"])
def test_checkpoint_that_is_not_there_names_the_one_that_is(
    stem: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert fdl(name, "run42") == 6
    assert "there is no checkpoint run42" in (said := capsys.readouterr().err)
    assert "there is run43" in said


def test_export_writes_beside_the_checkpoint_and_replaces_on_demand(
    stem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fdl("export", "run43") == 0
    assert capsys.readouterr().out.startswith("run43.safetensors: 2 tensors, 2.")
    assert fdl("export", "run43", "run43.safetensors") == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert fdl("export", "run43", "--force") == 0


def test_nothing_of_it_loads_torch(stem: Path) -> None:
    code = (
        "import sys\nfrom flodl_cli.main import cli\n"
        "for name in ('show', 'verify', 'export'):\n"
        "    cli.main(['checkpoint', name, 'run43'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(root)}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1234, "1.2 kB"), (5 * 10**9, "5.0 GB")]
)
def test_sizes_are_for_people(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
