"""The knobs: one definition for keywords, setters and values, and one clear message for whatever cannot be used."""

import copy
import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from flodl.averaging.outer import NesterovMomentum, OuterAvg, SlowMomentum
from flodl.errors import ConfigError, UnknownArgument, UsageError
from flodl.messages import CadenceSettings, CheckpointSettings, GuardSettings, Mode, OnError, Precision
from flodl.spec.cadence import ElCheConfig, ElCheMode
from flodl.spec.knobs import EpochCallbackPolicy, Knobs, resolve
from flodl.trainer.config import TrainerBuilder, TrainerConfig

DATA = TensorDataset(torch.arange(10))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def config(**knobs: Any) -> TrainerConfig:
    return TrainerConfig(DATA, **{"batch_size": 2, "num_epochs": 3} | knobs)


def builder() -> TrainerBuilder:
    return TrainerBuilder(lambda device: torch.nn.Linear(1, 1), torch.optim.Adam, lambda model, batch: batch)


def test_every_knob_is_a_keyword_a_setter_and_a_builder_setter() -> None:
    names = set(Knobs.knobs())
    assert names == {
        "dataset", "batch_size", "num_epochs", "epoch_splits", "elche", "max_grad_norm", "scheduler_fn",
        "lr_scale_ratio", "precision", "accumulate", "max_nonfinite", "max_failure", "on_error",
        "metrics_fn", "epoch_fn", "checkpoint_fn", "eval_dataset", "eval_fn",
        "eval_result_fn", "epoch_callback_policy", "outer_optimizer", "seed", "num_workers", "collate_fn",
        "save_path", "checkpoint_every", "checkpoint_at_epoch", "keep_last", "resume_from", "reshape",
        "cluster",
    }  # fmt: skip
    assert all(hasattr(resolve(config()), name) for name in names)
    assert all(callable(getattr(config(), name)) and callable(getattr(builder(), name)) for name in names)


def test_keywords_setters_and_builder_give_the_same_run() -> None:
    by_keyword = resolve(config(seed=7, max_grad_norm=1.5))
    by_setter = resolve(config().seed(7).max_grad_norm(1.5))
    chain = builder().dataset(DATA).batch_size(2).num_epochs(3).seed(7).max_grad_norm(1.5)
    assert by_keyword.settings() == by_setter.settings() == resolve(chain).settings()


def test_a_setter_changes_the_config_and_returns_it() -> None:
    changed = config()
    assert changed.seed(4) is changed
    assert resolve(changed).seed == 4


def test_values_have_the_defaults_of_the_table() -> None:
    job = resolve(config())
    assert (job.batch_size, job.num_epochs, job.seed, job.num_workers) == (2, 3, 0, 0)
    assert (job.max_grad_norm, job.metrics_fn, job.cluster) == (None, None, None)
    assert job.epoch_callback_policy is EpochCallbackPolicy.FASTEST


def test_settings_say_what_every_participant_must_agree_on() -> None:
    job = resolve(
        config(
            elche=ElCheConfig.cpu_sync(),
            eval_dataset=TensorDataset(torch.arange(4)),
            eval_fn=lambda *_: 0.0,
            epoch_callback_policy=EpochCallbackPolicy.rank(1),
        )
    )
    settings = job.settings()
    assert (settings.dataset_size, settings.batch_size, settings.num_epochs) == (10, 2, 3)
    assert (settings.eval_samples, settings.callback_rank) == (4, 1)
    assert settings.cadence == CadenceSettings(mode=Mode.CPU_SYNC)


def test_numpy_and_torch_integers_are_whole_numbers() -> None:
    assert type(resolve(config(batch_size=torch.tensor(5).numpy()[()])).batch_size) is int


def test_assigning_instead_of_calling_shows_the_call() -> None:
    with pytest.raises(UsageError, match=r"write \.seed\(3\)"):
        config().seed = 3  # type: ignore[assignment]


def test_a_missing_knob_of_a_builder_is_named_with_the_line_to_add() -> None:
    with pytest.raises(UsageError, match=r"batch_size, num_epochs must be set; add \.batch_size\(\.\.\.\)"):
        builder().dataset(DATA).run()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TrainerConfig(DATA, batch_size=1), r"TrainerConfig: num_epochs must be set; add num_epochs=\.\.\."),
        (lambda: TrainerConfig(DATA, 3, batch_size=1), "TrainerConfig: too many positional arguments; pass knobs by"),
        (lambda: config(batchsize=3), r"TrainerConfig has no knob 'batchsize'; did you mean batch_size\?"),
        (lambda: ElCheConfig(Max_Anchr=3), r"ElCheConfig has no knob 'Max_Anchr'; did you mean max_anchor\?"),
        (lambda: ElCheConfig(q=3), "ElCheConfig has no knob 'q'; there are mode, anchor, min_anchor, "),
        (lambda: config(mode="solo"), r"has no knob 'mode'; elche has: ElCheConfig\(mode=\.\.\.\)"),
        (lambda: config().elche(mode="x"), r"elche takes one value: \.elche\(ElCheConfig\(mode=\.\.\.\)\)"),
        (lambda: config().elche(moed="x"), r"elche takes one value: \.elche\(\.\.\.\)"),
        (lambda: builder().batch_size(), r"batch_size takes one value: \.batch_size\(\.\.\.\)"),
        (lambda: builder().batch_size(3, 4), "batch_size takes one value"),
    ],
)
def test_a_wrong_argument_is_a_type_error_that_names_the_right_one(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("table", [builder(), config()])
def test_an_unknown_setter_is_an_attribute_error_that_names_the_right_one(table: Any) -> None:
    with pytest.raises(UsageError, match=r"has no knob 'max_gradnorm'; did you mean max_grad_norm\?") as caught:
        table.max_gradnorm(3)
    with pytest.raises(UsageError, match=r"has no knob 'batchsize'; did you mean batch_size\?"):
        table.batchsize = 3
    shown = "".join(traceback.format_exception(caught.value))

    assert isinstance(caught.value, AttributeError)
    assert shown.lower().count("did you mean") == 1
    assert not hasattr(table, "batchsize")
    assert "seed=3" in repr(copy.copy(table).seed(3))
    with pytest.raises(AttributeError, match="object has no attribute '_nothing'"):
        copy.copy(table)._nothing()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5; it must be a whole number"),
        ({"batch_size": True}, "batch_size is True; it must be a whole number"),
        ({"batch_size": 11}, "batch_size 11 is larger than the dataset of 10 samples; lower batch_size to at most 10"),
        ({"num_epochs": 0}, "num_epochs is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"seed": 2**63}, "it must be at most"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0; it must be a finite number above 0 or None"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"metrics_fn": 3}, "metrics_fn is 3; pass a function, not its result"),
        ({"cluster": "hosts.yml"}, "cluster is 'hosts.yml'; pass a ClusterBuilder, or start with fdl launch -c FILE"),
        ({"elche": "cpu_sync"}, r"pass an ElCheConfig such as ElCheConfig.cpu_sync\(\)"),
        ({"elche": ElCheMode.CPU_ASYNC}, r"pass an ElCheConfig such as ElCheConfig.cpu_async\(\)"),
        ({"elche": "nccl_async"}, "nccl_async is not a mode"),
        ({"elche": "cpu"}, "elche is 'cpu'; this version offers nccl_sync, "),
        ({"elche": 3}, r"elche is 3; pass an ElCheConfig such as ElCheConfig.cpu_cadence\(\)"),
        ({"epoch_callback_policy": 1}, "pass EpochCallbackPolicy.FASTEST or"),
        ({"eval_dataset": DATA}, "eval_dataset is set but eval_fn is not; set both, or neither"),
        ({"eval_fn": max}, "eval_fn is set but eval_dataset is not; set both, or neither"),
        ({"eval_result_fn": print}, "set eval_dataset and eval_fn too"),
        ({"eval_dataset": [], "eval_fn": max}, "eval_dataset has length 0"),
        ({"elche": ElCheConfig(min_anchor=9, max_anchor=8)}, "min_anchor 9 is above max_anchor 8"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_fix(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**knobs)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="dataset has length 0"):
        TrainerConfig([], batch_size=1, num_epochs=1)


@pytest.mark.parametrize("dataset", [Endless(), iter([1, 2]), {1, 2}])
def test_a_dataset_without_random_access_is_refused(dataset: object) -> None:
    with pytest.raises(ConfigError, match="pass a map-style dataset"):
        TrainerConfig(dataset, batch_size=1, num_epochs=1)


def test_a_negative_callback_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is -1"):
        EpochCallbackPolicy.rank(-1)


# ---------------------------------------------------------------------------------------------------------- cadence
def test_the_default_cadence_is_nccl_cadence_and_the_messages_defaults() -> None:
    assert ElCheConfig().settings() == ElCheConfig.nccl_cadence().settings() == CadenceSettings()


@pytest.mark.parametrize("mode", list(ElCheMode))
def test_every_mode_has_a_preset_of_its_name(mode: Mode) -> None:
    guard = GuardSettings(threshold=0.3 if mode.is_async else 0.05)
    assert getattr(ElCheConfig, mode.value)().settings() == CadenceSettings(mode=mode, guard=guard)
    assert ElCheConfig(mode=mode.value).settings().mode is mode
    assert getattr(ElCheConfig, mode.value)(max_anchor=7).settings().max_anchor == 7
    with pytest.raises(UnknownArgument, match="did you mean max_anchor"):
        getattr(ElCheConfig, mode.value)(max_ancor=7)


def test_cadence_knobs_chain_and_come_as_keywords() -> None:
    chained = ElCheConfig.cpu_cadence().anchor(5).min_anchor(2).max_anchor(20).overhead_target(0.1).max_batch_diff(0)
    keywords = ElCheConfig(
        mode=Mode.CPU_CADENCE, anchor=5, min_anchor=2, max_anchor=20, overhead_target=0.1, max_batch_diff=0
    )
    assert chained.settings() == keywords.settings()
    assert chained.settings().max_batch_diff == 0


@pytest.mark.parametrize("call", [ElCheConfig.nccl_async, lambda: ElCheConfig(mode="nccl_async")])
def test_nccl_async_is_refused_by_name_with_the_way_to_go(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"nccl_async is not a mode.*cpu_async; this version offers .*cpu_cadence"):
        call()


def test_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ConfigError, match="mode is 'gossip'; this version offers nccl_sync, nccl_cadence, cpu_sync"):
        ElCheConfig(mode="gossip")


@pytest.mark.parametrize("preset", [ElCheConfig.nccl_cadence, ElCheConfig.nccl_sync])
def test_bf16_wire_is_refused_where_no_daemon_sends(preset: Callable[[], ElCheConfig]) -> None:
    with pytest.raises(ConfigError, match=r"drop bf16_wire, or use ElCheConfig\.cpu_cadence\(\)"):
        preset().bf16_wire(True).settings()
    assert not preset().bf16_wire(False).settings().bf16_wire


def test_bf16_wire_is_a_switch_of_the_cpu_modes() -> None:
    assert ElCheConfig.cpu_sync().bf16_wire(True).settings() == CadenceSettings(Mode.CPU_SYNC, bf16_wire=True)
    with pytest.raises(ConfigError, match="bf16_wire is 1; it must be True or False"):
        ElCheConfig.cpu_sync().bf16_wire(1)  # type: ignore[arg-type]


def test_an_anchor_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"anchor 30 is outside \[min_anchor, max_anchor\] = \[1, 20\]"):
        ElCheConfig.nccl_cadence().anchor(30).max_anchor(20).settings()


def test_a_config_shows_what_was_set() -> None:
    shown = repr(ElCheConfig.cpu_sync().max_batch_diff(0))
    assert shown == "ElCheConfig(mode=<Mode.CPU_SYNC: 'cpu_sync'>, max_batch_diff=0)"


class Anonymous:
    slots = 0
    resets_inner = False

    def step(self, prev: Any, consensus: Any, state: Any) -> None:
        """Prints as an address."""


@dataclass(frozen=True)
class Named(Anonymous):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"pass an outer optimizer such as flodl\.SlowMomentum"),
        (SlowMomentum, r"pass an outer optimizer such as flodl\.SlowMomentum"),
        (torch.optim.SGD([torch.zeros(1)]), r"pass an outer optimizer such as flodl\.SlowMomentum"),
        (type("Negative", (Named,), {"slots": -1})(), "slots of outer_optimizer"),
        (
            type("Other", (Named,), {"step": lambda self, consensus: None})(),
            r"outer_optimizer\.step\(prev, consensus, state\), and <lambda> takes \(consensus\)",
        ),
        (type("Silent", (Named,), {"resets_inner": None})(), "resets_inner = False"),
        (Anonymous(), "give Anonymous a __repr__"),
    ],
)
def test_what_is_no_outer_optimizer_is_refused_with_the_fix(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(outer_optimizer=value)


def test_outer_optimizers_of_ours_and_of_the_user_are_taken() -> None:
    assert resolve(config()).outer_optimizer == OuterAvg()
    for mine in (SlowMomentum(lr=0.5, mu=0.0), NesterovMomentum(), Named()):
        assert resolve(config().outer_optimizer(mine)).outer_optimizer is mine


@pytest.mark.parametrize("kind", [SlowMomentum, NesterovMomentum])
@pytest.mark.parametrize(
    "settings", [{"lr": 0.0}, {"lr": -1}, {"lr": math.inf}, {"lr": math.nan}, {"lr": "1"}, {"mu": 1.0}, {"mu": -0.1},
                 {"mu": math.nan}, {"mu": True}],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} of {kind.__name__} is"):
        kind(**settings)


# ------------------------------------------------------------------------------------------------------------- losses
def test_any_loss_is_borne_and_an_error_of_the_script_stops_unless_said_otherwise() -> None:
    settings = resolve(config()).settings()
    assert (settings.max_failure, settings.on_error) == (None, OnError.STOP)


@pytest.mark.parametrize("limit", [1, 3, 0.25, np.float32(0.5), torch.tensor(2)])
def test_losses_that_a_run_bears_are_a_number_or_a_part(limit: Any) -> None:
    settings = resolve(builder().dataset(DATA).batch_size(2).num_epochs(3).max_failure(limit)).settings()
    assert settings == resolve(config(max_failure=limit)).settings()
    assert settings.max_failure == float(limit)


@pytest.mark.parametrize("limit", [0, -1, 1.5, 0.0, float("nan"), float("inf"), True, "2", []])
def test_losses_that_are_neither_are_refused_with_the_fix(limit: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a number of ranks, 1 or more, or a part of them between 0 and 1"):
        config(max_failure=limit)


def test_error_of_the_script_may_shrink_the_run() -> None:
    assert resolve(config().on_error("shrink")).settings().on_error is OnError.SHRINK
    with pytest.raises(ConfigError, match="on_error is 'go on'; choose one of stop, shrink"):
        config(on_error="go on")


# ----------------------------------------------------------------------------------------------------- one rank's step
def test_settings_carry_what_every_rank_must_do_alike_in_a_step() -> None:
    job = resolve(config(precision="bf16", accumulate=2, lr_scale_ratio=0.5, max_nonfinite=7))
    settings = job.settings()
    assert (settings.precision, settings.accumulate) == (Precision.BF16, 2)
    assert (settings.lr_scale_ratio, settings.max_nonfinite) == (0.5, 7)
    assert resolve(config()).settings().precision is Precision.FP32


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; choose one of fp32, bf16, fp16"),
        ({"accumulate": 0}, "accumulate is 0; it must be at least 1"),
        ({"accumulate": 3}, "accumulate 3 is more than the 2 samples of a batch; lower accumulate to at most 2"),
        ({"lr_scale_ratio": -0.1}, "lr_scale_ratio is -0.1; it must be a number that is finite and at least 0"),
        ({"lr_scale_ratio": float("nan")}, "lr_scale_ratio is nan"),
        ({"lr_scale_ratio": float("inf")}, "lr_scale_ratio is inf"),
        ({"lr_scale_ratio": "0"}, "lr_scale_ratio is '0'"),
        ({"lr_scale_ratio": []}, r"lr_scale_ratio is \[\]"),
        ({"max_nonfinite": 0}, "max_nonfinite is 0; it must be at least 1"),
        ({"scheduler_fn": 3}, "scheduler_fn is 3; pass a function, not its result"),
    ],
)
def test_knobs_of_a_step_that_cannot_be_used_name_the_fix(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**knobs)


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 16])
def test_gamma_is_a_power_from_0_on(gamma: float) -> None:
    assert ElCheConfig.cpu_sync().gamma(gamma).settings().gamma == gamma


@pytest.mark.parametrize("gamma", [-1, 17, float("nan"), True])
def test_gamma_that_is_no_power_of_a_count_is_refused(gamma: Any) -> None:
    with pytest.raises(ConfigError, match=r"gamma is .*; it must be a number that is at least 0 and at most 16"):
        ElCheConfig(gamma=gamma)


# ----------------------------------------------------------------------------------------------------- checkpoints
def test_nothing_is_saved_or_resumed_unless_asked_for() -> None:
    assert resolve(config()).settings().checkpoint == CheckpointSettings()


def test_checkpoint_settings_come_from_keywords_setters_and_builder_alike() -> None:
    keywords = config(
        save_path=Path("ckpts/run43"), checkpoint_every=2, checkpoint_at_epoch=3, resume_from="old.fdl", reshape=True
    )
    setters = (
        config()
        .save_path("ckpts/run43")
        .checkpoint_every(2)
        .checkpoint_at_epoch(3)
        .resume_from("old.fdl", reshape=True)
    )
    chain = builder().dataset(DATA).batch_size(2).num_epochs(3).save_path("ckpts/run43")
    chain.checkpoint_every(2).checkpoint_at_epoch([3]).reshape(True).resume_from(PurePosixPath("old.fdl"))

    expected = CheckpointSettings("ckpts/run43", 2, (3,), "old.fdl", reshape=True)
    assert resolve(keywords).settings().checkpoint == expected
    assert resolve(setters).settings().checkpoint == expected
    assert resolve(chain).settings().checkpoint == expected


def test_resume_from_returns_its_table_and_leaves_reshape_alone_unless_named() -> None:
    mine = config()
    assert mine.resume_from("old") is mine
    assert resolve(mine).reshape is False
    assert resolve(mine.resume_from("old", reshape=True).resume_from("new")).reshape is True
    assert resolve(mine.resume_from("new", reshape=False)).reshape is False
    assert resolve(mine).resume_from == "new"
    with pytest.raises(UnknownArgument, match="resume_from has no reshap; it takes a stem, and reshape=True"):
        mine.resume_from("new", reshap=True)  # type: ignore[call-arg]


def test_paths_stay_as_given() -> None:
    settings = resolve(config(save_path="./a/../b/run", resume_from="~/run")).settings().checkpoint
    assert (settings.save_path, settings.resume_from) == ("./a/../b/run", "~/run")


@pytest.mark.parametrize("epochs", [(3, 1, 3), [1, 3], range(1, 4, 2), {3, 1}, torch.tensor([3, 1]).numpy()])
def test_several_epochs_are_kept_once_each_in_order(epochs: Any) -> None:
    job = resolve(config(save_path="run", checkpoint_at_epoch=epochs))
    assert job.settings().checkpoint.at_epochs == (1, 3)


def test_functions_behind_an_epoch_are_known_to_every_participant() -> None:
    settings = resolve(config(epoch_fn=print, checkpoint_fn=print, checkpoint_every=1)).settings()
    assert (settings.has_epoch_fn, settings.has_checkpoint_fn) == (True, True)
    settings = resolve(config()).settings()
    assert (settings.has_epoch_fn, settings.has_checkpoint_fn) == (False, False)


def test_one_epoch_may_be_a_number_of_torch_or_numpy() -> None:
    for one in (torch.tensor(3), torch.tensor(3).numpy(), torch.tensor(3).numpy()[()]):
        assert resolve(config(save_path="run").checkpoint_at_epoch(one)).settings().checkpoint.at_epochs == (3,)


def test_checkpoint_at_epoch_counts_the_epochs_of_split_passes() -> None:
    job = resolve(config(save_path="run", epoch_splits=2, checkpoint_at_epoch=6))
    assert job.settings().checkpoint.at_epochs == (6,)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"save_path": b"run"}, r"save_path is b'run'; pass a path such as 'ckpts/run43'"),
        ({"save_path": 3}, "save_path is 3; pass a path"),
        ({"save_path": ""}, "save_path is '', which names no file; add a name, such as 'run43'"),
        ({"save_path": "ckpts/"}, "save_path is 'ckpts/', which names no file; add a name, such as 'ckpts/run43'"),
        ({"save_path": "ckpts/.fdl"}, "save_path is 'ckpts/.fdl', which names no file"),
        ({"save_path": ".."}, "save_path is '..', which names no file"),
        ({"save_path": "run\0"}, r"save_path is 'run\\x00'; it must be at most 4096 printable characters"),
        ({"save_path": "run\udcff"}, "printable characters"),
        ({"save_path": "x/" + "é" * 116}, "which names a file with 232 bytes in its name; it may have at most 230"),
        ({"save_path": "x" * 4097}, "at most 4096"),
        ({"resume_from": True}, "resume_from is True; pass a path"),
        ({"checkpoint_every": 0, "save_path": "run"}, "checkpoint_every is 0; it must be at least 1"),
        ({"checkpoint_at_epoch": 0, "save_path": "run"}, "checkpoint_at_epoch is 0; it must be at least 1"),
        ({"checkpoint_at_epoch": (1, "2"), "save_path": "run"}, "checkpoint_at_epoch is '2'; it must be a whole"),
        ({"checkpoint_at_epoch": "12", "save_path": "run"}, "checkpoint_at_epoch is '12'; it must be a whole"),
        (
            {"checkpoint_at_epoch": itertools.count(1), "save_path": "run"},
            "more than 10000 epochs; use checkpoint_every",
        ),
        (
            {"checkpoint_every": 1},
            "checkpoint_every is set but save_path is not; add save_path='ckpts/run43' or a check",
        ),
        (
            {"checkpoint_fn": print},
            "checkpoint_fn is set but neither checkpoint_every nor checkpoint_at_epoch is, so nobody would call it",
        ),
        ({"checkpoint_fn": 3}, "checkpoint_fn is 3; pass a function, not its result"),
        ({"epoch_fn": 3}, "epoch_fn is 3; pass a function, not its result"),
        ({"keep_last": 0, "save_path": "run"}, "keep_last is 0; it must be at least 1"),
        ({"keep_last": 2}, "keep_last is set but save_path is not; add save_path='ckpts/run43', or drop keep_last"),
        ({"checkpoint_at_epoch": 1}, "checkpoint_at_epoch is set but save_path is not"),
        ({"checkpoint_at_epoch": (2, 4), "save_path": "run"}, "names epoch 4, and the run has 3 epochs; use at most 3"),
        (
            {"checkpoint_at_epoch": 7, "save_path": "run", "epoch_splits": 2},
            r"names epoch 7, and the run has 6 epochs \(num_epochs × epoch_splits\); use at most 6",
        ),
        ({"reshape": True}, "reshape is set but resume_from is not; add resume_from='ckpts/run42', or drop reshape"),
        ({"reshape": 1, "resume_from": "run"}, "reshape is 1; it must be True or False"),
    ],
)
def test_checkpoint_knobs_that_cannot_be_used_name_the_fix(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**knobs)


# --------------------------------------------------------------------------------------------------------- functions
def two(first: object, second: object) -> None: ...


def keyword(*, epoch: int) -> None: ...


class Called:
    def __call__(self, only: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("metrics_fn", two, r"metrics_fn(metrics), and two takes (first: object, second: object) -> None"),
        ("epoch_fn", Called(), r"epoch_fn(epoch, worker), and Called takes (only: object) -> None"),
        ("checkpoint_fn", lambda model: None, r"checkpoint_fn(epoch, model), and <lambda> takes (model)"),
        ("eval_result_fn", keyword, r"eval_result_fn(epoch, value), and keyword takes (*, epoch: int) -> None"),
        ("scheduler_fn", lambda o, steps, rate: None, r"scheduler_fn(optimizer, total_steps), and <lambda> takes (o, "),
        ("collate_fn", lambda: None, r"collate_fn(samples), and <lambda> takes ()"),
        ("eval_fn", lambda model: 0.0, r"eval_fn(model, input, target), and <lambda> takes (model)"),
    ],
)
def test_function_that_does_not_take_what_it_is_called_with_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**{name: value})
    assert str(raised.value).startswith(f"{name} is called as {words}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics_fn", print),
        ("metrics_fn", {}.update),  # it does not say what it takes
        ("metrics_fn", functools.partial(two, 1)),
        ("epoch_fn", lambda *arguments: None),
        ("epoch_fn", lambda epoch, worker, more=3: None),
        ("scheduler_fn", torch.optim.lr_scheduler.CosineAnnealingLR),
        ("collate_fn", None),
    ],
)
def test_function_that_takes_what_it_is_called_with_is_welcome(name: str, value: Any) -> None:
    assert getattr(resolve(config(**{name: value})), name) is value


@pytest.mark.parametrize("eval_fn", [lambda model, x: 0.0, lambda model, *parts: 0.0, lambda model, a, b, c, d: 0.0])
def test_evaluation_takes_the_model_and_whatever_a_batch_has(eval_fn: Any) -> None:
    assert resolve(config(eval_dataset=DATA, eval_fn=eval_fn)).eval_fn is eval_fn
