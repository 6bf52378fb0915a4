"""Whom a run that ends still waits for, in words for whoever waits with it. Pure."""

from collections.abc import Mapping
from typing import Any, Final

PATIENCE_S: Final = 3.0
"""Most of what a run waits for at its end comes within this time."""


class Waiting:
    """``look`` at the run's snapshots; ``whom`` says what the last one had."""

    def __init__(self) -> None:
        self.whom = ""
        self._since_s = 0.0
        self._is_said = False

    def look(self, state: Mapping[str, Any], now_s: float) -> str:
        """A line for whoever waits, once the run has waited for the same ones for a while; else empty."""
        awaited = whom(state)
        if awaited != self.whom:
            self.whom, self._since_s, self._is_said = awaited, now_s, False
        if not awaited or self._is_said or now_s - self._since_s < PATIENCE_S:
            return ""
        self._is_said = True
        return f"waiting for {awaited}"


def whom(state: Mapping[str, Any]) -> str:
    """Whom the run of this snapshot waits for before it can end; empty while it does not end."""
    awaited, head = state.get("waits_for"), state.get("head")
    if not isinstance(awaited, list):
        return ""
    named = [_head(head) if each == "the head" and isinstance(head, dict) else str(each) for each in awaited]
    return ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")


def _head(head: Mapping[str, Any]) -> str:
    pid = head.get("pid")
    frozen = f", frozen by a signal: kill -CONT {pid} lets it go on" if head.get("state") == "frozen" else ""
    return f"the head (your script on the controller's machine, pid {pid}{frozen})"
