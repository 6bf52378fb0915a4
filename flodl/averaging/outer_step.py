"""The engine's half of an outer optimizer: it owns the state, and this rank's image of the last version.

One private image per rank becomes the new version in place: the sum of a round is shared with the host's other ranks
and must stay as it is. Nothing changes here but by ``publish``, which follows a commit; a round that is redone leaves
no trace. Buffers take the plain consensus.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from flodl.averaging.digest import image_digest
from flodl.averaging.flat import FlatModel
from flodl.averaging.outer import OuterOptimizer
from flodl.core.disagreement import OUTER_SLOT, TENSOR_DIGEST_BYTES, VERSION_BEFORE
from flodl.errors import UsageError

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class OuterRegion:
    """The parameters of one dtype: ``prev`` lies in the image, ``state`` are the optimizer's slots; 1-D, alike."""

    prev: torch.Tensor
    state: Sequence[torch.Tensor]


class OuterStep:
    """Applies an outer optimizer, version by version. Used by the training thread only.

    ``has_reset_inner``: at the last version the inner optimizer remembered nothing.
    """

    def __init__(self, flat: FlatModel, optimizer: OuterOptimizer, inner: torch.optim.Optimizer) -> None:
        """Takes the image and the state's memory, zeros.

        Args:
            flat: the model's.
            optimizer: the user's choice.
            inner: the rank's own optimizer, whose state is dropped where the outer one says so.
        """
        self._flat, self._optimizer, self._inner = flat, optimizer, inner
        self._has_version = False
        self.has_reset_inner = False
        self.image = flat.allocate()
        self.regions = tuple(
            OuterRegion(prev, tuple(torch.zeros_like(prev) for _ in range(optimizer.slots)))
            for prev in flat.parameters(self.image)
        )

    def publish(self, consensus: torch.Tensor) -> torch.Tensor:
        """Make the new version of the committed ``consensus``, an image; returns the image to adopt.

        The first one is version 0: it is taken as it is.

        Raises:
            UsageError: the user's step returned a tensor of its own instead of changing ``prev``.
        """
        near = self._flat.near(consensus)
        if not self._has_version:
            self._has_version = True
            self.image.copy_(near)
            return self.image
        for region, target in zip(self.regions, self._flat.parameters(near), strict=True):
            self._step(region, target)
        self._flat.copy_rest(self.image, near)
        if self._optimizer.resets_inner:
            self._inner.state.clear()
            self.has_reset_inner = True
        return self.image

    @property
    def name(self) -> str:
        """The class of the outer optimizer."""
        return type(self._optimizer).__qualname__

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """The outer optimizer's state as of the last ``publish``, by slot and dtype: itself, no copy."""
        return {
            f"{slot}/{str(state.dtype).removeprefix('torch.')}": state
            for region in self.regions
            for slot, state in enumerate(region.state)
        }

    def _step(self, region: OuterRegion, consensus: torch.Tensor) -> None:
        step: Callable[..., object] = self._optimizer.step  # the user's own may return what it likes
        returned = step(region.prev, consensus, region.state)
        if returned is not None and returned is not region.prev:
            raise UsageError(
                f"step() of {self._optimizer!r} returned a {type(returned).__name__}, which nobody reads: the new "
                f"version is what it leaves in prev. End it with prev.copy_(…), and return nothing"
            )

    def tensor_digests(self) -> dict[str, bytes]:
        """As ``FlatModel.tensor_digests``, of the last version and the optimizer's state."""
        found = {name + VERSION_BEFORE: d for name, d in self._flat.tensor_digests(self.image).items()}
        for region in self.regions:
            for slot, state in enumerate(region.state):
                digest = image_digest(state.view(torch.uint8)).encode()[:TENSOR_DIGEST_BYTES]
                found[f"{OUTER_SLOT}{slot} of the outer optimizer, {state.dtype}"] = digest
        return found

    def digest(self, consensus_digest: str) -> str:
        """A digest of ``consensus_digest``, the last version and the optimizer's state: ranks that report the same
        will publish the same.
        """
        digest = hashlib.blake2b(consensus_digest.encode(), digest_size=_DIGEST_BYTES)
        digest.update(image_digest(self.image).encode())
        for region in self.regions:
            for state in region.state:
                digest.update(image_digest(state.view(torch.uint8)).encode())
        return digest.hexdigest()
