"""May these ranks train together? What differs is named."""

from dataclasses import replace

from flodl.core.admission import disagreement, miscounted_ratios, shut_off
from flodl.messages import CadenceSettings, CheckpointSettings, HeadReady, Layout, Mode, RankReady, Settings
from tests.unit.core.cohort import hello

SETTINGS = Settings(100, 8, 2, 0, CadenceSettings())
READY = RankReady(0, SETTINGS, {"model": "m", "torch": "2.13"}, Layout(4, 0, 0), False, "gloo")
PEER = replace(READY, rank=1)


def test_equal_ranks_agree() -> None:
    assert disagreement([READY, PEER], None) == ""
    assert disagreement([READY], HeadReady(SETTINGS, {"torch": "2.13"})) == ""


def test_settings_that_differ_are_named_with_both_values() -> None:
    settings = replace(SETTINGS, seed=3, cadence=CadenceSettings(Mode.CPU_SYNC, gamma=0.5))
    reason = disagreement([READY, PEER, replace(READY, rank=2, settings=settings)], None)
    assert reason.startswith(
        "rank 0 and rank 2 do not agree on: seed (0 against 3); mode (nccl_cadence against cpu_sync); "
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
        "rank 0 and the head do not agree on: batch_size (8 against 9); torch (2.13 against 2.12)."
    )


def test_dataset_smaller_than_the_cohort_is_refused_with_a_bound() -> None:
    small = [replace(READY, rank=rank, settings=replace(SETTINGS, dataset_size=2)) for rank in range(3)]
    assert disagreement(small, None) == (
        "the dataset has 2 sample(s) for 3 ranks: every rank needs at least one; use at most 2 rank(s)"
    )
    assert disagreement(small[:2], None) == ""


def test_callback_rank_must_exist() -> None:
    cohort = [replace(READY, rank=rank, settings=replace(SETTINGS, callback_rank=2)) for rank in range(3)]
    assert disagreement(cohort, None) == ""
    assert disagreement(cohort[:2], None) == ("epoch_callback_policy names rank 2, but there are only 2 ranks (0 … 1)")


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
            f"partition_ratios has 2 ratio(s) for {world_size} rank(s); give one per rank, in rank order"
        )
