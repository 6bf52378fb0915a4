"""A run's progress in words: the live line, one line per closed epoch, and the lines of its logs."""

import os
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from flodl.core.counted import counted, there
from flodl.launch.terminal import last_update
from flodl.spec.uncaught import MARK

RATE_WINDOW_S: Final = 30.0


class Progress:
    """The live line: phase, epoch, loss, samples per second and the time left, from successive snapshots."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def line(self, state: Mapping[str, Any], now_s: float) -> str:
        """The line for ``state``, seen at monotonic ``now_s``."""
        phase = phase_words(state)
        epochs, epoch = _number(state.get("num_epochs")), _number(state.get("epoch"))
        per_epoch, merged = _number(state.get("epoch_samples")), _number(state.get("samples_merged"))
        if not epochs or not per_epoch:
            return "  ".join(part for part in (phase, plain_line(state)) if part)
        phase = str(state.get("phase", ""))
        done = min(epoch, epochs) * per_epoch + (merged if epoch < epochs else 0)
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        parts = [f"{phase}: epoch {min(int(epoch) + 1, int(epochs))}/{int(epochs)}", f"{merged / per_epoch:4.0%}"]
        loss = _mean_loss(state)
        parts += [f"loss {loss:.4g}"] if loss is not None else []
        rate = self._rate()
        if rate > 0:
            parts.append(f"{rate:.4g} samples/s")
        if (
            rate > 0 and phase == "training" and not state.get("message")
        ):  # a run that stops does not train what is left
            parts.append(f"left {duration(max(epochs * per_epoch - done, 0) / rate)}")
        return "  ".join(parts)

    def _rate(self) -> float:
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def phase_words(state: Mapping[str, Any]) -> str:
    """The phase, and of a run that has not begun to train how far it has come."""
    phase, join, ranks = str(state.get("phase", "unknown")), state.get("join"), state.get("ranks")
    if phase == "waiting" and isinstance(join, dict):
        return f"{phase}: {_window(join)}"
    if phase == "staging" and isinstance(ranks, list) and ranks:
        ready = sum(isinstance(each, dict) and each.get("state") == "ready" for each in ranks)
        return f"{phase}: model built by {ready} of {counted(len(ranks), 'rank')}"
    return phase


def _window(join: Mapping[str, Any]) -> str:
    """The open join window: who is there, and when it closes."""
    wanted = join.get("target") or join.get("least")
    ranks = int(_number(join.get("ranks")))
    words = [there(ranks, int(_number(wanted)) or None, "rank")]
    closes_s, fails_s = join.get("closes_in_s"), join.get("fails_in_s")
    if join.get("is_held"):
        words.append("fdl start starts the run")
    if join.get("has_least") and isinstance(closes_s, (int, float)):
        words.append(f"it starts in {duration(closes_s)}")
    elif not join.get("has_least") and isinstance(fails_s, (int, float)):
        least = f" with fewer than {join['least']}" if join.get("least") else ""
        words.append(f"it fails in {duration(fails_s)}{least}")
    return ", ".join(words)


def plain_line(state: Mapping[str, Any]) -> str:
    """What can be said of a plain run; empty for one with the engine, and before the ranks start."""
    plain, ranks = state.get("plain"), state.get("ranks")
    if not isinstance(plain, dict) or not isinstance(ranks, list) or not ranks:
        return ""
    states = [each.get("state") for each in ranks if isinstance(each, dict)]
    frozen = states.count("frozen")
    alive = f"{states.count('live') + frozen} of {counted(len(ranks), 'rank')} alive"
    parts = [alive + (f", {frozen} frozen" if frozen else "")]
    if _number(plain.get("max_restarts")):
        parts.append(f"restart {plain.get('restarts')} of {plain.get('max_restarts')}")
    return "  ".join([*parts, f"up {duration(_number(plain.get('uptime_s')))}"])


def epoch_line(fields: Mapping[str, Any]) -> str:
    """One closed epoch as one line."""
    epochs = fields.get("num_epochs")
    parts = [f"fdl: epoch {int(_number(fields.get('epoch'))) + 1}" + (f"/{epochs}" if epochs else "")]
    loss, epoch_ms, samples = fields.get("loss"), _number(fields.get("epoch_ms")), _number(fields.get("samples"))
    parts += [f"loss {loss:.6g}"] if isinstance(loss, (int, float)) else []
    if epoch_ms > 0:
        parts += [f"{samples / epoch_ms * 1e3:.4g} samples/s", duration(epoch_ms / 1e3)]
    return "  ".join(parts)


def log_line(line: Mapping[str, Any], *, prefix: bool = True, names_head: bool = False) -> str:
    """One line of a log stream as shown: ``host:rank: text``; the head's as it is, or ``head: text``."""
    rank, text = line.get("rank", -1), last_update(str(line.get("text", "")).rstrip("\n"))
    if not prefix:
        return text
    if not isinstance(rank, int) or rank < 0:
        return f"head: {text}" if names_head else text
    return f"{line.get('host', '')}:{rank}: {text}"


def is_shown(text: str) -> bool:
    """Whether the launching terminal shows this line of a log: flodl's own frames only with ``FDL_TRACEBACK=1``."""
    return bool(os.environ.get("FDL_TRACEBACK")) or not text.startswith(MARK)


def duration(seconds: float) -> str:
    """``1.5s``, ``42s``, ``3m05s``, ``2h07m``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _mean_loss(state: Mapping[str, Any]) -> float | None:
    ranks = state.get("ranks")
    losses = [
        (float(each["loss"]), _number(each.get("share")) or 1.0)
        for each in (ranks if isinstance(ranks, list) else [])
        if isinstance(each, dict) and isinstance(each.get("loss"), (int, float))
    ]
    weight = sum(share for _, share in losses)
    return sum(loss * share for loss, share in losses) / weight if weight else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
