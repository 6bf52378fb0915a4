"""GPUs by what nvidia-smi and torch say: which are used, and whether they can be trained on (B24, B25)."""

from typing import Any

import pytest

from flodl.launch.probe.facts import TorchBuild, TorchImport
from flodl.launch.probe.finding import Finding, Level
from flodl.launch.probe.judge_gpus import covers
from tests.unit.launch.probe.describing import SLICES, facts, host, judged, of, smi, wrong

WARN, ERROR = Level.WARN, Level.ERROR
CPU_BUILD = TorchBuild("2.13.0+cpu", "", "")


def gpus(*devices: str, **changes: Any) -> list[Finding]:
    return judged(host(devices=devices or ("all",)), **changes)


def test_all_gpus_are_green_when_nothing_is_wrong() -> None:
    found = gpus()
    assert wrong(found) == {}
    assert of(found, "devices").read == "1 × H200, 1 × A100"
    assert of(found, "driver").read == "550.54.15, CUDA 12.4, NCCL 2.21.5"
    assert of(found, "arch").read == "sm_80, sm_90"
    assert of(found, "busy").read == "idle"


def test_cpu_ranks_ask_for_no_gpu() -> None:
    found = judged(host(devices=("cpu", "cpu")), smi=None, torch_import=None, torch=CPU_BUILD)
    assert wrong(found) == {}
    assert of(found, "devices").read == "2 × cpu"


@pytest.mark.parametrize(
    ("devices", "visible", "read"),
    [
        (("7",), None, "no GPU 7; nvidia-smi shows: 0 (GPU-aaaa1111), 1 (GPU-bbbb2222)"),
        (("0", "GPU-aaaa"), None, "GPU GPU-aaaa is in the list twice"),
        (("GPU-",), None, "no GPU GPU-"),
        (("0",), "", "no GPU 0; nvidia-smi shows: none (CUDA_VISIBLE_DEVICES='' hides every GPU)"),
        (("all",), "0,9", "CUDA_VISIBLE_DEVICES='0,9': there is no '9' here; known: 0, 1"),
        (("all",), "0,GPU-bbbb", "mixes forms"),
        (("1",), "0", "no GPU 1; nvidia-smi shows: 0 (GPU-aaaa1111)"),
    ],
)
def test_devices_that_are_not_there_are_an_error(devices: tuple[str, ...], visible: str | None, read: str) -> None:
    finding = of(gpus(*devices, visible=visible), "devices")
    assert finding.level is ERROR
    assert read in finding.read
    assert "local_devices" in finding.remedy


@pytest.mark.parametrize(
    ("visible", "read"),
    [
        ("1", "1 × A100"),
        (" GPU-bbbb , GPU-aaaa ", "1 × A100, 1 × H200"),
        ("1,0", "1 × A100, 1 × H200"),
    ],
)
def test_visible_devices_there_are_honoured(visible: str, read: str) -> None:
    assert of(gpus(visible=visible), "devices").read == read


def test_slices_are_used_where_they_are_named_and_whole_gpus_that_are_cut_are_a_warning() -> None:
    answer = smi(listing=SLICES)
    assert of(gpus(visible="MIG-cccc", smi=answer), "devices").read == "1 × H200"
    finding = of(gpus(smi=answer), "devices")
    assert (finding.level, finding.read) == (WARN, "cut into MIG slices: GPU 0 (1 slices)")
    assert "MIG-…" in finding.remedy
    assert wrong(gpus("1", smi=answer)) == {}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"amd": "/dev/kfd", "driver": "", "smi": smi(query="", reason="not there")}, "its GPU is AMD's (/dev/kfd)"),
        (
            {"smi": smi(query="", reason="nvidia-smi is not on PATH")},
            "the NVIDIA driver is loaded, its programs are not there",
        ),
        ({"smi": smi(query="", reason="nvidia-smi: exit code 18: Failed to initialize NVML")}, "wants a reboot"),
        ({"smi": smi(query="", reason="nvidia-smi: exit code 9: no driver"), "driver": ""}, "install or load it"),
        (
            {"smi": smi(query="", reason="nvidia-smi: no answer within 10 s: "), "driver": ""},
            "the NVIDIA driver is not loaded",
        ),
        ({"smi": smi(query="", reason="nvidia-smi is not on PATH"), "driver": ""}, "its torch is built for CUDA"),
        ({"smi": smi(query="No devices were found\n"), "driver": "", "torch": CPU_BUILD}, "driver is not loaded"),
        ({"visible": "-1", "torch": CPU_BUILD}, ""),
    ],
)
def test_all_without_a_gpu_says_why_in_words(changes: dict[str, Any], remedy: str) -> None:
    finding = of(gpus(**changes), "devices")
    assert finding.level is (WARN if remedy else Level.OK)
    assert remedy in finding.remedy
    assert "cpu" in finding.read.lower()


def test_named_gpu_that_is_amds_is_an_error_that_explains_itself() -> None:
    finding = of(gpus("0", amd="/dev/kfd", smi=smi(query="", reason="nvidia-smi is not on PATH")), "devices")
    assert finding.level is ERROR
    assert "flodl trains on NVIDIA's GPUs and on CPUs" in finding.remedy


@pytest.mark.parametrize(
    ("build", "words"),
    [(CPU_BUILD, "built for CPUs only"), (TorchBuild("2.13.0+rocm6.2", "", "6.2"), "AMD's GPUs (ROCm 6.2)")],
)
def test_torch_without_cuda_on_a_gpu_box_is_an_error(build: TorchBuild, words: str) -> None:
    found = gpus(torch=build, torch_import=None)
    finding = of(found, "torch", ERROR)
    assert words in finding.read
    assert "install torch for CUDA" in finding.remedy


@pytest.mark.parametrize(
    ("driver", "cuda", "is_old"),
    [
        ("525.60.13", "12.4", False),
        ("525.59.13", "12.4", True),
        ("470.199.02", "11.8", False),
        ("470.199.02", "12.1", True),
        ("550.54.15", "13.0", True),
        ("[N/A]", "12.4", False),
        ("550.54.15", "14.0", False),
    ],
)
def test_driver_that_is_too_old_for_this_torch_is_a_warning_for_another_library_may_make_up_for_it(
    driver: str, cuda: str, is_old: bool
) -> None:
    answer = smi(use=f"GPU-aaaa1111, 0, {driver}\n")
    found = gpus(smi=answer, torch=TorchBuild("2.13.0", cuda, ""))
    assert of(found, "driver").level is (WARN if is_old else Level.OK)
    assert ("a newer NVIDIA driver" in of(found, "driver").remedy) == is_old
    assert ("cuda-compat" in of(found, "driver").remedy) == is_old


# ---------------------------------------------------------------------------------------------------------------- arch
@pytest.mark.parametrize(
    ("arches", "capability", "is_covered"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 6), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_90",), (8, 6), False),
        (("sm_90a",), (9, 0), True),
        (("compute_90a",), (10, 0), False),
        (("sm_100f",), (10, 3), True),
        (("sm_120",), (12, 0), True),
        (("sm_120",), (12, 1), True),
        (("gfx90a", "nonsense"), (9, 0), False),
        ((), (9, 0), False),
    ],
)
def test_code_runs_on_its_own_major_version_and_intermediate_code_on_newer_ones(
    arches: tuple[str, ...], capability: tuple[int, int], is_covered: bool
) -> None:
    assert covers(arches, capability) == is_covered


def test_gpu_without_code_in_this_torch_is_an_error_that_names_it() -> None:
    found = gpus(torch_import=TorchImport("", ("sm_90", "compute_90"), ""))
    finding = of(found, "arch")
    assert finding.level is ERROR
    assert finding.read == "this torch has no code for GPU 1 (NVIDIA A100, sm_80)"
    assert finding.expected == "sm_90 compute_90"


def test_gpu_that_nobody_trains_on_needs_no_code() -> None:
    assert wrong(gpus("0", torch_import=TorchImport("", ("sm_90",), ""))) == {}


def test_gpu_that_does_not_say_its_capability_is_not_judged() -> None:
    query = "0, GPU-aaaa1111, NVIDIA H200, [N/A], [N/A]\n"
    found = gpus(smi=smi(query=query))
    assert wrong(found) == {}
    assert of(found, "arch").read == "unknown"


def test_torch_that_does_not_import_is_an_error_and_a_slow_one_a_warning() -> None:
    broken = of(gpus(torch_import=TorchImport("OSError: libcudart.so.12: cannot open", (), "")), "torch", ERROR)
    assert "libcudart.so.12" in broken.read
    assert "-c 'import torch'" in broken.remedy
    slow = gpus(torch_import=TorchImport("no answer within 60 s", (), ""))
    assert wrong(slow) == {"torch": WARN}


def test_torch_that_says_nothing_of_its_code_is_not_judged() -> None:
    assert "arch" not in {each.check for each in gpus(torch_import=TorchImport("", (), ""))}
    assert "arch" not in {each.check for each in gpus(torch_import=None)}


# ---------------------------------------------------------------------------------------------------------------- busy
def test_gpu_with_somebody_elses_work_is_a_warning_with_its_figures() -> None:
    answer = smi(use="GPU-aaaa1111, 9000, 550.1\nGPU-bbbb2222, 499, 550.1\n", apps="GPU-aaaa1111, 4711, 8900\n")
    finding = of(gpus(smi=answer), "busy")
    assert (finding.level, finding.read) == (WARN, "GPU 0: 9000 of 143771 MiB in use by pid 4711")


def test_memory_that_no_visible_process_holds_counts_too() -> None:
    answer = smi(use="GPU-aaaa1111, 0, 550.1\nGPU-bbbb2222, 600, 550.1\n")
    assert of(gpus(smi=answer), "busy").read == "GPU 1: 600 of 81920 MiB in use"


@pytest.mark.parametrize(("use", "level"), [("0", Level.OK), ("63", Level.OK), ("[N/A]", Level.OK), ("64", WARN)])
def test_process_that_takes_next_to_nothing_is_no_work(use: str, level: Level) -> None:
    answer = smi(use=f"GPU-aaaa1111, {use}, 550.1\n", apps=f"GPU-aaaa1111, 4711, {use}\n")
    assert of(gpus(smi=answer), "busy").level is level


def test_gpu_that_is_not_asked_for_may_be_busy() -> None:
    answer = smi(use="GPU-aaaa1111, 9000, 550.1\n", apps="GPU-aaaa1111, 4711, 8900\n")
    assert wrong(gpus("1", smi=answer)) == {}


@pytest.mark.parametrize("noise", ["[N/A]", "ERR!", "\x1b[31mWarnung: Gerät", ",,,", "GPU-aaaa1111", "", "9" * 5000])
def test_answers_that_are_no_answers_are_survived(noise: str) -> None:
    answer = smi(use=f"{noise}\n", apps=f"{noise}\nGPU-zzzz, {noise}, {noise}\n", listing=noise)
    found = gpus(smi=answer)
    assert of(found, "devices").read == "1 × H200, 1 × A100"
    assert {each.level for each in found} == {Level.OK}


@pytest.mark.parametrize(
    "query", ["", "Unable to determine\n", "a,b,c,d,e\n", "0, GPU-x, \x00, 9.0, -1\n", "0,1\n" * 99]
)
def test_garbage_for_gpus_ends_in_a_finding(query: str) -> None:
    assert of(gpus(smi=smi(query=query)), "devices").check == "devices"


def test_facts_say_nothing_of_gpus_when_nobody_asked() -> None:
    assert of(gpus("all", smi=None, driver="", torch=CPU_BUILD), "devices").read == "1 × cpu: no GPU"
    assert facts().smi is not None
