"""What a run's snapshots say about one host that joins it: who takes part, who is sent away, how it ends. Pure."""

from collections.abc import Mapping
from typing import Any

from flodl.core.growth import DRAINED, ENDED_WITH_RUN
from flodl.ids import HostName, RankId
from flodl.launch.progress import phase_words


class Presence:
    """``look`` at the run's snapshots, the first of them before the host's daemon is started."""

    def __init__(self, host: HostName, run_id: str) -> None:
        self.has_come = False
        self.has_joined = False
        self.took_part = False
        self.refusals: list[str] = []
        self.refused: RankId = -1
        self._host, self._run_id = host, run_id
        self._strangers: set[RankId] | None = None
        self._seen: dict[RankId, str] = {}
        self._losses: dict[RankId, str] = {}
        self._is_leaving = False
        self._ending = ""
        self._message = ""

    @property
    def has_failed(self) -> bool:
        """True when the run has failed, as far as was seen."""
        return self._ending == "failed"

    def look(self, state: Mapping[str, Any]) -> list[str]:
        """The lines for whoever watches, about what is new."""
        ranks = [each for each in state.get("ranks", []) if each["host"] == self._host]
        if self._strangers is None:  # ranks of an earlier stay under the same name
            self._strangers = {each["rank"] for each in ranks}
            return []
        outcome = state.get("outcome") or {}
        self._ending = outcome.get("status") or state.get("ending") or self._ending
        self._message = state.get("message") or self._message
        mine = {each["rank"]: each for each in ranks if each["rank"] not in self._strangers}
        lines = self._coming(state) + self._arrival(list(mine))
        for rank, each in mine.items():
            lines += self._change(rank, each["state"], each.get("reason", ""), state.get("phase") == "training")
        return lines + self._departure(state)

    @property
    def lost(self) -> str:
        """Why the host has left a run that goes on, when its ranks took part and all of them are lost; else empty."""
        is_over = bool(self._ending) or self._is_leaving or not self.took_part
        if is_over or not self._seen or any(state != "dead" for state in self._seen.values()):
            return ""
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in self._losses.items())

    def farewell(self) -> str:
        """The last line, after the daemon has left in order."""
        if self._ending:
            message = f": {self._message}" if self._message else ""
            return f"host {self._host} has left: run {self._run_id} {self._ending}{message}"
        return f"host {self._host} has left" + (" in order; the run goes on" if self._is_leaving else " with the run")

    def _coming(self, state: Mapping[str, Any]) -> list[str]:
        """Of a host that comes before the start."""
        is_there = any(each["host"] == self._host and each["state"] != "gone" for each in state.get("hosts", []))
        if self.has_come or not is_there or state.get("phase") != "waiting":
            return []
        self.has_come = True
        return [f"host {self._host} is there; run {self._run_id} is {phase_words(state)}"]

    def _arrival(self, ranks: list[RankId]) -> list[str]:
        if self.has_joined or not ranks:
            return []
        self.has_joined = True
        return [f"joined run {self._run_id} as host {self._host}: starting rank {', '.join(map(str, ranks))}"]

    def _change(self, rank: RankId, state: str, reason: str, does_train: bool) -> list[str]:
        before, self._seen[rank] = self._seen.get(rank, ""), state
        if state == before or {state, before} <= {"live", "suspect"}:
            return []
        match state:
            case "ready":
                return [f"rank {rank} is ready" + ("; it takes part from the next commit on" if does_train else "")]
            case "live" | "suspect":
                self.took_part = True
                return [f"rank {rank} takes part"]
            case "finished":
                self._is_leaving |= does_train
                return []
            case "dead" if reason == DRAINED:
                self._is_leaving = True
                return []
            case "dead" if reason == ENDED_WITH_RUN and before in ("", "spawned", "ready"):
                return []
            case "dead" if before in ("live", "suspect", "finished"):
                self._losses[rank] = reason
                return [f"rank {rank} is lost: {reason}"] if does_train else []
            case "dead":
                self.refused = rank if not self.refusals else self.refused
                self.refusals.append(f"rank {rank}: {reason}")
                return [f"rank {rank} does not take part: {reason}"]
            case _:
                return []

    def _departure(self, state: Mapping[str, Any]) -> list[str]:
        is_draining = any(each["host"] == self._host and each["state"] == "draining" for each in state.get("hosts", []))
        if not is_draining or self._is_leaving:
            return []
        self._is_leaving = True
        return [f"host {self._host} leaves at the next commit, without loss"]
