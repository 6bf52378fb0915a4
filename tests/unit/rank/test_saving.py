"""A whole state in the outbox: one file, taken in one pass into the same memory, of the very version."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler

from flodl.averaging.outer import NesterovMomentum
from flodl.errors import CheckpointError
from flodl.rank.resuming import take_whole_state
from flodl.rank.saving import WholeState
from flodl.rank.stepper import Stepper
from flodl.spec.state import StateInfo, load_state, write_state
from tests.unit.rank.whole_states import (
    INFO,
    OPTIMIZERS,
    SCHEDULERS,
    Build,
    Net,
    Warmup,
    assert_same,
    contents,
    everything,
    note_of,
    outer_of,
    save,
    train,
)


def test_file_is_one_that_any_reader_opens_and_names_what_is_in_it(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["two groups"])
    train(stepper, range(2))

    found = safetensors.torch.load(contents(fd, save(stepper, fd)))

    state = stepper.optimizer.state
    strided: Any = stepper.model.strided
    assert found["optim/strided/exp_avg"].equal(state[strided]["exp_avg"])
    assert found["optim/embed.weight/step"].item() == 2
    assert "optim/frozen/step" not in found
    assert "optim/head.weight/step" not in found
    assert found["nonpersistent/count"].equal(stepper.model.count)


def test_trained_state_is_read_from_a_whole_one(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["adam"])
    train(stepper, range(2))
    state = load_state(contents(fd, save(stepper, fd)), "complete")
    assert (state.epochs, state.version) == (3, 17)
    assert all(a.equal(b) for a, b in zip(state.params, stepper.model.parameters(), strict=True))


# --------------------------------------------------------------------------------------------------------------- memory
def test_second_copy_takes_the_place_of_the_first(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["adam"])
    whole = WholeState(stepper, None, False, fd)
    train(stepper, range(1))
    whole.write(INFO)
    address, length = whole._image.data_ptr(), os.fstat(fd).st_size
    train(stepper, range(1, 11))

    size_bytes = whole.write(StateInfo(4, 100_000))

    assert (whole._image.data_ptr(), os.fstat(fd).st_size) == (address, length)
    found = load_state(contents(fd, size_bytes), "")
    assert found.version == 100_000
    assert found.params[0].equal(next(stepper.model.parameters()))


def test_outbox_grows_with_the_state_and_a_smaller_one_fits_too(build_net: Build, fd: int) -> None:
    class Big(Net):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Parameter(torch.ones(1 << 18))

        def loss(self, batch: int) -> torch.Tensor:
            return super().loss(batch) + self.big.square().mean()

    stepper = build_net(Big, make_optimizer=OPTIMIZERS["adam"])
    whole = WholeState(stepper, None, False, fd)
    small = whole.write(INFO)
    train(stepper, range(1))
    large = whole.write(INFO)
    stepper.optimizer.state.clear()

    assert large > small + 2 * (1 << 20)
    assert whole.write(INFO) == small
    assert os.fstat(fd).st_size >= large
    take_whole_state(fd, stepper, None)


def test_copy_stays_as_it_was_while_the_model_trains_on(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["adam"])
    train(stepper, range(2))
    size_bytes = save(stepper, fd)
    before = contents(fd, size_bytes)

    train(stepper, range(2, 6))

    assert contents(fd, size_bytes) == before


def test_final_state_and_whole_ones_share_the_outbox(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["adam"])
    whole = WholeState(stepper, None, False, fd)
    train(stepper, range(1))
    whole.write(INFO)
    size_bytes = write_state(stepper.model, INFO, fd)
    assert load_state(contents(fd, size_bytes), "").version == 17
    load_state(contents(fd, whole.write(INFO)), "")


# ----------------------------------------------------------------------------------------------------- whose optimizer
def test_asynchronous_rank_saves_what_it_gave_to_the_round(build_net: Build, fd: int) -> None:
    ours, theirs = (
        build_net(make_optimizer=OPTIMIZERS["adam"], scheduler_fn=SCHEDULERS["cosine"], num_epochs=4) for _ in range(2)
    )
    train(ours, range(2))
    ours.back_up()
    given = copy.deepcopy((ours.optimizer.state_dict(), ours.schedule.state()))
    train(ours, range(2, 4))

    save(ours, fd, is_async=True)
    take_whole_state(fd, theirs, None)

    assert_same((theirs.optimizer.state_dict(), theirs.schedule.state()), given)


def test_asynchronous_rank_without_a_backup_saves_what_it_has(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS["adam"]) for _ in range(2))
    train(ours, range(2))
    save(ours, fd, is_async=True)
    take_whole_state(fd, theirs, None)
    assert_same(everything(theirs), everything(ours))


def test_lockstep_rank_saves_what_it_has_not_its_backup(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS["adam"]) for _ in range(2))
    ours.back_up()
    train(ours, range(2))
    save(ours, fd)
    take_whole_state(fd, theirs, None)
    assert_same(everything(theirs), everything(ours))


@pytest.mark.parametrize(("versions", "is_kept"), [(0, True), (1, False)])
def test_asynchronous_rank_with_inner_optimizers_that_start_afresh(
    build_net: Build, fd: int, versions: int, is_kept: bool
) -> None:
    ours = build_net(make_optimizer=OPTIMIZERS["momentum"])
    train(ours, range(1))
    ours.back_up()
    outer = outer_of(ours, NesterovMomentum(), versions)

    save(ours, fd, outer, is_async=True)

    assert bool(note_of(fd)["whole"]["optimizer"]["state"]) is is_kept


# ------------------------------------------------------------------------------------------------------ what is refused
def refused_when_saved(stepper: Stepper, fd: int) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(stepper, fd)
    return str(caught.value)


def test_optimizer_state_that_cannot_be_kept_is_named(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["momentum"])
    train(stepper, range(1))
    stepper.optimizer.state[stepper.model.scale]["hook"] = lambda: None  # type: ignore[index]
    assert refused_when_saved(stepper, fd).startswith("optim/scale/hook holds a function; a checkpoint keeps None")


def test_hyperparameter_that_cannot_be_kept_is_named(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["two groups"])
    stepper.optimizer.param_groups[1]["where"] = Path("x")
    assert refused_when_saved(stepper, fd).startswith("optim/1/where holds a PosixPath")


def test_schedulers_state_that_cannot_be_kept_is_named(build_net: Build, fd: int) -> None:
    stepper = build_net(scheduler_fn=lambda o, _: lr_scheduler.LambdaLR(o, [Warmup(Path("x"))]))
    assert refused_when_saved(stepper, fd).startswith("scheduler/1/lr_lambdas/0/shape holds a PosixPath")


class Lookahead(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {"mine": 1}


def test_optimizer_with_a_state_dict_of_its_own_is_refused(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=lambda p: Lookahead(p, 0.1))
    assert refused_when_saved(stepper, fd).startswith("optim: Lookahead has a state_dict() of its own")
