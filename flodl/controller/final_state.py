"""The trained state on its way from a rank to whoever called ``join()``: it may be the user's only copy.

It comes over a bulk connection, from a thread of that; the core says when it is wanted, and hears where it is.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from flodl.controller.bulk import BulkHub
from flodl.controller.states import Arrived, private_file
from flodl.core import actions as act
from flodl.core import events as ev
from flodl.ids import HostName

NAME = "final.safetensors"


class FinalState:
    """Everything but what the bulk threads call runs in the loop."""

    def __init__(
        self,
        bulk: BulkHub,
        folder: Path,
        post: Callable[[ev.StateStored], None],
        note: Callable[[act.Record], None],
    ) -> None:
        """``folder``: the run's directory. ``post`` takes the core's event, ``note`` an entry of the event log."""
        self._bulk, self._folder, self._post, self._note = bulk, folder, post, note
        self._wanted: act.ReceiveState | None = None
        self._arrived: dict[tuple[HostName, int], Arrived] = {}

    def expect(self, host: HostName, transfer: int) -> None:
        """``host`` is about to send it; called in the loop that hears of its arrival."""
        loop = asyncio.get_running_loop()

        def on_arrived(arrived: Arrived) -> None:
            try:
                loop.call_soon_threadsafe(self._keep, arrived)
            except RuntimeError:  # the loop is closed: the run is over
                arrived.discard()

        self._bulk.expect(transfer, host, lambda: private_file(self._folder), on_arrived, or_memory=True)

    def want(self, wanted: act.ReceiveState) -> None:
        """The core waits for this one; StateStored follows."""
        self._wanted = wanted
        self._deliver()

    def close(self) -> None:
        """Let go of what nobody fetches any more."""
        for arrived in self._arrived.values():
            arrived.discard()

    def _keep(self, arrived: Arrived) -> None:
        self._arrived[arrived.host, arrived.transfer] = arrived
        self._deliver()

    def _deliver(self) -> None:
        wanted = self._wanted
        arrived = None if wanted is None else self._arrived.pop((wanted.host, wanted.transfer), None)
        if wanted is None or arrived is None:
            return
        self._wanted = None
        self._post(self._stored(arrived, wanted))

    def _stored(self, arrived: Arrived, wanted: act.ReceiveState) -> ev.StateStored:
        reason = "lost" if arrived.error is None else arrived.error.strerror
        disk = f"{self._folder}: {reason} ({arrived.size_bytes} bytes)"
        if arrived.path is None:
            return ev.StateStored("", disk)
        if arrived.size_bytes != wanted.size_bytes:
            arrived.discard()
            sizes = f"{arrived.size_bytes} bytes, announced {wanted.size_bytes}"
            return ev.StateStored("", f"rank {wanted.rank} sent {sizes}")
        if arrived.memory_fd >= 0:
            self._arrived[arrived.host, arrived.transfer] = arrived  # to the end of the run
            detail = (
                f"the final state has no place on disk: {disk}; it is in memory until the script ends: let the script "
                "save what join() returns elsewhere"
            )
            self._note(act.Record("state_in_memory", act.Severity.WARNING, detail, {}))
            return ev.StateStored(str(arrived.path), "")
        target = self._folder / NAME
        try:
            arrived.path.replace(target)
        except OSError as error:
            return ev.StateStored("", f"{target}: {error.strerror}")
        return ev.StateStored(str(target), "")
