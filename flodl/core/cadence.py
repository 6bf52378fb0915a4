"""The cadence of a run: ElChe proposes, the convergence guard judges, and only then is the anchor moved.

Per committed round: ElChe learns from the window and proposes an anchor; the guard sees the round's divergence with the
proposal and answers; *Stable* commits, *SuppressGrowth* drops a growth and commits a shrink, *NudgeDown* drops the
proposal and cuts the anchor; at last the meta-controller may cut it once more.

A guard of ours answers at once. One of the user's own runs in the head: the proposal is *pending* until its verdict
comes, is overdue, or the next round is there; the latter two count as Stable, with a note. Nobody waits: the windows
planned meanwhile have the anchor of before. Invariants: no growth is committed against a verdict; at most one proposal
is pending; a verdict for another round changes nothing. It knows no samples, rounds or ranks' health.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from flodl.core.actions import JobAction, Record, SendHead, Severity
from flodl.core.elche import ElChe, Proposal, WindowTiming
from flodl.core.guards import ConvergenceAction, TrendGuard, built_in
from flodl.core.meta import MetaController
from flodl.core.position import CadenceState
from flodl.errors import ConfigError
from flodl.ids import RankId, Version
from flodl.messages import CadenceSettings, GuardVerdict, JudgeRound, RoundFigures, RoundJudged, Scalar, WindowDone

VERDICT_DUE_S = 0.1
"""A guard in the head that takes longer is not waited for: the proposal is committed as if it had said Stable."""

CLEAN_VERDICTS = 5
"""``relax_up``: so many Stable verdicts in a row earn one batch more."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One round on its way from proposal to commit. ``divergence`` None: no rank had a usable one."""

    version: Version
    proposal: Proposal
    divergence: float | None
    learning_rate: float | None


class Cadence:
    """See the module docstring."""

    def __init__(self, settings: CadenceSettings, ranks: Sequence[RankId]) -> None:
        self.elche = ElChe(settings, ranks)
        self.divergence: float | None = None
        self.verdict = GuardVerdict.STABLE
        self._settings = settings
        self._guard = built_in(settings.guard)
        self._meta = MetaController(settings.meta_controller)
        self._clean_verdicts = 0
        self._pending: _Round | None = None
        self._due_s: float | None = None
        self._is_guard_failing = False

    @property
    def is_settled(self) -> bool:
        """True once the anchor has moved by less than 1 % over the last 10 rounds."""
        return self._meta.is_settled

    def observe(
        self,
        version: Version,
        reports: Mapping[RankId, WindowDone],
        reduce_ms: float,
        divergence: float | None,
        now_s: float,
    ) -> list[JobAction]:
        """A round is committed: propose, and let the guard judge.

        Args:
            version: what the round published.
            reports: the window of every rank that took part.
            reduce_ms: how long the averaging took.
            divergence: mean ``‖pre − post‖ / ‖post‖`` over the ranks that trained; None when none is known.
            now_s: monotonic seconds.
        """
        actions = self._give_up("the next round came first")
        anchor = self.elche.anchor
        proposal = self.elche.observe(_timings(reports), reduce_ms) or Proposal(anchor, anchor, None)
        this = _Round(version, self._relaxed(proposal), divergence, _learning_rate(reports))
        self.divergence = divergence
        if divergence is None:
            return actions + self._settle(this, ConvergenceAction.STABLE)
        k_max = max((report.steps for report in reports.values()), default=0)
        figures = RoundFigures(version, divergence, k_max, anchor, this.proposal.proposed_anchor)
        if self._guard is None:
            self._pending, self._due_s = this, now_s + VERDICT_DUE_S
            return [*actions, SendHead(JudgeRound(figures))]
        return actions + self._settle(this, self._guard.judge(figures), is_heard=True)

    def on_judged(self, message: RoundJudged) -> list[JobAction]:
        """The user's guard has answered, or failed."""
        this = self._pending
        if this is None or this.version != message.version:
            return []
        self._pending = self._due_s = None
        try:
            action, error = _action_of(message), message.error
        except ConfigError as refused:
            action, error = ConvergenceAction.STABLE, str(refused)
        if error:
            return self._note(this, "guard_failed", error) + self._settle(this, ConvergenceAction.STABLE, error)
        self._is_guard_failing = False
        return self._settle(this, action, is_heard=True)

    def tick(self, now_s: float) -> list[JobAction]:
        """A verdict may be overdue."""
        if self._due_s is None or now_s < self._due_s:
            return []
        return self._give_up(f"no verdict within {VERDICT_DUE_S * 1e3:g} ms")

    def next_deadline_s(self) -> float | None:
        """When the verdict is due, if one is."""
        return self._due_s

    def state(self) -> CadenceState:
        """All that there is to remember."""
        return CadenceState(self.elche.state(), self._guard.history if isinstance(self._guard, TrendGuard) else ())

    def restore(self, state: CadenceState) -> None:
        """Go on from ``state``, under this run's settings.

        Raises:
            InvariantViolation: the state contradicts itself.
        """
        self.elche.restore(state.elche)
        if isinstance(self._guard, TrendGuard):
            self._guard.recall(state.trend_history)

    # ------------------------------------------------------------------------------------------------------- details
    def _relaxed(self, proposal: Proposal) -> Proposal:
        if not self._settings.relax_up or self._clean_verdicts < CLEAN_VERDICTS:
            return proposal
        relaxed = self.elche.relax(proposal)
        if relaxed != proposal:
            self._clean_verdicts = 0
        return relaxed

    def _give_up(self, reason: str) -> list[JobAction]:
        """The pending proposal is committed without a verdict."""
        this = self._pending
        if this is None:
            return []
        self._pending = self._due_s = None
        return self._note(this, "guard_late", reason) + self._settle(this, ConvergenceAction.STABLE, reason)

    def _note(self, this: _Round, event: str, reason: str) -> list[JobAction]:
        """A warning, once per row of failures."""
        if self._is_guard_failing:
            return []
        self._is_guard_failing = True
        detail = f"version {this.version}: the convergence guard in the head: {reason}; taken as stable"
        return [Record(event, Severity.WARNING, detail, {"version": this.version, "reason": reason})]

    def _settle(
        self, this: _Round, action: ConvergenceAction, note: str = "", is_heard: bool = False
    ) -> list[JobAction]:
        """Commit what the verdict leaves of the proposal. ``is_heard``: the guard has said so itself."""
        before, proposed = this.proposal.anchor, this.proposal.proposed_anchor
        self.verdict = action.verdict
        self._apply(this.proposal, action)
        if action.verdict is not GuardVerdict.STABLE:
            self._clean_verdicts = 0
        elif is_heard:
            self._clean_verdicts += 1
        committed = self.elche.anchor
        nudge = self._meta.observe(self.elche.phase, committed, this.learning_rate, action.verdict)
        if nudge is not None:
            self.elche.nudge(nudge.factor)
        actions: list[JobAction] = []
        if not self._settings.mode.is_sync:
            actions.append(self._story(this, before, note, "" if nudge is None else nudge.reason))
        if action.verdict is not GuardVerdict.STABLE and proposed > before:
            detail = f"version {this.version}: the guard vetoes the anchor's growth from {before} to {proposed}"
            actions.append(Record("growth_vetoed", Severity.INFO, detail, {"version": this.version}))
        if action.verdict is GuardVerdict.NUDGE_DOWN:
            actions += _nudged(this.version, before, committed, "the guard asks for it")
        if nudge is not None:
            actions += _nudged(this.version, committed, self.elche.anchor, nudge.reason)
        return actions

    def _apply(self, proposal: Proposal, action: ConvergenceAction) -> None:
        match action.verdict:
            case GuardVerdict.STABLE:
                self.elche.commit(proposal)
            case GuardVerdict.SUPPRESS_GROWTH:
                kept = min(proposal.proposed_anchor, proposal.anchor)
                self.elche.commit(replace(proposal, proposed_anchor=kept))
            case GuardVerdict.NUDGE_DOWN:
                self.elche.nudge(action.factor)
            case _:
                assert_never(action.verdict)

    def _story(self, this: _Round, before: int, note: str, nudge: str) -> Record:
        """Propose, verdict, commit: one line of the event log."""
        proposed, after = this.proposal.proposed_anchor, self.elche.anchor
        detail = f"version {this.version}: anchor {before}, proposed {proposed}, {self.verdict}, committed {after}"
        fields: dict[str, Scalar | tuple[object, ...]] = {
            "version": this.version,
            "phase": self.elche.phase.name.lower(),
            "overhead": this.proposal.overhead,
            "anchor": before,
            "proposed_anchor": proposed,
            "divergence": this.divergence,
            "verdict": str(self.verdict),
            "note": note,
            "nudge": nudge,
            "committed_anchor": after,
            "learning_rate": this.learning_rate,
            "settled": self.is_settled,
        }
        return Record("cadence", Severity.INFO, detail, fields)


def _nudged(version: Version, before: int, after: int, reason: str) -> list[JobAction]:
    if before == after:
        return []
    detail = f"version {version}: the anchor is cut from {before} to {after}: {reason}"
    return [Record("anchor_nudged", Severity.INFO, detail, {"version": version, "anchor": after, "reason": reason})]


def _action_of(message: RoundJudged) -> ConvergenceAction:
    """Raises ConfigError for a factor that no guard may ask for."""
    if message.verdict is GuardVerdict.NUDGE_DOWN:
        return ConvergenceAction.nudge_down(message.factor)
    return ConvergenceAction(message.verdict)


def _timings(reports: Mapping[RankId, WindowDone]) -> dict[RankId, WindowTiming]:
    return {
        rank: WindowTiming(report.steps, report.delivered_ms, report.compute_ms, report.window_ms)
        for rank, report in reports.items()
    }


def _learning_rate(reports: Mapping[RankId, WindowDone]) -> float | None:
    """The median, the lower one of two: one odd rank is no change of schedule."""
    known = sorted(
        report.learning_rate
        for report in reports.values()
        if report.learning_rate is not None and math.isfinite(report.learning_rate)
    )
    return known[(len(known) - 1) // 2] if known else None
