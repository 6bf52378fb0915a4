"""A process with a core under the virtual clock."""

from typing import TYPE_CHECKING, Any

from flodl.core import events as ev
from flodl.wire.codec import decode, encode
from tests.sim.faults import Effect

if TYPE_CHECKING:
    from tests.sim.world import World


class Actor:
    """Events in, actions out, one timer; the core's invariants are checked after each event."""

    core: Any
    name: str

    def __init__(self, world: "World") -> None:
        self.world = world
        self.is_alive = False
        self.paused_until_s = 0.0
        self.freezing: Effect | None = None
        self._waiting: list[Any] = []
        self._crash: tuple[int, int, Effect] | None = None
        self._timer = 0
        self._events = 0

    def post(self, event: Any) -> None:
        """Handle ``event`` now, or when the process runs again."""
        if not self.is_alive:
            return
        if self.world.now_s < self.paused_until_s:
            self._waiting.append(event)
            self.bite_of_freeze()
            return
        actions = self.core.handle(event, self.world.now_s)
        self._events += 1
        if self._events % self.world.check_every == 0:
            self.core.check()
        self.world.trace.append(f"{self.world.now_s:.6f} {self.name} {type(event).__name__} {len(actions)}")
        for number, action in enumerate(actions):
            if self._is_crashing(number, len(actions)):
                self.crash()
                return
            self.execute(action)
        self.arm()

    def crash_within(self, least: int, share: int, effect: Effect) -> None:
        """The process ends within its next handling that gives ``least`` actions or more: not all are carried out."""
        self._crash = (least, share, effect)

    def _is_crashing(self, number: int, count: int) -> bool:
        if self._crash is None or count < self._crash[0] or number != self._crash[1] % count:
            return False
        self._crash[2].bite()
        self._crash = None
        return True

    def crash(self) -> None:
        raise NotImplementedError

    def bite_of_freeze(self) -> None:
        if self.freezing is not None:
            self.freezing.bite()

    def freeze(self, for_s: float, effect: Effect) -> None:
        """SIGSTOP, and SIGCONT later: the driver tells the core, and all that came meanwhile is handled in order."""
        if self.world.now_s >= self.paused_until_s:
            self._waiting.append(ev.Stalled(for_s))
        self.freezing = effect
        self.paused_until_s = max(self.paused_until_s, self.world.now_s + for_s)
        self.world.at(self.paused_until_s, self._thaw)

    def _thaw(self) -> None:
        if self.world.now_s >= self.paused_until_s:
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self.post(event)

    def execute(self, action: Any) -> None:
        raise NotImplementedError

    def arm(self) -> None:
        self._timer += 1
        timer, at_s = self._timer, self.core.next_deadline_s()
        if at_s is not None and self.is_alive:
            self.world.after(max(0.0, at_s - self.world.now_s), lambda: self._tick(timer))

    def _tick(self, timer: int) -> None:
        if timer == self._timer:
            self.post(ev.Ticked())


def wire(message: Any, allowed: Any) -> Any:
    """Through the real codec, as bytes."""
    return decode(encode(message), allowed)
