"""The one driver loop: events in, one core, actions out, in one task and in order.

Every process of a run has one. Whatever happens becomes an event in its bounded queue; ``run`` hands them to the core
one by one and executes the actions that come back. Before each event it checks the core's next deadline, which comes
back to the core as a tick.

A core judges its peers by their silence, and silence is not theirs when this process itself did not run (SIGSTOP, a
paused VM, one long call). The driver keeps a pulse on its event loop; when the time between two turns of the loop
exceeds ``STALL_S``, the core hears of the stall before it hears anything else.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from flodl.errors import InvariantViolation
from flodl.runtime.clock import Clock

QUEUE_EVENTS: Final = 1 << 16
"""Most events waiting: a minute's worth of beats of 1,000 hosts. More means that the core cannot keep up."""

PULSE_S: Final = 0.25
"""Time between two looks at the clock while nothing happens."""

STALL_S: Final = 1.0
"""A longer gap between two turns of the loop is a stall; a peer's heartbeat is due every second."""

TURN_EVENTS: Final = 64
"""Events handled before the loop's other tasks (sockets, timers) get their turn."""

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT = TypeVar("ActionT")
ActionT_co = TypeVar("ActionT_co", covariant=True)


class Core(Protocol[EventT_contra, ActionT_co]):
    """What the driver needs of a core (docs/architecture.md, the core contract)."""

    def handle(self, event: EventT_contra, now_s: float) -> Sequence[ActionT_co]:
        """Take one event; return what shall be done, in order."""
        ...

    def next_deadline_s(self) -> float | None:
        """When the core wants a tick, in the clock's seconds; None when it waits for events only."""
        ...


class Driver(Generic[EventT, ActionT]):
    """Drives one core. Use it from one event loop; only ``post_threadsafe`` may be called from elsewhere."""

    def __init__(
        self,
        core: Core[EventT, ActionT],
        execute: Callable[[ActionT], None],
        clock: Clock,
        make_tick: Callable[[], EventT],
        make_stall: Callable[[float], EventT],
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        """``execute`` starts one action and returns at once; what comes of it is posted as an event.

        ``make_tick`` and ``make_stall`` make the core's own events for a reached deadline and for a stall of so many
        seconds.
        """
        self._core = core
        self._execute = execute
        self._clock = clock
        self._make_tick = make_tick
        self._make_stall = make_stall
        self._queue: asyncio.Queue[EventT | None] = asyncio.Queue(queue_events)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._overflowed = False
        self._last_turn_s: float | None = None
        self._stalled_s = 0.0
        self._longest_gap_s = 0.0

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two turns of the loop so far."""
        return self._longest_gap_s

    def post(self, event: EventT) -> None:
        """Queue an event. A full queue ends ``run`` with InvariantViolation: nothing is ever dropped in silence."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._overflowed = True

    async def put(self, event: EventT) -> None:
        """Queue an event, waiting for room: what a socket's reader uses, so that a flood is left in the socket."""
        await self._queue.put(event)

    def post_threadsafe(self, event: EventT) -> None:
        """As ``post``, from any thread, once ``run`` has started. After its end nobody hears it.

        Raises:
            InvariantViolation: ``run`` has not started.
        """
        if self._loop is None:
            raise InvariantViolation("driver: an event from a thread before the loop runs")
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.post, event)

    def stop(self) -> None:
        """End ``run`` after the actions of the event in hand; queued events are not handled any more."""
        self._is_stopping = True
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def run(self) -> None:
        """Drive the core until ``stop``.

        Raises:
            InvariantViolation: the queue overflowed.
            Exception: whatever the core or ``execute`` raised.
        """
        self._loop = asyncio.get_running_loop()
        self._beat_pulse(self._loop)
        try:
            await self._consume()
        finally:
            if self._pulse is not None:
                self._pulse.cancel()

    async def _consume(self) -> None:
        handled = 0
        is_tick_due = True  # a tick and a queued event take turns, so that neither starves the other
        while not self._is_stopping:
            deadline_s = self._core.next_deadline_s()
            if is_tick_due and deadline_s is not None and deadline_s <= self._clock.now_s():
                is_tick_due = self._queue.empty()
                self._handle(self._make_tick())
            else:
                is_tick_due = True
                event = await self._next_event(deadline_s)
                if event is not None:
                    self._handle(event)
            handled += 1
            if handled % TURN_EVENTS == 0:
                await asyncio.sleep(0)

    async def _next_event(self, deadline_s: float | None) -> EventT | None:
        """The next event, or None when the deadline or a stop came first."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        timeout_s = None if deadline_s is None else max(deadline_s - self._clock.now_s(), 0.0)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    def _handle(self, event: EventT) -> None:
        if self._overflowed:
            raise InvariantViolation(f"driver: more than {self._queue.maxsize} events are waiting for the core")
        self._take_turn()
        if self._stalled_s:
            stalled_s, self._stalled_s = self._stalled_s, 0.0
            self._apply(self._make_stall(stalled_s))
        self._apply(event)

    def _apply(self, event: EventT) -> None:
        for action in self._core.handle(event, self._clock.now_s()):
            self._execute(action)

    def _take_turn(self) -> None:
        now_s = self._clock.now_s()
        gap_s = now_s - (now_s if self._last_turn_s is None else self._last_turn_s)
        self._last_turn_s = now_s
        self._longest_gap_s = max(self._longest_gap_s, gap_s)
        if gap_s > STALL_S:
            self._stalled_s += gap_s

    def _beat_pulse(self, loop: asyncio.AbstractEventLoop) -> None:
        self._take_turn()
        self._pulse = loop.call_later(PULSE_S, self._beat_pulse, loop)
