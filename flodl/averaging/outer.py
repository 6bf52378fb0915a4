"""Outer optimizers: what a round makes of the consensus before the ranks adopt it.

With ``g = prev − consensus``, the way back from where the ranks arrived to where they started: plain averaging adopts
the consensus; an outer optimizer takes ``g`` for the gradient of a slower optimizer around the whole round.

- ``SlowMomentum``: SlowMo, Wang et al. 2020, arXiv:1910.00643; ``lr`` is its slow learning rate; its division by the
  inner one cancels as long as that is constant.
- ``NesterovMomentum``: the outer optimizer of DiLoCo, Douillard et al. 2023, arXiv:2311.08105.

Every rank applies the same step to the same bytes, so the built-in ones round after each multiplication and each
addition: a fused multiply-add, which some devices have, would give them other bits. Imports no torch: it is the
tensors that compute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from flodl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ELEMENTS: Final = 1 << 20
"""Elements of one pass: what lies between two operations stays small, and mostly in the cache."""


class OuterOptimizer(Protocol):
    """What an outer optimizer must be; the user's own are as welcome as those of this module.

    It also needs a ``__repr__`` of its own that names its settings (a dataclass has one): ranks whose outer optimizers
    print differently, or differ in class or plain attributes, are refused.
    """

    @property
    def slots(self) -> int:
        """How many tensors of state the engine shall keep per parameter, zero when training starts."""
        ...

    @property
    def resets_inner(self) -> bool:
        """Whether the state of the ranks' own optimizers is dropped after every step."""
        ...

    def step(self, prev: "Tensor", consensus: "Tensor", state: Sequence["Tensor"]) -> None:
        """Turn ``prev`` into the parameters of the next version, in place; called once per dtype and committed round.

        It must be deterministic: every rank calls it with the same bytes, and what it leaves in ``prev`` and ``state``
        must be the same bytes everywhere. It keeps nothing of its own between two calls.

        Args:
            prev: the version before, 1-D, float32 or float64, contiguous, on the model's device.
            consensus: the weighted mean of the ranks, like ``prev``. Never written to: local ranks share its memory.
            state: ``slots`` tensors like ``prev``, as the last call left them.
        """
        ...


@dataclass(frozen=True, slots=True)
class OuterAvg:
    """Adopts the consensus as it is. The default; without state."""

    slots = 0
    resets_inner = False

    def step(self, prev: "Tensor", consensus: "Tensor", state: Sequence["Tensor"]) -> None:
        """``new = consensus``."""
        prev.copy_(consensus)


@dataclass(frozen=True, slots=True)
class SlowMomentum:
    """``m ← mu·m + g; new = prev − lr·m`` (SlowMo, arXiv:1910.00643).

    Args:
        lr: factor of the step, above 0; 1.0 with ``mu`` 0 adopts the consensus up to rounding.
        mu: momentum, in [0, 1). The paper uses 0.4 to 0.8.

    Raises:
        ConfigError: lr or mu outside its range.
    """

    lr: float = 1.0
    mu: float = 0.5

    slots = 1
    resets_inner = False

    def __post_init__(self) -> None:
        _check(self, self.lr, self.mu)

    def step(self, prev: "Tensor", consensus: "Tensor", state: Sequence["Tensor"]) -> None:
        """See the class."""
        for new, target, momentum in _blocks(prev, consensus, state[0]):
            momentum.mul_(self.mu).add_(new - target)
            new.sub_(momentum * self.lr)


@dataclass(frozen=True, slots=True)
class NesterovMomentum:
    """``m ← mu·m + g; new = prev − lr·(g + mu·m)``; the inner optimizers start afresh (DiLoCo, arXiv:2311.08105).

    Args:
        lr: factor of the step, above 0. The paper uses 0.7.
        mu: momentum, in [0, 1). The paper uses 0.9.

    Raises:
        ConfigError: lr or mu outside its range.
    """

    lr: float = 0.7
    mu: float = 0.9

    slots = 1
    resets_inner = True

    def __post_init__(self) -> None:
        _check(self, self.lr, self.mu)

    def step(self, prev: "Tensor", consensus: "Tensor", state: Sequence["Tensor"]) -> None:
        """See the class."""
        for new, target, momentum in _blocks(prev, consensus, state[0]):
            gradient = new - target
            momentum.mul_(self.mu).add_(gradient)
            new.sub_(gradient.add_(momentum * self.mu).mul_(self.lr))


def _check(optimizer: object, lr: float, mu: float) -> None:
    name = type(optimizer).__name__
    for key, value, is_valid, wanted in (
        ("lr", lr, _is_number(lr) and 0.0 < lr < float("inf"), "a finite number above 0"),
        ("mu", mu, _is_number(mu) and 0.0 <= mu < 1.0, "a number of at least 0 and below 1"),
    ):
        if not is_valid:
            raise ConfigError(f"{key} of {name} is {value!r}; it must be {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _blocks(*tensors: "Tensor") -> Iterator[tuple["Tensor", ...]]:
    for start in range(0, tensors[0].numel(), BLOCK_ELEMENTS):
        yield tuple(tensor[start : start + BLOCK_ELEMENTS] for tensor in tensors)
