"""The collective plane of one rank: a group per incarnation, all-reduces that never block, and abandonment.

A rank thread that waits inside a collective cannot hear orders, and a group with a dead or stopped peer can neither be
waited for nor freed (dropping one blocked 38 s in a measurement; a peer that woke up later overwrote a refilled
buffer). So: groups form on disposable threads that nobody joins; all-reduces report through a callback; and what is
given up is *parked*: group, works and buffer stay referenced, untouched and unused, as long as the process lives.
A process that has parked something ends by ``os._exit`` (``must_hard_exit``).

Gloo carries CPU devices, NCCL CUDA devices. The NCCL path has not run on real devices yet.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed

from flodl.averaging.store import ControlStore, StoreCall
from flodl.averaging.store_table import group_prefix
from flodl.errors import LocalProtocolError
from flodl.ids import Incarnation, RankId
from flodl.messages import Layout

_dist: Any = torch.distributed
"""The parts used here are missing from torch's type stubs."""

REDUCE_TIMEOUT_S = 3_600.0
"""A backstop only: the controller abandons a stuck round long before."""

_NCCL_POLL_S = 0.0005
_NCCL_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's watchdogs end the process on a stuck collective; here the controller decides what a stuck group means."""

Done: TypeAlias = Callable[[str], None]
"""Called once with the error, empty on success, from a thread of the plane or of torch: it must only post an event."""


class CollectivePlane:
    """Forms groups and reduces images in them. ``form``, ``all_reduce`` and ``abandon`` return at once."""

    def __init__(self, call: StoreCall, device: torch.device, address: str, store_timeout_s: float = 60.0) -> None:
        """Assigns only.

        Args:
            call: The rendezvous' way to the controller, see ``store.StoreCall``.
            device: Of the images: cpu (Gloo) or cuda (NCCL).
            address: The local address that reached the controller; Gloo listens there.
            store_timeout_s: Limit for rendezvous waits that torch gives no limit of its own.
        """
        self._device = device
        self._address = address
        self._store = ControlStore(call, store_timeout_s)
        self._lock = threading.Lock()
        self._generation = 0
        self._forming: list[threading.Thread] = []
        self._group: Any = None
        self._size = 0
        self._buffer: torch.Tensor | None = None
        self._round: _Reduction | None = None
        self._parked: list[object] = []
        self._parked_bytes = 0

    @property
    def backend(self) -> str:
        """What really carries the rounds: gloo or nccl."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    @property
    def parked_bytes(self) -> int:
        """Bytes of buffers given up so far; they are never freed."""
        return self._parked_bytes

    @property
    def must_hard_exit(self) -> bool:
        """Whether ending the process the ordinary way could hang: something is parked, or a formation still runs."""
        with self._lock:
            return bool(self._parked) or any(thread.is_alive() for thread in self._forming)

    def side_buffer(self, layout: Layout) -> torch.Tensor:
        """The image to pack and reduce in: uint8 [total_bytes] on the device; a new one after ``abandon`` parked it.

        Raises:
            LocalProtocolError: A reduction is still running in it.
        """
        with self._lock:
            if self._round is not None and not self._round.is_clean:
                raise LocalProtocolError("the last reduction has not ended well: abandon it before the next round")
            if self._buffer is None or self._buffer.numel() != layout.total_bytes:
                self._buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=self._device)
            return self._buffer

    def form(
        self,
        incarnation: Incarnation,
        attempt: int,
        ranks: Sequence[RankId],
        my_rank: RankId,
        timeout_s: float,
        on_done: Done,
    ) -> None:
        """Form the group of ``ranks`` (same order everywhere); gives up any earlier group or attempt first.

        ``on_done`` is called once, or not at all after ``form`` or ``abandon``; a call already on its way may still
        come then, so let it carry incarnation and attempt. A single rank needs no group.
        """
        self.abandon()
        with self._lock:
            self._generation += 1
            generation = self._generation
            self._forming = [thread for thread in self._forming if thread.is_alive()]
            prefix = group_prefix(incarnation, attempt)
            place = list(ranks).index(my_rank)
            thread = threading.Thread(
                target=self._form,
                args=(generation, prefix, place, len(ranks), timeout_s, on_done),
                name=f"form {prefix}",
                daemon=True,
            )
            self._forming.append(thread)
        thread.start()

    def all_reduce(self, layout: Layout, include_raw: bool, on_done: Done) -> None:
        """Sum the side buffer over the group, in place, region by region.

        All ranks of the group must call with the same arguments. ``on_done`` is called once, or not at all after
        ``abandon`` (see ``form``); in a group of one before this returns. An error leaves the group unusable.

        Raises:
            LocalProtocolError: No group stands, or the last reduction has not ended well.
        """
        buffer = self.side_buffer(layout)
        with self._lock:
            if not self._size:
                raise LocalProtocolError("no group stands: form one before reducing")
            regions = [] if self._size == 1 else _regions(buffer, layout, include_raw)
            group = self._group
            reduction = self._round = _Reduction(len(regions), on_done)
        if not regions:
            reduction.finish_empty()
            return
        try:
            for region in regions:
                reduction.add(group.allreduce([region], _reduce_options()), has_callback=self.backend == "gloo")
        except RuntimeError as error:
            reduction.fail(str(error))
            return
        if self._device.type == "cuda":
            threading.Thread(target=_poll_works, args=(reduction,), name="nccl wait", daemon=True).start()

    def abandon(self) -> None:
        """Give up the group and whatever runs in it; the next round forms a new one. Never blocks."""
        with self._lock:
            self._generation += 1
            group, reduction = self._group, self._round
            self._group, self._round, self._size = None, None, 0
            if reduction is not None:
                reduction.silence()
            if reduction is not None and self._buffer is not None and not reduction.is_clean:
                self._parked_bytes += self._buffer.numel()
                self._parked.append((self._buffer, reduction))
                self._buffer = None
            if group is not None:
                self._parked.append(group)
        if group is not None and self._device.type == "cuda":
            # A stuck NCCL kernel holds the device; aborting may block, so it gets a thread that nobody joins.
            threading.Thread(target=group.abort, name="nccl abort", daemon=True).start()

    def _form(self, generation: int, prefix: str, place: int, size: int, timeout_s: float, on_done: Done) -> None:
        group: Any = None
        error = ""
        try:
            if size > 1:
                store = _dist.PrefixStore(prefix, self._store)
                build = _build_nccl if self._device.type == "cuda" else _build_gloo
                group = build(store, place, size, timeout_s, self._device, self._address)
        except Exception as reason:  # noqa: BLE001  whatever ended it, the controller must hear of it
            error = f"{type(reason).__name__}: {reason}"
        with self._lock:
            is_wanted = generation == self._generation
            if is_wanted and not error:
                self._group, self._size = group, size
            elif group is not None:
                self._parked.append(group)
        if is_wanted:
            on_done(error)


class _Reduction:
    """The works of one round, counted down by their callbacks."""

    def __init__(self, count: int, on_done: Done) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._error = ""
        self._on_done: Done | None = on_done
        self.works: list[Any] = []

    @property
    def is_clean(self) -> bool:
        """Every work ended well, so nothing can write to the buffer any more."""
        with self._lock:
            return self._left == 0 and not self._error

    def add(self, work: Any, has_callback: bool) -> None:
        self.works.append(work)
        if has_callback:
            work.get_future().add_done_callback(self._landed)

    def finish_empty(self) -> None:
        self._report()

    def fail(self, error: str) -> None:
        with self._lock:
            self._error = self._error or error
        self._report()

    def silence(self) -> None:
        with self._lock:
            self._on_done = None

    def _landed(self, future: Any) -> None:
        try:
            future.value()
            error = ""
        except RuntimeError as reason:
            error = str(reason)
        self.count_down(error)

    def count_down(self, error: str) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            is_over = self._left == 0 or bool(self._error)
        if is_over:
            self._report()

    def _report(self) -> None:
        with self._lock:
            on_done, self._on_done = self._on_done, None
            error = self._error
        if on_done is not None:
            on_done(error)


def _regions(buffer: torch.Tensor, layout: Layout, include_raw: bool) -> list[torch.Tensor]:
    regions = [
        buffer[: layout.f64_offset].view(torch.float32),
        buffer[layout.f64_offset : layout.raw_offset].view(torch.float64),
        buffer[layout.raw_offset :] if include_raw else buffer[:0],
    ]
    return [region for region in regions if region.numel()]


def _reduce_options() -> Any:
    options = _dist.AllreduceOptions()
    options.reduceOp = _dist.ReduceOp.SUM
    options.timeout = timedelta(seconds=REDUCE_TIMEOUT_S)
    return options


def _build_gloo(store: Any, place: int, size: int, timeout_s: float, _device: torch.device, address: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return _dist.ProcessGroupGloo(store, place, size, options)


def _build_nccl(store: Any, place: int, size: int, timeout_s: float, device: torch.device, _address: str) -> Any:
    for name, value in _NCCL_ENV.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(device)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = _dist.ProcessGroupNCCL(store, place, size, options)
    # Communicators are made at the first collective otherwise, in the caller's thread.
    group.eager_connect_single_device(device)
    return group


def _poll_works(reduction: _Reduction) -> None:
    # A NCCL future is done once the kernel is queued; only the work knows when it has ended on the device.
    deadline_s = time.monotonic() + REDUCE_TIMEOUT_S
    for work in reduction.works:
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                reduction.fail(f"no end after {REDUCE_TIMEOUT_S:g} s")
                return
            time.sleep(_NCCL_POLL_S)
        reason = work.exception()
        reduction.count_down(str(reason) if reason else "")
