"""How this rank averages: each plane carries out the core's averaging actions and says what came of them.

``execute`` never waits for a peer. It returns the event that follows, or None where the event comes later through the
inbox. Tensors are touched by the training thread only: a landed sum is an order in the inbox, digested there.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol, TypeAlias, assert_never

import torch

from flodl.averaging.collective import CollectivePlane
from flodl.averaging.flat import FlatModel
from flodl.averaging.outer_step import OuterStep
from flodl.averaging.shared import SharedPlane
from flodl.core.actions import (
    AbandonReduce,
    Adopt,
    Blend,
    DigestTensors,
    FormCollective,
    Pack,
    ReduceCollective,
    SumSlice,
    TakeResult,
    TakeSnapshot,
)
from flodl.core.disagreement import TENSOR_DIGEST_BYTES
from flodl.core.events import (
    GroupSettled,
    Packed,
    RankEvent,
    SliceSummed,
    SnapshotTaken,
    SumReady,
    TensorsDigested,
)
from flodl.errors import InvariantViolation, LocalProtocolError
from flodl.ids import RankId, RoundKey
from flodl.rank.inbox import Inbox

Averaging: TypeAlias = (
    FormCollective
    | TakeSnapshot
    | Pack
    | ReduceCollective
    | SumSlice
    | TakeResult
    | DigestTensors
    | AbandonReduce
    | Adopt
    | Blend
)

MAX_TENSORS: Final = 4096
"""Tensors that are digested apart when ranks disagree; the others of a larger model count as one."""

MAX_NAME_CHARS: Final = 200

SOLO_DIGEST: Final = "one rank"


class Plane(Protocol):
    """What the shell needs of a plane."""

    @property
    def must_hard_exit(self) -> bool:
        """Whether ending the process the ordinary way could hang."""
        ...

    def execute(self, action: Averaging) -> RankEvent | None:
        """Carry out ``action``; the event that follows, if it is there already."""
        ...

    def consensus(self) -> AbstractContextManager[None]:
        """Within it the model holds the last published consensus; afterwards what it held before."""
        ...


class CollectiveRounds:
    """Rounds over torch.distributed."""

    def __init__(
        self, flat: FlatModel, plane: CollectivePlane, rank: RankId, inbox: Inbox, outer: OuterStep | None = None
    ) -> None:
        """Assigns only. ``outer`` None adopts the plain consensus."""
        self._flat, self._plane, self._rank, self._inbox, self._outer = flat, plane, rank, inbox, outer
        self._key: RoundKey | None = None
        self._side: torch.Tensor | None = None

    @property
    def must_hard_exit(self) -> bool:
        """Whether a group or a buffer is parked."""
        return self._plane.must_hard_exit

    def execute(self, action: Averaging) -> RankEvent | None:
        """See ``Plane``."""
        match action:
            case FormCollective():
                self._form(action)
                return None
            case Pack():
                self._side = self._plane.side_buffer(self._flat.layout)
                return _pack(self._flat, self._side, action)
            case ReduceCollective():
                return self._reduce(action)
            case DigestTensors(key):
                return _describe(self._flat, self._outer, self._side, key)
            case AbandonReduce(_, group_too):
                self._key = self._side = None
                if group_too:
                    self._plane.abandon()
                return None
            case Adopt(_, take_raw):
                assert self._side is not None
                _adopt(self._flat, self._outer, self._side, take_raw)
                return None
            case SumSlice() | TakeResult() | TakeSnapshot() | Blend():
                raise InvariantViolation(f"{type(action).__name__} on the collective plane")
            case _:
                assert_never(action)

    def consensus(self) -> AbstractContextManager[None]:
        """See ``Plane``: asked between two windows, when the model is the consensus."""
        return nullcontext()

    def _form(self, order: FormCollective) -> None:
        def settled(error: str) -> None:
            self._inbox.post(GroupSettled(order.incarnation, order.attempt, error))

        self._plane.form(order.incarnation, order.attempt, order.ranks, self._rank, order.timeout_s, settled)

    def _reduce(self, order: ReduceCollective) -> RankEvent | None:
        self._key = order.key
        try:
            self._plane.all_reduce(
                self._flat.layout,
                order.include_raw,
                lambda error: self._inbox.post(lambda: self._landed(order.key, error)),
            )
        except LocalProtocolError as error:
            return SumReady(order.key, "", 0.0, str(error))
        return None

    def _landed(self, key: RoundKey, error: str) -> RankEvent | None:
        if key != self._key or self._side is None:
            return None
        if error:
            return SumReady(key, "", 0.0, error)
        return _sum_ready(self._flat, self._outer, self._side, key)


class SharedRounds:
    """Rounds in the host's shared memory, on the CPU plane."""

    must_hard_exit = False

    def __init__(self, flat: FlatModel, plane: SharedPlane, outer: OuterStep | None = None) -> None:
        """Assigns only. ``outer`` None adopts the plain consensus."""
        self._flat, self._plane, self._outer = flat, plane, outer
        self._side: torch.Tensor | None = None

    def execute(self, action: Averaging) -> RankEvent | None:
        """See ``Plane``."""
        layout = self._flat.layout
        match action:
            case Pack():
                return _pack(self._flat, _image(self._plane.contribution(layout)), action)
            case SumSlice(key, index, slices, slots):
                self._plane.reduce_slice(layout, index, slices, slots)
                return SliceSummed(key)
            case TakeResult(key):
                self._side = _image(self._plane.result(layout))
                return _sum_ready(self._flat, self._outer, self._side, key)
            case DigestTensors(key):
                return _describe(self._flat, self._outer, self._side, key)
            case AbandonReduce():
                self._side = None
                return None
            case Adopt(_, take_raw):
                assert self._side is not None
                _adopt(self._flat, self._outer, self._side, take_raw)
                return None
            case FormCollective() | ReduceCollective() | TakeSnapshot() | Blend():
                raise InvariantViolation(f"{type(action).__name__} on the CPU plane")
            case _:
                assert_never(action)

    def consensus(self) -> AbstractContextManager[None]:
        """See ``Plane``: asked between two windows, when the model is the consensus."""
        return nullcontext()


class AsyncRounds:
    """Rounds on the CPU plane behind the back of a model that trains on.

    Three private images: what the rank gives (taken at its count, so that a repeated attempt gives the same), the last
    consensus, and, while the consensus is looked at, the model's own values.
    """

    must_hard_exit = False

    def __init__(self, flat: FlatModel, plane: SharedPlane, alpha: float, outer: OuterStep | None = None) -> None:
        """``alpha``: the weight of the consensus in a blend, in (0, 1]. ``outer`` None takes the plain consensus."""
        self._flat, self._plane, self._alpha, self._outer = flat, plane, alpha, outer
        self._rounds = SharedRounds(flat, plane, outer)
        self._given, self._center, self._own = flat.allocate(), flat.allocate(), flat.allocate()
        self._has_center = self._is_finite = False

    def execute(self, action: Averaging) -> RankEvent | None:
        """See ``Plane``."""
        match action:
            case TakeSnapshot(is_untouched):
                return self._take_snapshot(is_untouched)
            case Pack():
                return self._pack(action)
            case Adopt(_, take_raw):
                self._keep_center()
                self._flat.adopt(self._center, take_raw)
                return None
            case Blend():
                self._keep_center()
                self._flat.blend(self._center, self._alpha)
                return None
            case _:
                return self._rounds.execute(action)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """See ``Plane``."""
        self._flat.pack(self._own, 1.0, 1.0, include_raw=True)
        self._flat.adopt(self._center, take_raw=False)
        try:
            yield
        finally:
            self._flat.adopt(self._own, take_raw=True)

    def _take_snapshot(self, is_untouched: bool) -> SnapshotTaken:
        self._is_finite = self._flat.pack(self._given, 1.0, 1.0, include_raw=True)
        if is_untouched and self._has_center:
            sums = self._flat.layout.raw_offset
            self._given[:sums].copy_(self._center[:sums])
            self._is_finite = True
        return SnapshotTaken(self._is_finite)

    def _pack(self, order: Pack) -> Packed:
        slot = _image(self._plane.contribution(self._flat.layout))
        is_used = order.weight > 0 and self._is_finite
        weights = (order.weight, order.buffer_weight) if is_used else (0.0, 0.0)
        self._flat.rescale(self._given, slot, *weights, order.owns_raw)
        return Packed(order.key, self._is_finite or order.weight == 0)

    def _keep_center(self) -> None:
        result = _image(self._plane.result(self._flat.layout))
        self._center.copy_(result if self._outer is None else self._outer.publish(result))
        self._has_center = True


class SoloRounds:
    """The rounds of the only rank: its own parameters are the consensus, and nothing is copied."""

    must_hard_exit = False

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def execute(self, action: Averaging) -> RankEvent | None:
        """See ``Plane``."""
        match action:
            case FormCollective(incarnation, attempt):
                return GroupSettled(incarnation, attempt, "")
            case Pack(key):
                return Packed(key, _is_finite(self._model))
            case ReduceCollective(key):
                return SumReady(key, SOLO_DIGEST, 0.0, "")
            case AbandonReduce() | Adopt():
                return None
            case SumSlice() | TakeResult() | TakeSnapshot() | DigestTensors() | Blend():
                raise InvariantViolation(f"{type(action).__name__} in a process without peers")
            case _:
                assert_never(action)

    def consensus(self) -> AbstractContextManager[None]:
        """See ``Plane``: one rank's model is the consensus."""
        return nullcontext()


def _pack(flat: FlatModel, out: torch.Tensor, order: Pack) -> Packed:
    is_finite = flat.pack(out, order.weight, order.buffer_weight, order.owns_raw)
    if not is_finite:
        flat.pack_zeros(out, order.owns_raw)
    return Packed(order.key, is_finite)


def _sum_ready(flat: FlatModel, outer: OuterStep | None, side: torch.Tensor, key: RoundKey) -> SumReady:
    digest, divergence = flat.examine(side)
    return SumReady(key, digest if outer is None else outer.digest(digest), divergence, "")


def _describe(
    flat: FlatModel, outer: OuterStep | None, side: torch.Tensor | None, key: RoundKey
) -> TensorsDigested | None:
    if side is None:
        return None
    found = flat.tensor_digests(side) | ({} if outer is None else outer.tensor_digests())
    names = list(found)
    if len(names) > MAX_TENSORS:
        rest = names[MAX_TENSORS - 1 :]
        digest = hashlib.blake2b(b"".join(found[name] for name in rest), digest_size=TENSOR_DIGEST_BYTES).digest()
        names = names[: MAX_TENSORS - 1]
        found = {name: found[name] for name in names} | {f"one of {len(rest)} more tensors": digest}
    return TensorsDigested(key, tuple(name[:MAX_NAME_CHARS] for name in found), b"".join(found.values()))


def _adopt(flat: FlatModel, outer: OuterStep | None, side: torch.Tensor, take_raw: bool) -> None:
    flat.adopt(side if outer is None else outer.publish(side), take_raw)


def _image(block: memoryview) -> torch.Tensor:
    return torch.frombuffer(block, dtype=torch.uint8)


def _is_finite(model: torch.nn.Module) -> bool:
    values = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
    if not values:
        return True
    largest = torch._foreach_norm(values, float("inf"))
    return bool(torch.isfinite(torch.stack([norm.double() for norm in largest])).all())
