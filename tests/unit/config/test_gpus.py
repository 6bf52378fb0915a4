"""GPUs by nvidia-smi, whatever it does (B25), and CUDA_VISIBLE_DEVICES in every form (B24)."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flodl.config import gpus as gpus_module
from flodl.config.gpus import (
    GpuInfo,
    GpuProbe,
    VisibleDevicesError,
    amd_sign,
    detect_gpus,
    explanation,
    parse_query,
    probe_gpus,
    select_visible,
    with_mig_ids,
)

TWO_LINES = "0, GPU-8932f937-d72c, NVIDIA H200, 9.0, 143771\n1, GPU-89aa0000-0000, NVIDIA H200, 9.0, 143771"
FIRST = GpuInfo(0, "GPU-8932f937-d72c", "NVIDIA H200", (9, 0), 143771 << 20)
SECOND = GpuInfo(1, "GPU-89aa0000-0000", "NVIDIA H200", (9, 0), 143771 << 20)
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-8932f937-d72c)
  MIG 1g.18gb     Device  0: (UUID: MIG-aaaa-1)
  MIG 1g.18gb     Device  1: (UUID: MIG-bbbb-2)
GPU 1: NVIDIA H200 (UUID: GPU-89aa0000-0000)
some other line
"""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    return tmp_path


def env_with(bench: Path, script: str, **variables: str) -> dict[str, str]:
    program = bench / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{bench}:/usr/bin:/bin", **variables}


def printing(lines: str) -> str:
    return f"cat <<'END'\n{lines}\nEND"


# ------------------------------------------------------------------------------------------------ CUDA_VISIBLE_DEVICES
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [FIRST, SECOND]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("void", []),
        ("-2,0", []),
        (",0", []),
        ("0,1,", [FIRST, SECOND]),
        ("1,-1", [SECOND]),
        ("0,-1,1", [FIRST]),
        ("1,,0", [SECOND]),
        ("0,NoDevFiles,1", [FIRST]),
        ("GPU-8932,void", [FIRST]),
        ("00", [FIRST]),
        ("01,000", [SECOND, FIRST]),
        ("1", [SECOND]),
        ("1,0", [SECOND, FIRST]),
        ("0, 1", [FIRST, SECOND]),
        ("GPU-89aa0000-0000,GPU-8932f937-d72c", [SECOND, FIRST]),
        ("GPU-8932", [FIRST]),
        ("gpu-8932", None),
        ("GPU-8932F937", [FIRST]),
    ],
)
def test_visible_devices_keep_their_order(value: str | None, expected: list[GpuInfo] | None) -> None:
    if expected is None:
        with pytest.raises(VisibleDevicesError):
            select_visible([FIRST, SECOND], value, "node-a")
    else:
        assert select_visible([FIRST, SECOND], value, "node-a") == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("7", "there is no '7' here; known: 0, 1"),
        ("0,7,1", "there is no '7' here"),
        ("0,0", "already in the list"),
        ("GPU-8932,GPU-8932f937", "already in the list"),
        ("GPU-89", "fits more than one"),
        ("GPU-ffff", "known: GPU-8932f937-d72c, GPU-89aa0000-0000"),
        ("0,GPU-8932", "mixes forms: index, GPU-…"),
        ("GPU-8932,MIG-1", "mixes forms"),
        ("MIG-1", "there is no 'MIG-1' here; known: none"),
        ("MIG-GPU-ffff/1/0", "there is no 'MIG-GPU-ffff/1/0' here"),
        ("0,7,", "there is no '7' here"),
        ("cuda:0", "'cuda:0' is no index"),
        ("02", "there is no '02' here"),
        ("1e0", "'1e0' is no index"),
        ("-x", "'-x' is no index"),
        ("GPU-", "'GPU-' is no index"),
    ],
)
def test_unusable_visible_devices_name_host_and_value(value: str, words: str) -> None:
    with pytest.raises(VisibleDevicesError) as caught:
        select_visible([FIRST, SECOND], value, "node-a")

    assert str(caught.value).startswith(f"host node-a: CUDA_VISIBLE_DEVICES={value!r}: ")
    assert words in str(caught.value)
    assert (caught.value.host, caught.value.value, caught.value.exit_code) == ("node-a", value, 2)


def test_mig_slices_are_picked_by_their_own_id() -> None:
    gpus = with_mig_ids([FIRST, SECOND], LISTING)

    (chosen,) = select_visible(gpus, "MIG-bbbb", "node-a")

    assert (chosen.index, chosen.uuid, chosen.vram_bytes, chosen.mig_ids) == (0, "MIG-bbbb-2", None, ())
    assert [gpu.mig_ids for gpu in gpus] == [("MIG-aaaa-1", "MIG-bbbb-2"), ()]


def test_old_form_of_a_mig_id_is_kept_verbatim() -> None:
    (chosen,) = select_visible([FIRST, SECOND], "MIG-GPU-8932f937-d72c/1/0", "node-a")

    assert (chosen.index, chosen.uuid) == (0, "MIG-GPU-8932f937-d72c/1/0")


def test_ids_are_not_found_where_nvidia_smi_knows_none() -> None:
    nameless = GpuInfo(0, None, None, None, None)

    assert with_mig_ids([nameless], LISTING) == [nameless]
    for value in ("GPU-8", "MIG-GPU-8/1/0"):
        with pytest.raises(VisibleDevicesError, match="known: none"):
            select_visible([nameless], value, "node-a")


# ---------------------------------------------------------------------------------------------------------- answers
def test_answer_is_read() -> None:
    assert parse_query(TWO_LINES) == [FIRST, SECOND]


@pytest.mark.parametrize("word", ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", ""])
def test_unknown_fields_become_none(word: str) -> None:
    lines = f"0, GPU-aa, {word}, {word}, {word}\n{word}, {word}, {word}, {word}, {word}"

    assert parse_query(lines) == [GpuInfo(0, "GPU-aa", None, None, None), GpuInfo(1, None, None, None, None)]


@pytest.mark.parametrize(
    "noise",
    ["WARNING: infoROM is corrupted", "Warnung: etwas, das, fünf, Kommas, hat, ja", "", "警告: 驱动,版本,不,匹配,了"],
)
def test_warning_lines_are_passed_over(noise: str) -> None:
    assert parse_query(f"{noise}\n{TWO_LINES}\n{noise}") == [FIRST, SECOND]


def test_comma_in_a_name_is_part_of_it() -> None:
    assert parse_query("0, GPU-aa, Card, rev 2, 8.6, 10")[0].name == "Card, rev 2"


# ---------------------------------------------------------------------------------------------------------- the call
def test_gpus_are_detected_in_the_order_of_the_variable(bench: Path) -> None:
    env = env_with(bench, printing(TWO_LINES), CUDA_VISIBLE_DEVICES="1,0")

    assert detect_gpus(env) == [SECOND, FIRST]


def test_own_environment_is_the_default(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", env_with(bench, printing(TWO_LINES))["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert detect_gpus() == [FIRST, SECOND]


def test_call_asks_for_a_neutral_language(bench: Path) -> None:
    env = env_with(bench, f'test "$LC_ALL" = C && {printing(TWO_LINES)}', LC_ALL="de_DE.UTF-8")

    assert len(detect_gpus(env)) == 2


def test_mig_ids_are_asked_for_when_named(bench: Path) -> None:
    script = f'if [ "$1" = -L ]; then\n{printing(LISTING)}\nelse\n{printing(TWO_LINES)}\nfi'

    (chosen,) = detect_gpus(env_with(bench, script, CUDA_VISIBLE_DEVICES="MIG-aaaa-1"))

    assert chosen.uuid == "MIG-aaaa-1"


def test_hidden_gpus_are_not_asked_for(bench: Path) -> None:
    env = env_with(bench, f"touch {bench}/asked", CUDA_VISIBLE_DEVICES="")

    assert "hides every GPU" in probe_gpus(env).reason
    assert not probe_gpus(env).is_surprising
    assert not (bench / "asked").exists()


def test_out_of_range_device_raises_with_this_host(bench: Path) -> None:
    with pytest.raises(VisibleDevicesError, match="there is no '7' here"):
        detect_gpus(env_with(bench, printing(TWO_LINES), CUDA_VISIBLE_DEVICES="7"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo NVIDIA-SMI has failed because; exit 9", "nvidia-smi exited with 9: NVIDIA-SMI has failed because"),
        ("exit 9", "nvidia-smi exited with 9: it printed nothing"),
        ("echo No devices were found", "nvidia-smi lists no GPU: No devices were found"),
        ("printf '\\377\\376\\033[2J'", "nvidia-smi lists no GPU: \ufffd\ufffd?[2J"),
        ("kill -SEGV $$", "nvidia-smi exited with -11"),
    ],
)
def test_failing_nvidia_smi_means_no_gpu_and_a_reason(bench: Path, script: str, reason: str) -> None:
    probe = probe_gpus(env_with(bench, script, CUDA_VISIBLE_DEVICES="0"))

    assert probe.gpus == ()
    assert probe.reason.startswith(reason)
    assert probe.is_surprising


def test_driver_that_does_not_know_a_field_is_asked_without_it(bench: Path) -> None:
    refusal = 'Field "compute_cap" is not a valid field to query.'
    script = f"case $1 in *compute_cap*) echo '{refusal}'; exit 2;; esac\n"

    (gpu,) = detect_gpus(env_with(bench, script + printing("0, GPU-aa, Tesla K80, P0, 11441")))

    assert gpu == GpuInfo(0, "GPU-aa", "Tesla K80", None, 11441 << 20)


@pytest.mark.parametrize(
    ("reason", "has_driver", "amd", "words"),
    [
        ("nvidia-smi is not on PATH", False, "", ""),
        ("nvidia-smi is not on PATH", False, "/dev/kfd", "its GPU is AMD's (/dev/kfd)"),
        ("nvidia-smi is not on PATH", True, "/dev/kfd", "its GPU is AMD's (/dev/kfd)"),
        ("nvidia-smi is not on PATH", True, "", "docker run --gpus all"),
        ("nvidia-smi exited with 9: x", False, "", "the NVIDIA driver is not loaded"),
        ("nvidia-smi exited with 9: x", True, "/dev/kfd", "wants a reboot"),
        ("nvidia-smi lists no GPU: x", True, "", "shows no GPU"),
    ],
)
def test_machine_without_a_usable_gpu_is_explained(reason: str, has_driver: bool, amd: str, words: str) -> None:
    assert words in explanation(reason, has_driver, amd)
    assert bool(explanation(reason, has_driver, amd)) == bool(words)


def test_amd_gpu_is_told_by_its_device_or_its_program(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "AMD_FILE", str(bench / "kfd"))
    assert amd_sign(str(bench)) == ""
    (bench / "rocm-smi").write_text("")
    (bench / "rocm-smi").chmod(0o755)
    assert amd_sign(str(bench)) == str(bench / "rocm-smi")
    assert "its GPU is AMD's" in probe_gpus({"PATH": str(bench)}).reason
    (bench / "kfd").write_text("")
    assert amd_sign(str(bench)) == str(bench / "kfd")


def test_absent_nvidia_smi_means_no_gpu(bench: Path) -> None:
    assert probe_gpus({"PATH": str(bench)}) == GpuProbe((), "nvidia-smi is not on PATH")
    assert detect_gpus({"PATH": str(bench), "CUDA_VISIBLE_DEVICES": "0"}) == []


def test_nvidia_smi_that_cannot_be_run_means_no_gpu(bench: Path) -> None:
    env = env_with(bench, "")
    (bench / "nvidia-smi").write_bytes(b"\x00\x01")

    assert probe_gpus(env).reason.startswith("nvidia-smi cannot be run")


@pytest.mark.parametrize("prologue", ["", "trap '' TERM;"])
def test_hanging_nvidia_smi_is_ended_with_all_it_started(
    bench: Path, prologue: str, wait_until: Callable[..., object]
) -> None:
    script = f"{prologue} echo $$ > {bench}/leader; sleep 60 & echo $! > {bench}/child; while :; do sleep 60; done"
    started_s = time.monotonic()

    probe = probe_gpus(env_with(bench, script), timeout_s=1.0)

    assert probe.reason.startswith("nvidia-smi did not answer in time and was ended")
    assert time.monotonic() - started_s < 10
    for name in ("leader", "child"):
        pid = int((bench / name).read_text())
        wait_until(lambda: not is_running(pid), 5.0, f"the end of the {name}")  # noqa: B023  # called at once


def is_running(pid: int) -> bool:
    """A killed orphan may stay a zombie where nobody reaps; it runs no more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_process_that_even_sigkill_cannot_end_is_left_behind(monkeypatch: pytest.MonkeyPatch, bench: Path) -> None:
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    env = env_with(bench, "exec sleep 3")
    started_s = time.monotonic()

    assert "did not answer" in probe_gpus(env, timeout_s=0.2).reason
    assert time.monotonic() - started_s < 3


def test_at_most_one_query_runs_at_a_time(bench: Path) -> None:
    with gpus_module._one_query:
        probe = probe_gpus(env_with(bench, printing(TWO_LINES)), timeout_s=0.05)

    assert probe.reason == "an earlier nvidia-smi query is still running"
