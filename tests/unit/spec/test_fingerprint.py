"""The fingerprint tells apart what must not differ, and nothing else."""

from dataclasses import dataclass

import torch
from torch import nn

from flodl.averaging.outer import NesterovMomentum
from flodl.spec.fingerprint import config_fingerprint, model_fingerprint
from flodl.spec.knobs import resolve
from flodl.trainer.config import TrainerConfig


def of(model: nn.Module, **settings: object) -> dict[str, str]:
    return model_fingerprint(model, torch.optim.Adam(model.parameters(), **settings), None)


def test_weights_do_not_matter() -> None:
    assert of(nn.Linear(2, 3)) == of(nn.Linear(2, 3))


def test_classes_and_hyperparameters_do() -> None:
    first = of(nn.Linear(2, 3), lr=0.1)

    assert first["model"] == "Linear"
    assert first["optimizer"].startswith("Adam over 2 tensors (")
    assert "lr=0.1" in first["optimizer"]
    assert of(nn.Linear(2, 3), lr=0.2)["optimizer"] != first["optimizer"]
    assert of(nn.Linear(2, 3, bias=False), lr=0.1)["optimizer"] != first["optimizer"]


def test_values_without_a_stable_text_are_told_by_their_kind() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    optimizer.param_groups[0] |= {"lr": torch.tensor(0.1), "hook": print, "long": "x" * 500, "things": [object()]}

    text = model_fingerprint(nn.Linear(1, 1), optimizer, None)["optimizer"]

    assert "lr=tensor []" in text
    assert "hook=builtin_function_or_method" in text
    assert "long=str" in text
    assert "things=list" in text


def test_datasets_are_told_by_class_and_length() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(7))
    config = TrainerConfig(data, batch_size=2, num_epochs=1)

    assert config_fingerprint(resolve(config))["dataset"] == "TensorDataset of 7 samples"
    config.eval_dataset([1, 2]).eval_fn(lambda model, batch: 0.0)
    assert config_fingerprint(resolve(config))["eval_dataset"] == "list of 2 samples"


def test_an_outer_optimizer_is_told_by_its_settings() -> None:
    config = TrainerConfig([1, 2], batch_size=2, num_epochs=1)

    assert config_fingerprint(resolve(config))["outer_optimizer"] == "OuterAvg()"
    config.outer_optimizer(NesterovMomentum(lr=0.5, mu=0.25))
    assert config_fingerprint(resolve(config))["outer_optimizer"] == "NesterovMomentum(lr=0.5, mu=0.25)"


class Silent:
    """An outer optimizer whose text leaves out its settings."""

    slots, resets_inner = 0, False
    momentum = 0.5

    def __init__(self, lr: float) -> None:
        self.lr, self._noise = lr, torch.zeros(3)

    def __repr__(self) -> str:
        return "Silent()"

    def step(self, prev: torch.Tensor, consensus: torch.Tensor, state: object) -> None:
        prev.lerp_(consensus, self.lr)


class SilentToo(Silent):
    momentum = 0.75


def test_an_outer_optimizer_of_the_users_own_is_told_by_class_and_attributes_too() -> None:
    config = TrainerConfig([1, 2], batch_size=2, num_epochs=1)

    texts = [
        config_fingerprint(resolve(config.outer_optimizer(outer)))["outer_optimizer"]
        for outer in (Silent(0.5), Silent(0.25), SilentToo(0.5))
    ]

    assert texts == [
        "Silent(), Silent with _noise=tensor [3], lr=0.5, momentum=0.5",
        "Silent(), Silent with _noise=tensor [3], lr=0.25, momentum=0.5",
        "Silent(), SilentToo with _noise=tensor [3], lr=0.5, momentum=0.75",
    ]


def test_an_outer_optimizer_that_prints_its_settings_is_told_by_its_text() -> None:
    @dataclass
    class Heavy(Silent):
        lr: float = 0.25
        momentum: float = 0.5

    config = TrainerConfig([1, 2], batch_size=2, num_epochs=1).outer_optimizer(Heavy())

    text = config_fingerprint(resolve(config))["outer_optimizer"]

    assert text.endswith("Heavy(lr=0.25, momentum=0.5)")


def test_an_outer_optimizer_of_another_name_than_its_class_is_told_by_its_class() -> None:
    class Quiet(Silent):
        momentum = property(lambda self: 1.0)  # type: ignore[assignment]

        def __init__(self) -> None:
            pass

    config = TrainerConfig([1, 2], batch_size=2, num_epochs=1).outer_optimizer(Quiet())

    text = config_fingerprint(resolve(config))["outer_optimizer"]

    assert text.startswith("Silent(), test_an_outer")
    assert text.endswith("Quiet with nothing more")
