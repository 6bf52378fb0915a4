"""Taking a whole state back: training goes on bit for bit, in place, or nothing has changed."""

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler

from flodl.averaging.outer import NesterovMomentum, SlowMomentum
from flodl.averaging.outer_step import OuterStep
from flodl.errors import CheckpointError
from flodl.rank.resuming import take_whole_state
from flodl.rank.stepper import Stepper
from flodl.spec.state import write_state
from tests.unit.rank.whole_states import (
    INFO,
    OPTIMIZERS,
    SCHEDULERS,
    Build,
    Net,
    Table,
    Warmup,
    assert_same,
    change_note,
    contents,
    everything,
    outer_of,
    save,
    train,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(build_net: Build, fd: int, name: str) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS[name]) for _ in range(2))
    train(ours, range(3))
    train(theirs, range(1))

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    assert_same(everything(theirs), everything(ours))
    for stepper in (ours, theirs):
        train(stepper, range(3, 7))
    assert_same(everything(theirs), everything(ours))


def test_before_the_first_step_there_is_nothing_and_so_it_is_afterwards(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS["adam"]) for _ in range(2))
    train(theirs, range(2))

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    assert not theirs.optimizer.state
    assert_same(everything(theirs), everything(ours))


class Remembering(torch.optim.SGD):
    """Keeps, at its first parameter and for all of them, the last gradients as a list, as quasi-Newton methods do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([p for p in parameters if p.dtype is torch.float32 and p.requires_grad], 0.01)

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        memory: Any = self.state[parameters[0]]
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        memory["old_dirs"] = [*memory.get("old_dirs", [])[-1:], flat]
        memory["n_iter"] = memory.get("n_iter", 0) + 1
        super().step()
        with torch.no_grad():
            parameters[0].sub_(torch.stack(memory["old_dirs"]).mean(), alpha=0.1 / memory["n_iter"])


@pytest.mark.parametrize("steps", [1, 3])
def test_state_of_one_parameter_for_all_and_lists_of_tensors_come_back(build_net: Build, fd: int, steps: int) -> None:
    ours, theirs = (build_net(make_optimizer=Remembering) for _ in range(2))
    train(ours, range(steps))

    found = safetensors.torch.load(contents(fd, save(ours, fd)))
    take_whole_state(fd, theirs, None)

    assert "optim/strided/old_dirs/0" in found
    assert_same(everything(theirs), everything(ours))
    for stepper in (ours, theirs):
        train(stepper, range(3, 6))
    assert_same(everything(theirs), everything(ours))


def test_sparse_adam_comes_back(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(Table, make_optimizer=lambda p: torch.optim.SparseAdam(p, 0.1)) for _ in range(2))
    train(ours, range(3))

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    for stepper in (ours, theirs):
        train(stepper, range(3, 6))
    assert_same(everything(theirs), everything(ours))


@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["momentum"], OPTIMIZERS["adam, a tensor rate"]])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_goes_on_where_it_was(build_net: Build, fd: int, name: str, make_optimizer: Any) -> None:
    ours, theirs = (
        build_net(make_optimizer=make_optimizer, scheduler_fn=SCHEDULERS[name], num_epochs=4) for _ in range(2)
    )
    train(ours, range(4))

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    assert_same(everything(theirs), everything(ours))
    for stepper in (ours, theirs):
        stepper.schedule.open_window(4 * 4, 1.0)
        train(stepper, range(4, 9))
    assert_same(everything(theirs), everything(ours))


class Halving:
    """A scheduler that cannot be put back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.group = optimizer.param_groups[0]

    def step(self) -> None:
        self.group["lr"] /= 2


def test_schedule_without_state_is_stepped_from_its_beginning(build_net: Build, fd: int) -> None:
    ours, theirs = (
        build_net(make_optimizer=OPTIMIZERS["momentum"], scheduler_fn=lambda o, _: Halving(o)) for _ in range(2)
    )
    train(ours, range(3))

    save(ours, fd)
    take_whole_state(fd, theirs, None)
    theirs.schedule.open_window(3 * 4, 1.0)

    assert_same(everything(theirs), everything(ours))


def test_what_holds_the_optimizers_parts_sees_the_new_values(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS["adam, a tensor rate"]) for _ in range(2))
    for stepper in (ours, theirs):
        train(stepper, range(2))
    ours.optimizer.param_groups[0]["lr"].fill_(0.5)
    model: Any = theirs.model
    groups, weight = theirs.optimizer.param_groups, model.scale
    group, rate = groups[0], groups[0]["lr"]
    moment, address = theirs.optimizer.state[weight]["exp_avg"], weight.data_ptr()

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    assert theirs.optimizer.param_groups is groups
    assert groups[0] is group
    assert group["lr"] is rate
    assert rate.item() == 0.5
    assert theirs.optimizer.state[weight]["exp_avg"] is moment
    assert model.scale is weight
    assert weight.data_ptr() == address


def test_a_hyperparameter_that_the_file_does_not_know_stays(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS["momentum"]) for _ in range(2))
    theirs.optimizer.param_groups[0]["newer"] = 1

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    assert theirs.optimizer.param_groups[0]["newer"] == 1


def test_loss_scale_comes_back(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(precision="fp16") for _ in range(2))
    assert ours.scaler is not None
    assert theirs.scaler is not None
    for _ in range(2):
        ours.scaler.scale(torch.ones((), requires_grad=True) * float("inf")).backward()
        for parameter in ours.model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        ours.scaler.step(ours.optimizer)
        ours.scaler.update()

    save(ours, fd)
    take_whole_state(fd, theirs, None)

    assert theirs.scaler.state_dict() == ours.scaler.state_dict()
    assert theirs.scaler.get_scale() == 65536.0 / 4


def test_epoch_comes_back(build_net: Build, fd: int) -> None:
    ours, theirs = build_net(), build_net()
    save(ours, fd)
    take_whole_state(fd, theirs, None)
    assert theirs.newest_epoch == INFO.epochs


def test_compiled_and_plain_model_take_each_others_state(build_net: Build, fd: int) -> None:
    plain = build_net(make_optimizer=OPTIMIZERS["adam"])
    compiled = build_net(lambda: torch.compile(Net()), make_optimizer=OPTIMIZERS["adam"])
    train(plain, range(2))
    save(plain, fd)
    take_whole_state(fd, compiled, None)
    assert_same(everything(compiled), everything(plain))
    save(compiled, fd)
    take_whole_state(fd, build_net(make_optimizer=OPTIMIZERS["adam"]), None)


def test_parameter_outside_the_model_is_told_by_its_place(build_net: Build, fd: int) -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)

    ours, theirs = (build_net(make_optimizer=make_optimizer) for _ in range(2))
    outside = ours.optimizer.param_groups[0]["params"][-1]
    outside.grad = torch.ones(2)
    ours.optimizer.step()

    assert "optim/[5]/momentum_buffer" in safetensors.torch.load(contents(fd, save(ours, fd)))
    take_whole_state(fd, theirs, None)
    assert_same(theirs.optimizer.state_dict(), ours.optimizer.state_dict())


class Counting(torch.optim.SGD):
    """Remembers something that belongs to no parameter, and one tensor for all of them."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        shared = self.state.setdefault("shared", {"steps": torch.zeros(())})  # type: ignore[call-overload]
        shared["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = shared["steps"]


def test_state_of_no_parameter_comes_back_and_what_is_shared_is_shared(build_net: Build, fd: int) -> None:
    ours, theirs = (build_net(make_optimizer=lambda p: Counting(p, 0.01)) for _ in range(2))
    train(ours, range(2))

    save(ours, fd)
    take_whole_state(fd, theirs, None)
    train(theirs, range(2, 3))

    state: Any = theirs.optimizer.state
    assert state["shared"]["steps"].item() == 3
    assert all(values["steps"] is state["shared"]["steps"] for values in state.values())


def test_lambda_with_plain_state_is_kept(build_net: Build, fd: int) -> None:
    ours, theirs = (
        build_net(scheduler_fn=lambda o, _, n=n: lr_scheduler.LambdaLR(o, [Warmup((n, {1: "a"}))])) for n in range(2)
    )
    save(ours, fd)
    take_whole_state(fd, theirs, None)
    assert theirs.scheduler.lr_lambdas[0].shape == (0, {1: "a"})


def test_outer_state_comes_back(build_net: Build, fd: int) -> None:
    ours, theirs = build_net(), build_net()
    outer, fresh = outer_of(ours, SlowMomentum(), versions=3), outer_of(theirs, SlowMomentum())
    slots = dict(fresh.slots)

    found = safetensors.torch.load(contents(fd, save(ours, fd, outer)))
    take_whole_state(fd, theirs, fresh)

    assert found["outer/0/float32"].equal(outer.slots["0/float32"])
    assert_same(fresh.slots, outer.slots)
    assert fresh.slots["0/float32"].any()
    assert fresh.slots["0/float32"] is slots["0/float32"]


def test_file_without_outer_optimizer_leaves_its_state_as_at_the_start(build_net: Build, fd: int) -> None:
    ours, theirs = build_net(), build_net()
    outer = outer_of(theirs, SlowMomentum())
    save(ours, fd)
    take_whole_state(fd, theirs, outer)
    assert not outer.slots["0/float32"].any()


def test_who_is_alone_leaves_the_outer_state_where_it_is(build_net: Build, fd: int) -> None:
    ours, theirs = build_net(), build_net()
    save(ours, fd, outer_of(ours, SlowMomentum(), versions=1))
    wanted = everything(ours)

    take_whole_state(fd, theirs, None, is_alone=True)

    assert_same(everything(theirs), wanted)


# ------------------------------------------------------------------------------------------------------ what is refused
def refused(fd: int, stepper: Stepper, outer: OuterStep | None = None) -> str:
    """The reason; nothing has changed."""
    before = copy.deepcopy((everything(stepper), {} if outer is None else outer.slots))
    with pytest.raises(CheckpointError) as caught:
        take_whole_state(fd, stepper, outer)
    assert_same((everything(stepper), {} if outer is None else outer.slots), before)
    return str(caught.value)


def bent(change: Callable[[Any], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        change(model)
        return model

    return make


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_to("strided", nn.Parameter(torch.ones(3, 5))),
            "strided is float32 [3, 4] in the saved state, and float32 [3, 5] in this model",
        ),
        (
            set_to("narrow", nn.Parameter(torch.ones(3))),
            "narrow is bfloat16 [3] in the saved state, and float32 [3] in this model",
        ),
        (set_to("mask", torch.ones(2)), "mask is bool [2] in the saved state, and float32 [2] in this model"),
        (
            set_to("count", torch.ones(2)),
            "nonpersistent/count is int64 [] in the saved state, and float32 [2] in this model",
        ),
        (set_to("extra", nn.Parameter(torch.ones(1))), "the saved state has no extra, which this model has"),
        (lambda model: delattr(model, "scale"), "the saved state has scale, which this model does not have"),
        (
            lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(4, 3))),
            "head.weight is another tensor than in the saved state: there its values are those of embed.weight",
        ),
    ],
)
def test_other_model_is_refused_by_its_first_difference(build_net: Build, fd: int, change: Any, message: str) -> None:
    save(build_net(), fd)
    assert refused(fd, build_net(bent(change))).startswith(message)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (OPTIMIZERS["adam"], OPTIMIZERS["sgd"], "the optimizer is Adam in the saved state, and SGD in this training"),
        (
            OPTIMIZERS["adamw fused"],
            OPTIMIZERS["two groups"],
            "the optimizer has 1 parameter groups in the saved state, and 2 here",
        ),
        (
            OPTIMIZERS["adam"],
            OPTIMIZERS["adam, a tensor rate"],
            "optim/0/lr is 0.01 in the saved state, and float32 [] in this training",
        ),
        (
            OPTIMIZERS["adam, a tensor rate"],
            OPTIMIZERS["adam"],
            "optim/0/lr is float32 [] in the saved state, and 0.01 in this training",
        ),
        (
            lambda p: torch.optim.SGD(list(p)[:3], 0.1),
            OPTIMIZERS["sgd"],
            "group 0 of the optimizer has 3 parameters in the saved state, and 5 here",
        ),
        (
            lambda p: torch.optim.SGD([*p][::-1], 0.1),
            OPTIMIZERS["sgd"],
            "group 0 of the optimizer has embed.weight in the saved state where this training has frozen",
        ),
    ],
)
def test_other_optimizer_is_refused(build_net: Build, fd: int, ours: Any, theirs: Any, message: str) -> None:
    save(build_net(make_optimizer=ours), fd)
    stepper = build_net(make_optimizer=theirs)
    train(stepper, range(1))
    assert refused(fd, stepper).removesuffix("; resume with the one it was saved with") == message


def memory_of(parameter: str, name: str, value: Any) -> Callable[[Any], None]:
    """Another value in the memory of a parameter; None leaves it out."""

    def change(note: Any) -> None:
        values = dict(note["whole"]["optimizer"]["state"])[parameter]["dict"]
        values[:] = [pair for pair in values if pair[0] != name] + ([] if value is None else [[name, value]])

    return change


def pair_of(node: Any, name: str) -> list[Any]:
    """The pair in a dict as it is saved."""
    pair: list[Any] = next(pair for pair in node["dict"] if pair[0] == name)
    return pair


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "adam",
            memory_of("embed.weight", "exp_avg", {"tensor": "optim/strided/exp_avg"}),
            "optim/embed.weight/exp_avg is float32 [3, 4] in the saved state, and float32 [4, 3] in this training",
        ),
        (
            "adam",
            memory_of("narrow", "exp_avg_sq", {"tensor": "mean"}),
            "optim/narrow/exp_avg_sq is float32 [3] in the saved state, and bfloat16 [3] in this training",
        ),
        (
            "adam",
            memory_of("embed.weight", "step", {"tensor": "mean"}),
            "optim/embed.weight/step is float32 [3] in the saved state, and float32 [] in this training",
        ),
        (
            "adam",
            memory_of("embed.weight", "step", {"tensor": "mask"}),
            "optim/embed.weight/step is bool [2] in the saved state, and float32 [] in this training",
        ),
        (
            "adam",
            memory_of("embed.weight", "step", 3),
            "optim/embed.weight/step is 3 in the saved state, and a tensor in this training",
        ),
        (
            "adam",
            memory_of("scale", "max_exp_avg_sq", None),
            "optim/scale has no max_exp_avg_sq in the saved state, and this training's optimizer needs it",
        ),
        (
            "momentum",
            memory_of("strided", "momentum_buffer", {"tensor": "embed.weight"}),
            "optim/strided/momentum_buffer is float32 [4, 3] in the saved state, and float32 [3, 4] in this training",
        ),
        (
            "adagrad",  # its memory is made with it, and no step can be rehearsed without
            memory_of("embed.weight", "sum", {"tensor": "optim/strided/sum"}),
            "optim/embed.weight/sum is float32 [3, 4] in the saved state, and float32 [4, 3] in this training",
        ),
        (
            "adam",
            lambda note: note["whole"]["optimizer"]["state"][0].__setitem__(1, "all"),
            "is 'all' in the saved state, expected step, exp_avg, exp_avg_sq, max_exp_avg_sq",
        ),
        (
            "adam",
            lambda note: pair_of(note["whole"]["optimizer"]["groups"][0], "eps").__setitem__(1, "small"),
            "group 0 of the optimizer has settings in the saved state with which it cannot step here: TypeError: ",
        ),
    ],
)
def test_memory_with_which_torch_could_not_step_is_refused(
    build_net: Build, fd: int, name: str, change: Callable[[Any], None], message: str
) -> None:
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS[name]) for _ in range(2))
    train(ours, range(2))
    save(ours, fd)
    change_note(fd, change)
    assert message in refused(fd, theirs)


def test_settings_of_the_file_count_for_what_is_remembered(build_net: Build, fd: int) -> None:
    ours, theirs = (
        build_net(make_optimizer=lambda p, a=amsgrad: torch.optim.Adam(p, 0.01, amsgrad=a)) for amsgrad in (True, False)
    )
    train(ours, range(2))
    save(ours, fd)
    take_whole_state(fd, theirs, None)
    train(theirs, range(2, 3))
    assert all("max_exp_avg_sq" in values for values in theirs.optimizer.state.values())


class Padded(torch.optim.SGD):
    """Steps in its own way, with a memory that is larger than the parameters."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros(64)
        super().step()


@pytest.mark.parametrize("kind", [Padded, torch.optim.Adafactor])
def test_memory_that_is_not_known_beforehand_is_taken(build_net: Build, fd: int, kind: Any) -> None:
    ours, theirs = (build_net(make_optimizer=lambda p: kind(p, 0.01)) for _ in range(2))
    train(ours, range(2))
    save(ours, fd)
    take_whole_state(fd, theirs, None)
    assert_same(everything(theirs), everything(ours))
    train(theirs, range(2, 3))


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            {},
            {"scheduler_fn": SCHEDULERS["cosine"]},
            "the scheduler is none in the saved state, and CosineAnnealingLR in this training",
        ),
        (
            {"scheduler_fn": SCHEDULERS["cosine"]},
            {"scheduler_fn": SCHEDULERS["chain"]},
            "the scheduler is CosineAnnealingLR in the saved state, and ChainedScheduler in this training",
        ),
        ({}, {"precision": "fp16"}, "this training has a loss scaler and the saved state has none"),
        ({"precision": "fp16"}, {}, "the saved state has a loss scaler and this training has none"),
    ],
)
def test_other_schedule_or_precision_is_refused(
    build_net: Build, fd: int, ours: Any, theirs: Any, message: str
) -> None:
    save(build_net(**ours), fd)
    assert refused(fd, build_net(**theirs)).startswith(message)


def test_other_outer_optimizer_is_refused(build_net: Build, fd: int) -> None:
    ours, theirs = build_net(), build_net()
    save(ours, fd, outer_of(ours, SlowMomentum(), versions=1))
    outer = outer_of(theirs, NesterovMomentum())
    assert refused(fd, theirs, outer).startswith("the outer optimizer is SlowMomentum in the saved state, and Nesterov")
    assert refused(fd, theirs).startswith("the outer optimizer is SlowMomentum in the saved state, and none in this")


def test_trained_state_alone_is_no_checkpoint(build_net: Build, fd: int) -> None:
    stepper = build_net()
    write_state(stepper.model, INFO, fd)
    assert "has no optimizer: it is the trained state only" in refused(fd, stepper)


def test_scheduler_that_does_not_take_its_state_is_named_and_put_back(build_net: Build, fd: int) -> None:
    class Strict(lr_scheduler.ExponentialLR):
        def load_state_dict(self, state_dict: Any) -> None:
            self.last_epoch = -7
            if state_dict["gamma"] != 0.5:
                raise KeyError("gamma")
            super().load_state_dict(state_dict)

    ours, theirs = (build_net(scheduler_fn=lambda o, _, g=g: Strict(o, g)) for g in (0.9, 0.5))
    save(ours, fd)
    assert refused(fd, theirs).endswith("Strict did not take its state from the saved state: KeyError: 'gamma'")


def at(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(note: Any) -> None:
        *parents, last = path
        for key in parents:
            note = note[key]
        note[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        at("whole", value=3),
        at("whole", value={}),
        at("whole", "optimizer", value=[]),
        at("whole", "optimizer", "parameters", value=7),
        at("whole", "optimizer", "parameters", 0, value=7),
        at("whole", "optimizer", "groups", value=[3]),
        at("whole", "optimizer", "groups", 0, value={"dict": [["params", []]]}),
        at("whole", "optimizer", "groups", 0, value={"dict": [["lr", {"tensor": "gone"}]]}),
        at("whole", "optimizer", "state", value=[["nobody", {}]]),
        at("whole", "optimizer", "state", value=[["scale"]]),
        at("whole", "optimizer", "state", value=[["scale", {"tensor": ["a"]}]]),
        at("whole", "optimizer", "state", value=[[["scale"], 1]]),
        at("whole", "optimizer", "other", value=3),
        at("whole", "scheduler", "state", value={"dict": []}),
        at("whole", "scheduler", "state", value=None),
        at("whole", "scheduler", "state", value={"tuple": [1.5, {"dict": []}]}),
        at("whole", "scheduler", "state", value={"tuple": [1]}),
        at("whole", "scheduler", "class", value=["Cosine"]),
        at("whole", "scaler", value=3),
        at("whole", "outer", value=None),
        at("whole", "outer", "class", value="SlowMomentum"),
        at("parameters", value=["gone"]),
        at("parameters", value=[["a"]]),
        at("buffers", value=None),
        at("state_dict", value={"scale": "gone"}),
        at("state_dict", value={"scale": {}}),
        at("epochs", value=None),
        at("epochs", value="x"),
        at("format", value=2),
    ],
)
def test_damaged_header_is_refused_and_nothing_has_changed(build_net: Build, fd: int, change: Any) -> None:
    ours, theirs = (
        build_net(make_optimizer=OPTIMIZERS["adam"], scheduler_fn=SCHEDULERS["cosine"], num_epochs=4) for _ in range(2)
    )
    train(ours, range(2))
    train(theirs, range(1))
    save(ours, fd)
    change_note(fd, change)
    assert refused(fd, theirs)


def test_scaler_of_another_torch_is_refused(build_net: Build, fd: int) -> None:
    save(build_net(precision="fp16"), fd)
    change_note(fd, at("whole", "scaler", value={"dict": [["scale", 1.0]]}))
    assert "the loss scaler in the saved state has ['scale']" in refused(fd, build_net(precision="fp16"))


def test_outer_slots_of_another_shape_are_refused(build_net: Build, fd: int) -> None:
    ours, theirs = build_net(), build_net()
    save(ours, fd, outer_of(ours, SlowMomentum(), versions=1))
    outer = outer_of(theirs, SlowMomentum())
    change_note(fd, at("whole", "outer", "slots", "0/float32", value={"tensor": "scale"}))
    assert refused(fd, theirs, outer).startswith("outer/0/float32 is float32 [] in the saved state, and float32 [")
    change_note(fd, at("whole", "outer", "slots", value={}))
    assert refused(fd, theirs, outer).startswith("the outer optimizer has slots [] in the saved state, and ['0/float")


def test_cut_file_is_refused(build_net: Build, fd: int) -> None:
    stepper = build_net(make_optimizer=OPTIMIZERS["adam"])
    size_bytes = save(stepper, fd)
    for length in (size_bytes - 1, 1000, 8, 0):
        os.truncate(fd, length)
        assert refused(fd, stepper)


# ------------------------------------------------------------------------------------- what the script asks for by now
LENGTHS: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "polynomial": lambda o, steps: lr_scheduler.PolynomialLR(o, steps, 2.0),
    "one cycle": lambda o, steps: lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps),
}


@pytest.mark.parametrize("optimizer", ["momentum", "adam, a tensor rate"])
@pytest.mark.parametrize("name", LENGTHS)
def test_schedule_that_the_script_builds_longer_goes_on_with_the_longer_one(
    build_net: Build, fd: int, name: str, optimizer: str
) -> None:
    def build(steps: int) -> Stepper:
        return build_net(
            make_optimizer=OPTIMIZERS[optimizer], num_epochs=9, scheduler_fn=lambda o, _: LENGTHS[name](o, steps)
        )

    short, long, fresh = build(6), build(20), build(20)
    train(short, range(5))
    train(fresh, range(5))
    said: list[str] = []

    save(short, fd)
    take_whole_state(fd, long, None, warn=said.append)

    assert len(said) == 1
    assert re.search(
        r"(T_max|total_steps|total_iters) 6 there, 20 in the script\): it goes on with the script's$", said[0]
    )
    for batch in range(5, 14):
        for key in ("lr", "momentum", "betas"):
            mine, theirs = (each.optimizer.param_groups[0].get(key) for each in (long, fresh))
            assert torch.allclose(torch.as_tensor(mine or 0.0), torch.as_tensor(theirs or 0.0)), (batch, key)
        for each in (long, fresh):
            each.optimizer.step()
            each.schedule.scheduler.step()


@pytest.mark.parametrize(
    ("make", "steps", "said"),
    [
        (SCHEDULERS["cosine"], (20, 3), r"T_max 20 there, 3 in the script\): what is there stays, not the script's"),
        (SCHEDULERS["chain"], (6, 20), r"total_iters 6 there, 20 in the script\): what is there stays"),
        (
            lambda o, steps: lr_scheduler.MultiStepLR(o, [steps]),
            (6, 20),
            r"milestones \[6\] there, \[20\] in the script\): what is there stays",
        ),
    ],
)
def test_schedule_of_another_length_that_cannot_be_moved_is_told(
    build_net: Build, fd: int, make: Callable[[Any, int], Any], steps: tuple[int, int], said: str
) -> None:
    ours, theirs = (build_net(num_epochs=9, scheduler_fn=lambda o, _, count=count: make(o, count)) for count in steps)
    train(ours, range(5))
    heard: list[str] = []

    save(ours, fd)
    take_whole_state(fd, theirs, None, warn=heard.append)

    assert len(heard) == 1
    assert re.search(said, heard[0])
    assert_same(everything(theirs), everything(ours))


@pytest.mark.parametrize("scheduler", [None, "cosine"])
def test_hyperparameters_that_the_script_changed_are_told_once(
    build_net: Build, fd: int, scheduler: str | None
) -> None:
    make = None if scheduler is None else SCHEDULERS[scheduler]
    ours, theirs = (
        build_net(
            make_optimizer=lambda p, rate=rate: torch.optim.SGD(p, rate, momentum=0.9, weight_decay=rate / 10),
            scheduler_fn=make,
        )
        for rate in (0.01, 0.03)
    )
    train(ours, range(2))
    heard: list[str] = []

    save(ours, fd)
    take_whole_state(fd, theirs, None, warn=heard.append)

    assert ", ".join(heard) == (
        "resume_from keeps the optimizer's lr 0.01 (the script asks for 0.03), "
        "weight_decay 0.001 (the script asks for 0.003)"
    )
    assert_same(everything(theirs), everything(ours))


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
def test_same_script_is_told_nothing(build_net: Build, fd: int, scheduler: str | None) -> None:
    make = None if scheduler is None else SCHEDULERS[scheduler]
    ours, theirs = (build_net(make_optimizer=OPTIMIZERS["two groups"], scheduler_fn=make) for _ in range(2))
    train(ours, range(2))
    heard: list[str] = []

    save(ours, fd)
    take_whole_state(fd, theirs, None, warn=heard.append)

    assert heard == []
