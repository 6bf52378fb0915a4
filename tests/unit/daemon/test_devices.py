"""Devices as a cluster file names them, on a machine whose nvidia-smi is a script."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flodl.errors import ConfigError
from flodl.launch.devices import offered
from flodl.messages import Device
from flodl_daemon.devices import rank_environment

TWO = "0, GPU-aaaa1111, Big, 9.0, 100\\n1, GPU-aabb2222, Small, 8.0, 50\\n"
FIRST = Device("cuda", 0, "GPU-aaaa1111", "Big")
SECOND = Device("cuda", 1, "GPU-aabb2222", "Small")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["all"], (FIRST, SECOND)),
        (["1", "0"], (SECOND, FIRST)),
        (["GPU-aabb2222"], (SECOND,)),
        (["GPU-aabb"], (SECOND,)),
        (["cpu", "1", "cpu"], (Device("cpu", 0), SECOND, Device("cpu", 1))),
        (["cpu", "cpu"], (Device("cpu", 0), Device("cpu", 1))),
    ],
)
def test_words_become_devices_in_their_order(
    smi: Callable[[str], None], words: list[str], devices: tuple[Device, ...]
) -> None:
    smi(f"printf '{TWO}'")
    assert offered(words, "node-a") == devices


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["2"], "no GPU 2"),
        (["GPU-aa"], "several GPUs begin with GPU-aa"),
        (["GPU-"], "no GPU GPU-"),
        (["0", "GPU-aaaa1111"], "in the list twice"),
        (["all", "cpu"], "no GPU all"),
        (["MIG-1"], "no GPU MIG-1"),
    ],
)
def test_a_gpu_that_cannot_be_meant_is_refused_by_name(
    smi: Callable[[str], None], words: list[str], reason: str
) -> None:
    smi(f"printf '{TWO}'")
    with pytest.raises(ConfigError, match=reason) as refused:
        offered(words, "node-a")
    assert "node-a" in str(refused.value)


def test_the_refusal_says_why_there_is_no_gpu(smi: Callable[[str], None]) -> None:
    smi("echo 'driver not loaded' >&2; exit 9")
    with pytest.raises(ConfigError, match=r"none \(.*9"):
        offered(["0"], "node-a")


def test_all_without_a_gpu_is_one_cpu_rank_and_a_warning(
    smi: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    smi("exit 9")
    assert offered(["all"], "node-a") == (Device("cpu", 0),)
    assert "one CPU rank instead" in caplog.text


def test_a_rank_sees_its_device_and_no_other() -> None:
    env = rank_environment(SECOND, 2, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-aabb2222"}
    assert rank_environment(Device("cpu", 0), 1, {})["CUDA_VISIBLE_DEVICES"] == ""


def test_cpu_ranks_share_the_cores_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl_daemon.devices.os.sched_getaffinity", lambda _: set(range(8)))
    assert rank_environment(Device("cpu", 0), 3, {})["OMP_NUM_THREADS"] == "2"
    assert rank_environment(Device("cpu", 0), 99, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in rank_environment(Device("cpu", 0), 3, {"OMP_NUM_THREADS": "5"})
