"""Forming a group: attempts, answers and the end of patience."""

from flodl.core.formation import FORMATION_TIMEOUT_S, MAX_ATTEMPTS, Formation, FormationState


def forming(incarnation: int = 1) -> Formation:
    formation = Formation()
    formation.begin(incarnation, (0, 1), 10.0)
    return formation


def answer_all(formation: Formation, error: str = "") -> None:
    for rank in formation.ranks:
        formation.answer(rank, formation.incarnation, formation.attempt, error)


def test_group_is_formed_when_every_rank_says_so() -> None:
    formation = forming()
    assert (formation.state, formation.attempt, formation.ranks) == (FormationState.FORMING, 1, (0, 1))
    assert formation.next_deadline_s() == 10.0 + FORMATION_TIMEOUT_S
    formation.answer(1, 1, 1, "")
    formation.answer(1, 1, 1, "")
    assert formation.state is FormationState.FORMING
    formation.answer(0, 1, 1, "")
    assert (formation.state, formation.next_deadline_s()) == (FormationState.FORMED, None)
    assert not formation.needs_retry(1e9)


def test_idle_formation_waits_for_nothing() -> None:
    formation = Formation()
    formation.answer(0, 0, 0, "late")
    assert (formation.state, formation.next_deadline_s(), formation.errors) == (FormationState.IDLE, None, {})
    assert not formation.needs_retry(1e9)


def test_answer_of_another_incarnation_or_attempt_changes_nothing() -> None:
    formation = forming(incarnation=2)
    for incarnation, attempt in ((1, 1), (2, 2), (3, 1)):
        for rank in (0, 1):
            formation.answer(rank, incarnation, attempt, "")
            formation.answer(rank, incarnation, attempt, "refused")
    assert (formation.state, formation.errors) == (FormationState.FORMING, {})


def test_error_or_deadline_asks_for_the_next_attempt() -> None:
    formation = forming()
    assert not formation.needs_retry(10.0 + FORMATION_TIMEOUT_S - 0.1)
    assert formation.needs_retry(10.0 + FORMATION_TIMEOUT_S)
    formation.answer(0, 1, 1, "refused")
    assert formation.needs_retry(10.0)
    assert formation.errors == {0: "refused"}
    formation.begin(1, (0, 1), 20.0)
    assert (formation.attempt, formation.errors, formation.state) == (2, {}, FormationState.FORMING)


def test_ranks_are_silent_once_the_time_is_over() -> None:
    formation = forming()
    formation.answer(0, 1, 1, "refused")
    assert formation.silent(10.0 + FORMATION_TIMEOUT_S - 0.1) == ()
    assert formation.silent(10.0 + FORMATION_TIMEOUT_S) == (1,)
    formation.answer(1, 1, 1, "")
    assert formation.silent(10.0 + FORMATION_TIMEOUT_S) == ()
    assert Formation().silent(1e9) == ()


def test_attempts_without_success_end_in_failure() -> None:
    formation = forming()
    for _ in range(MAX_ATTEMPTS):
        assert formation.state is FormationState.FORMING
        formation.begin(1, (0, 1), 20.0)
    assert (formation.state, formation.next_deadline_s()) == (FormationState.FAILED, None)
    assert not formation.needs_retry(1e9)


def test_success_and_a_new_incarnation_renew_the_patience() -> None:
    formation = forming()
    for _ in range(2 * MAX_ATTEMPTS):
        answer_all(formation)
        formation.begin(1, (0, 1), 20.0)
        assert formation.state is FormationState.FORMING
    assert formation.attempt == 2 * MAX_ATTEMPTS + 1
    formation.begin(2, (0,), 20.0)
    assert (formation.attempt, formation.ranks) == (1, (0,))
