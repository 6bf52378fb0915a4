"""Which rank runs the callbacks."""

from flodl.core.election import Election


def test_fastest_rank_is_elected_and_stays() -> None:
    election = Election(None)
    assert election.elect((0, 1, 2), {0: 3.0, 1: 2.0, 2: 2.0}) == 1
    assert election.elect((0, 1, 2), {0: 1.0, 1: 9.0}) == 1


def test_rank_that_is_not_measured_comes_last_and_ties_go_to_the_lower() -> None:
    assert Election(None).elect((0, 1), {1: 50.0}) == 1
    assert Election(None).elect((1, 2), {}) == 1


def test_death_of_the_elected_elects_the_next() -> None:
    election = Election(None)
    election.elect((0, 1, 2), {0: 1.0, 1: 2.0, 2: 3.0})
    assert election.elect((1, 2), {1: 2.0, 2: 1.0}) == 2
    assert election.elect((0, 1, 2), {0: 0.1}) == 2


def test_wanted_rank_is_chosen_while_it_lives() -> None:
    election = Election(2)
    assert election.elect((0, 1, 2), {0: 1.0}) == 2
    assert election.elect((0, 1), {0: 2.0, 1: 1.0}) == 1


def test_nobody_alive_elects_nobody() -> None:
    assert Election(None).elect((), {}) is None
    assert Election(0).elect((), {0: 1.0}) is None
