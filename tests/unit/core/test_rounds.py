"""One round, from its windows to its verdict."""

import pytest

from flodl.core.rounds import Contribution, Round, RoundState, RoundVerdict, weigh
from flodl.errors import InvariantViolation
from flodl.ids import RankId, RoundKey
from flodl.messages import Reduced, WindowDone

VERSION = 4
KEY = RoundKey(2, VERSION + 1, 1)


def window(rank: RankId, version: int = VERSION, samples: int = 40) -> WindowDone:
    return WindowDone(rank, version, samples, 10, 3.5, True, 1.0, 1.0, 10.0, {"accuracy": (9.0, 10)})


def reduced(rank: RankId, key: RoundKey = KEY, **parts: object) -> Reduced:
    fields: dict[str, object] = {
        "digest": "d", "is_finite": True, "divergence": 0.25, "reduce_ms": 3.0, "error": "",
    }  # fmt: skip
    return Reduced(rank, key, **(fields | parts))  # type: ignore[arg-type]


def a_round(*ranks: RankId, least: int = 10, most: int = 10) -> Round:
    return Round(VERSION, dict.fromkeys(ranks, (least, most)))


def gathered(*ranks: RankId) -> Round:
    waiting = a_round(*ranks)
    for rank in ranks:
        waiting.finish_window(window(rank))
    return waiting


def reducing(*ranks: RankId) -> Round:
    waiting = gathered(*ranks)
    waiting.start(2)
    return waiting


# ------------------------------------------------------------------------------------------------------------ weights
def test_ranks_weigh_by_their_samples_and_buffers_weigh_equally() -> None:
    assert weigh({0: 30, 1: 10, 2: 0}, gamma=1.0) == {
        0: Contribution(0.75, 0.5), 1: Contribution(0.25, 0.5), 2: Contribution(0.0, 0.0),
    }  # fmt: skip


def test_gamma_bends_the_weights() -> None:
    assert weigh({0: 40, 1: 10}, gamma=0.0) == {0: Contribution(0.5, 0.5), 1: Contribution(0.5, 0.5)}
    assert weigh({0: 40, 1: 10}, gamma=0.5)[0].weight == pytest.approx(2 / 3)


def test_single_sample_weighs_and_nothing_weighs_nothing() -> None:
    assert weigh({0: 1, 1: 0}, gamma=1.0) == {0: Contribution(1.0, 1.0), 1: Contribution(0.0, 0.0)}
    assert weigh({0: 0}, gamma=0.0) == {0: Contribution(0.0, 0.0)}


# ------------------------------------------------------------------------------------------------------------ windows
def test_new_round_collects_from_all_and_has_no_attempt() -> None:
    fresh = a_round(0, 1)
    assert (fresh.version, fresh.state, fresh.attempts, fresh.key) == (VERSION, RoundState.COLLECTING, 0, None)
    assert fresh.missing() == (0, 1)
    assert fresh.reports == {}


def test_round_is_gathered_when_the_last_window_ends() -> None:
    collecting = a_round(0, 1)
    assert collecting.finish_window(window(1))
    assert (collecting.state, collecting.missing()) == (RoundState.COLLECTING, (0,))
    assert collecting.finish_window(window(0, samples=8))
    assert (collecting.state, collecting.missing()) == (RoundState.GATHERED, ())
    assert collecting.reports == {1: window(1), 0: window(0, samples=8)}
    assert collecting.trained_samples == {1: 40, 0: 8}


@pytest.mark.parametrize("stray", [window(0, version=3), window(0, version=5), window(7)])
def test_window_of_another_round_or_rank_changes_nothing(stray: WindowDone) -> None:
    collecting = a_round(0, 1)
    assert not collecting.finish_window(stray)
    assert collecting.missing() == (0, 1)


def test_second_window_of_a_rank_changes_nothing() -> None:
    collecting = a_round(0, 1)
    collecting.finish_window(window(0))
    assert not collecting.finish_window(window(0, samples=99))
    assert collecting.trained_samples == {0: 40}


def test_those_who_go_on_are_closed_once_when_all_have_done_their_least() -> None:
    collecting = a_round(0, 1, 2, least=1, most=8)
    collecting.reach_min(0)
    collecting.finish_window(window(1))
    assert collecting.ranks_to_close() == ()
    assert collecting.state is RoundState.COLLECTING
    collecting.reach_min(2)
    assert collecting.ranks_to_close() == (0, 2)
    assert collecting.state is RoundState.CLOSING
    assert collecting.ranks_to_close(now=True) == ()


def test_nobody_is_closed_when_the_last_one_has_ended_by_itself() -> None:
    done = a_round(0, least=1, most=8)
    done.reach_min(0)
    done.finish_window(window(0))
    assert done.ranks_to_close() == ()
    assert done.ranks_to_close(now=True) == ()
    assert done.state is RoundState.GATHERED


def test_rank_without_a_least_holds_nobody_up() -> None:
    collecting = Round(VERSION, {0: (0, 0), 1: (1, 8)})
    collecting.reach_min(1)
    assert collecting.ranks_to_close() == (0, 1)


def test_stop_closes_before_the_least_is_done() -> None:
    collecting = a_round(0, 1)
    assert collecting.ranks_to_close(now=True) == (0, 1)
    assert collecting.state is RoundState.CLOSING
    assert collecting.finish_window(window(0))
    assert collecting.finish_window(window(1))
    assert collecting.state is RoundState.GATHERED


def test_discarded_contribution_offers_nothing_and_says_so() -> None:
    waiting = gathered(0, 1)
    waiting.discard_samples(1)
    assert waiting.trained_samples == {0: 40, 1: 0}
    assert waiting.reports[1] == WindowDone(1, VERSION, 0, 0, 0.0, False, 1.0, 1.0, 10.0, {})
    assert waiting.reports[0] == window(0)


# ------------------------------------------------------------------------------------------------------------ attempt
def test_each_attempt_has_a_key_of_its_own() -> None:
    waiting = gathered(0, 1)
    assert waiting.start(2) == waiting.key == RoundKey(2, 5, 1)
    assert waiting.state is RoundState.REDUCING
    assert waiting.abort() == RoundKey(2, 5, 1)
    assert (waiting.state, waiting.key, waiting.attempts) == (RoundState.GATHERED, None, 1)
    assert waiting.start(3) == RoundKey(3, 5, 2)


def test_attempt_starts_only_when_all_windows_are_gathered() -> None:
    collecting = a_round(0, 1)
    with pytest.raises(InvariantViolation, match=r"^round 5 started while collecting$"):
        collecting.start(2)
    running = reducing(0, 1)
    with pytest.raises(InvariantViolation, match=r"^round 5 started while reducing$"):
        running.start(2)


def test_only_a_running_attempt_is_aborted() -> None:
    with pytest.raises(InvariantViolation, match=r"^round 5 aborted while gathered$"):
        gathered(0).abort()


def test_attempt_commits_when_all_report_one_digest() -> None:
    running = reducing(0, 1)
    assert running.missing() == (0, 1)
    assert running.reduce(reduced(1))
    assert (running.verdict(), running.missing()) == (RoundVerdict.WAIT, (0,))
    assert running.reduce(reduced(0))
    assert (running.verdict(), running.missing()) == (RoundVerdict.COMMIT, ())


@pytest.mark.parametrize(
    "stray",
    [reduced(0, RoundKey(1, 5, 1)), reduced(0, RoundKey(2, 4, 1)), reduced(0, RoundKey(2, 5, 2)), reduced(7)],
    ids=["incarnation", "version", "attempt", "rank"],
)
def test_result_of_another_attempt_changes_nothing(stray: Reduced) -> None:
    running = reducing(0, 1)
    assert not running.reduce(stray)
    assert running.missing() == (0, 1)


def test_result_behind_an_abort_changes_nothing() -> None:
    running = reducing(0, 1)
    running.abort()
    assert not running.reduce(reduced(0))
    assert running.verdict() is RoundVerdict.WAIT
    running.start(2)
    assert not running.reduce(reduced(0))
    assert running.missing() == (0, 1)


def test_results_of_an_earlier_attempt_are_forgotten() -> None:
    running = reducing(0, 1)
    running.reduce(reduced(0))
    running.reduce(reduced(1))
    running.abort()
    running.start(2)
    assert running.missing() == (0, 1)
    assert running.verdict() is RoundVerdict.WAIT


def test_one_error_breaks_the_attempt_before_all_have_answered() -> None:
    running = reducing(0, 1, 2)
    running.reduce(reduced(2))
    assert running.error() == ""
    running.reduce(reduced(1, error="connection reset"))
    assert running.verdict() is RoundVerdict.BROKEN
    assert running.error() == "rank 1: connection reset"


def test_rank_whose_weights_are_not_finite_is_named() -> None:
    running = reducing(0, 1, 2)
    running.reduce(reduced(0))
    running.reduce(reduced(1, is_finite=False))
    assert running.verdict() is RoundVerdict.WAIT
    running.reduce(reduced(2, digest="other"))
    assert running.verdict() is RoundVerdict.NOT_FINITE
    assert running.not_finite() == (1,)


def test_digests_that_differ_are_a_verdict_and_stay_with_their_ranks() -> None:
    running = reducing(0, 1, 2)
    for rank, digest in ((2, "y"), (0, "x"), (1, "y")):
        running.reduce(reduced(rank, digest=digest))
    assert running.verdict() is RoundVerdict.DISAGREED
    assert list(running.digests().items()) == [(0, "x"), (1, "y"), (2, "y")]


def test_dissents_are_counted_over_the_attempts_of_a_round() -> None:
    running = reducing(0, 1)
    assert running.count_dissent(1) == 1
    running.abort()
    running.start(1)
    assert (running.count_dissent(1), running.count_dissent(0)) == (2, 1)


def test_time_of_an_attempt_is_that_of_its_slowest() -> None:
    running = reducing(0, 1)
    assert running.reduce_ms() == 0.0
    running.reduce(reduced(0, reduce_ms=7.0))
    running.reduce(reduced(1, reduce_ms=3.0))
    assert running.reduce_ms() == 7.0


def test_time_of_an_attempt_beside_the_training_is_that_of_its_quickest() -> None:
    running = reducing(0, 1)
    assert running.reduce_ms(is_async=True) == 0.0
    running.reduce(reduced(0, reduce_ms=7.0))
    running.reduce(reduced(1, reduce_ms=3.0))
    assert running.reduce_ms(is_async=True) == 3.0
    assert running.reduce_ms() == 7.0


# ------------------------------------------------------------------------------------------------------------- losses
def test_window_of_a_lost_rank_is_no_longer_waited_for() -> None:
    collecting = a_round(0, 1)
    collecting.finish_window(window(0))
    collecting.drop(1)
    assert (collecting.state, collecting.missing()) == (RoundState.GATHERED, ())


def test_loss_while_windows_are_being_closed_gathers_the_round() -> None:
    closing = a_round(0, 1, least=1, most=8)
    closing.finish_window(window(0))
    closing.reach_min(1)
    assert closing.ranks_to_close() == (1,)
    closing.drop(1)
    assert closing.state is RoundState.GATHERED


def test_loss_of_one_of_several_that_train_gathers_nothing() -> None:
    collecting = a_round(0, 1, 2)
    collecting.finish_window(window(0))
    collecting.drop(1)
    assert (collecting.state, collecting.missing()) == (RoundState.COLLECTING, (2,))


def test_lost_rank_no_longer_holds_back_its_least() -> None:
    collecting = a_round(0, 1, least=1, most=8)
    collecting.reach_min(0)
    collecting.drop(1)
    assert collecting.ranks_to_close() == (0,)


def test_round_that_lost_everyone_is_not_gathered() -> None:
    collecting = a_round(0)
    collecting.drop(0)
    assert collecting.state is RoundState.COLLECTING


def test_report_of_a_lost_rank_is_forgotten() -> None:
    waiting = gathered(0, 1)
    waiting.drop(1)
    assert waiting.reports == {0: window(0)}
    assert waiting.state is RoundState.GATHERED
    waiting.start(3)
    assert waiting.missing() == (0,)


def test_lost_participant_is_neither_waited_for_nor_heard() -> None:
    running = reducing(0, 1, 2)
    running.reduce(reduced(1, digest="other"))
    running.drop(1)
    running.drop(2)
    assert running.state is RoundState.REDUCING
    assert not running.reduce(reduced(2))
    running.reduce(reduced(0))
    assert running.verdict() is RoundVerdict.COMMIT


def test_dropping_a_stranger_changes_nothing() -> None:
    running = reducing(0, 1)
    running.drop(9)
    assert running.missing() == (0, 1)


# --------------------------------------------------------------------------------------------------------- divergence
def test_divergence_is_the_mean_over_ranks_that_trained_and_have_a_finite_one() -> None:
    waiting = a_round(0, 1, 2, 3)
    for rank in range(4):
        waiting.finish_window(window(rank, samples=0 if rank == 3 else 40))
    waiting.start(2)
    for rank, divergence in enumerate((0.25, 0.75, float("nan"), 9.0)):
        waiting.reduce(reduced(rank, divergence=divergence))
    assert waiting.divergence() == 0.5


def test_divergence_that_nobody_knows_is_none() -> None:
    waiting = reducing(0, 1)
    assert waiting.divergence() is None
    waiting.reduce(reduced(0, divergence=float("inf")))
    assert waiting.divergence() is None
