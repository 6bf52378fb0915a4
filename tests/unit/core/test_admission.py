"""May these ranks train together? What differs is named."""

from dataclasses import replace

import pytest

from flodl.core.admission import disagreement as disagreement_among
from flodl.core.admission import fits_head, miscounted_ratios, shut_off, torch_skew
from flodl.core.counted import counted
from flodl.core.membership import Membership
from flodl.messages import CadenceSettings, CheckpointSettings, Device, HeadReady, Layout, Mode, RankReady, Settings
from tests.unit.core.cohort import hello

SETTINGS = Settings(100, 8, 2, 0, CadenceSettings())
READY = RankReady(0, SETTINGS, {"model": "m", "torch": "2.13"}, Layout(4, 0, 0), False, "gloo")
PEER = replace(READY, rank=1)


def cohort(*places: tuple[str, str, str]) -> Membership:
    """Host, kind of device and version of torch of each rank."""
    members = Membership()
    for host, kind, torch in places:
        members.spawn(host, Device(kind, 0), torch)
    return members


ALIKE = cohort(*[(host, "cpu", "2.13.0") for host in "abc"])


def disagreement(reports: list[RankReady], head: HeadReady | None, members: Membership = ALIKE) -> str:
    return disagreement_among(reports, members, head)


def test_equal_ranks_agree() -> None:
    assert disagreement([READY, PEER], None) == ""
    assert disagreement([READY], HeadReady(SETTINGS, {"torch": "2.13"})) == ""


def test_settings_that_differ_are_named_with_both_values() -> None:
    settings = replace(SETTINGS, seed=3, cadence=CadenceSettings(Mode.CPU_SYNC, gamma=0.5))
    reason = disagreement([READY, PEER, replace(READY, rank=2, settings=settings)], None)
    assert reason.startswith(
        "rank 0 on a and rank 2 on c do not agree on: seed (0 against 3); mode (nccl_cadence against cpu_sync); "
        "gamma (1.0 against 0.5). Every process must build the same"
    )


def test_fingerprint_that_differs_is_named_part_by_part() -> None:
    other = replace(PEER, fingerprint={"model": "n", "torch": "2.13", "extra": "x"})
    assert "do not agree on: extra (absent against x); model (m against n)." in disagreement([READY, other], None)
    assert "do not agree on: extra (x against absent); model (n against m)." in disagreement([other, READY], None)


def test_paths_of_checkpoints_are_the_heads_affair() -> None:
    elsewhere = replace(SETTINGS, checkpoint=CheckpointSettings("/other/run", every=2))
    assert disagreement([READY, replace(PEER, settings=elsewhere)], HeadReady(elsewhere, {})) == ""


def test_backend_that_differs_is_named() -> None:
    reason = disagreement([READY, replace(PEER, backend="nccl")], None)
    assert "averaging backend (gloo against nccl)" in reason


def test_head_is_compared_where_it_knows_the_same_things() -> None:
    head = HeadReady(replace(SETTINGS, batch_size=9), {"torch": "2.12"})
    reason = disagreement([READY], head)
    assert reason.startswith(
        "rank 0 on a and the head do not agree on: batch_size (8 against 9); torch (2.13 against 2.12)."
    )


def test_dataset_smaller_than_the_cohort_is_refused_with_a_bound() -> None:
    small = [replace(READY, rank=rank, settings=replace(SETTINGS, dataset_size=2)) for rank in range(3)]
    assert disagreement(small, None) == (
        "the dataset has 2 samples for 3 ranks: every rank needs at least one; use at most 2 ranks"
    )
    assert disagreement(small[:2], None) == ""


def test_callback_rank_must_exist() -> None:
    reports = [replace(READY, rank=rank, settings=replace(SETTINGS, callback_rank=2)) for rank in range(3)]
    assert disagreement(reports, None) == ""
    assert disagreement(reports[:2], None) == ("epoch_callback_policy names rank 2, but the highest rank is 1")


def test_hosts_behind_a_tunnel_are_for_cpu_modes() -> None:
    near, far = hello("near"), replace(hello("far"), tunnelled=True)
    collective, cpu = (replace(SETTINGS, cadence=CadenceSettings(mode)) for mode in (Mode.NCCL_SYNC, Mode.CPU_ASYNC))
    assert shut_off(cpu, [near, far]) == ""
    assert shut_off(collective, [near]) == ""
    assert shut_off(collective, [near, far, replace(far, host="else")]) == (
        "mode nccl_sync needs connections from host to host, and the tunnel of far, else leads to the controller only: "
        "take a cpu mode, or leave the tunnel out"
    )


def test_every_rank_needs_a_ratio() -> None:
    ratios = replace(SETTINGS, cadence=CadenceSettings(Mode.CPU_SYNC, partition_ratios=(0.5, 0.5)))
    assert miscounted_ratios(SETTINGS, 3) == ""
    assert miscounted_ratios(ratios, 2) == ""
    for world_size in (1, 3):
        assert miscounted_ratios(ratios, world_size) == (
            f"partition_ratios has 2 ratios for {counted(world_size, 'rank')}; give one per rank, in rank order"
        )


def test_script_that_differs_is_named_with_its_own_remedy() -> None:
    here, there = ({"script": f"train.py {number}"} for number in ("aa", "bb"))
    reason = disagreement([replace(READY, fingerprint=here), replace(PEER, fingerprint=there)], None)
    assert reason == (
        "rank 0 on a and rank 1 on b do not agree on: script (train.py aa against train.py bb). "
        "Every host must have the same script: copy the project there anew"
    )


@pytest.mark.parametrize(
    ("kind", "torch", "words"),
    [
        (
            "cuda",
            "2.13.1",
            "kind of device (CPU against NVIDIA GPU). A collective mode averages over devices of one kind",
        ),
        ("rocm", "2.13.0", "kind of device (CPU against AMD GPU). "),
        ("npu", "2.13.0", "kind of device (CPU against npu). "),
        ("cpu", "2.9.0+cu124", "torch (2.13.0 against 2.9.0+cu124). A collective mode needs one torch"),
    ],
)
def test_what_a_collective_group_cannot_bear_is_refused_there_alone(kind: str, torch: str, words: str) -> None:
    members = cohort(("a", "cpu", "2.13.0"), ("b", kind, torch))
    assert words in disagreement([READY, replace(PEER, backend="nccl" if kind == "cuda" else "gloo")], None, members)
    by_cpu = replace(SETTINGS, cadence=CadenceSettings(Mode.CPU_CADENCE))
    pair = [replace(each, settings=by_cpu, backend="shared memory") for each in (READY, PEER)]
    assert disagreement(pair, None, members) == ""


@pytest.mark.parametrize("torch", ["2.13.4", "2.13", "", "2.13.0+cpu"])
def test_torch_of_one_minor_version_or_of_none_that_is_known_agrees(torch: str) -> None:
    assert disagreement([READY, PEER], None, cohort(("a", "cpu", "2.13.0"), ("b", "cpu", torch))) == ""


def test_skew_of_torch_names_each_host_once() -> None:
    members = cohort(("a", "cpu", "2.13.0"), ("a", "cpu", "2.13.0"), ("b", "cpu", "2.12.1"), ("c", "cpu", ""))
    assert torch_skew(members.all()) == "a has 2.13.0; b has 2.12.1"
    assert torch_skew(ALIKE.all()) == ""


def test_rank_fits_a_head_that_wants_the_same_and_any_other_way_without_one() -> None:
    assert fits_head(READY, None)
    assert fits_head(READY, HeadReady(SETTINGS, {}))
    assert not fits_head(READY, HeadReady(SETTINGS, {"torch": "2.12"}))
