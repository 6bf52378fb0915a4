"""Who this process is, before and in a run, and the sums of its scalars."""

import pytest
import torch

from flodl.errors import UsageError
from flodl.spec import context
from flodl.spec.context import Role, ScalarSums


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_process", context._Process())
    for variable in ("RANK", "WORLD_SIZE", "FLODL_ROLE"):
        monkeypatch.delenv(variable, raising=False)


def test_a_process_without_a_role_is_rank_0_of_1_and_the_head() -> None:
    assert (context.rank(), context.world_size(), context.is_head()) == (0, 1, True)


def test_a_rank_knows_itself_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("FLODL_ROLE", "rank:{}")
    assert (context.rank(), context.world_size(), context.is_head()) == (2, 3, False)


def test_a_head_knows_itself_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLODL_ROLE", "head:{}")
    assert context.is_head()


def test_a_head_inside_someone_elses_rank_environment_is_still_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FLODL_ROLE", "head:{}")
    assert context.is_head()


def test_the_role_taken_by_the_run_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    context.enter(Role.RANK, rank=1, world_size=4)
    assert (context.rank(), context.world_size(), context.is_head()) == (1, 4, False)
    context.leave()
    assert context.rank() == 1


@pytest.mark.parametrize(("role", "is_head"), [(Role.SOLO, True), (Role.HEAD, True), (Role.RANK, False)])
def test_host_side_code_belongs_in_the_head_and_in_solo(role: Role, is_head: bool) -> None:
    context.enter(role)
    assert context.is_head() is is_head


def test_an_unreadable_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(UsageError, match="RANK='two'"):
        context.rank()


def test_a_second_run_is_refused_while_the_first_goes_on() -> None:
    context.enter(Role.SOLO)
    with pytest.raises(UsageError, match="still going"):
        context.enter(Role.SOLO)
    context.leave()
    context.enter(Role.SOLO)


def test_scalars_are_summed_and_counted_until_they_are_drained() -> None:
    context.enter(Role.SOLO)
    context.record_scalar("accuracy", 1)
    context.record_scalar("accuracy", torch.tensor(0.5, requires_grad=True))
    context.record_scalar("norm", 3.0)
    assert context.scalars().drain() == {"accuracy": (1.5, 2), "norm": (3.0, 1)}
    assert context.scalars().drain() == {}


def test_a_scalar_outside_a_run_is_refused() -> None:
    with pytest.raises(UsageError, match="inside train_step"):
        context.record_scalar("accuracy", 1.0)


def test_one_name_per_step_is_refused() -> None:
    sums = ScalarSums()
    for step in range(context.MAX_SCALAR_NAMES):
        sums.add(f"loss at {step}", 1.0)
    with pytest.raises(UsageError, match="fixed set of names"):
        sums.add("one more", 1.0)
    sums.add("loss at 0", 1.0)
