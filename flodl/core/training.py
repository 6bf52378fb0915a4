"""The training of one cohort: windows, rounds, epochs and evaluations, from the first version to the last commit.

Purpose: the one place where counts, samples and rounds meet. States: *forming* (group, then the round that publishes
the first version: 0, or that of a checkpoint) → *running* → *finished*. Invariants: samples are merged only at a
commit; the survivors of a loss redo the round from their own untouched parameters; a plan is made anew for every
window, from what is alive then. JobCore tells it who is alive and carries out what it returns; it knows nothing of
hosts' lives, the head or exit codes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from flodl.core.actions import (
    CloseReduction,
    JobAction,
    OpenReduction,
    Record,
    ResetStore,
    SendHead,
    SendHost,
    Severity,
)
from flodl.core.cadence import Cadence
from flodl.core.callbacks import Callbacks
from flodl.core.counted import counted, numbered
from flodl.core.disagreement import MAX_DISSENTS, MAX_NAMED, Disagreement
from flodl.core.dispatch import Dispatch
from flodl.core.formation import FORMATION_TIMEOUT_S, Formation, FormationState
from flodl.core.growth import DRAINED, Growth
from flodl.core.membership import Membership
from flodl.core.position import Position, ResumePoint, SaveReason
from flodl.core.records import EpochAccounts, LastWindow, last_windows
from flodl.core.rounds import Contribution, Round, RoundState, RoundVerdict, weigh
from flodl.core.saving import Saving
from flodl.core.supply import Merged, Supply
from flodl.ids import RankId, RoundKey, Version
from flodl.messages import (
    AbortRound,
    Admitted,
    CloseRound,
    CloseWindow,
    Commit,
    DescribeSum,
    FinishRank,
    FormGroup,
    GroupFormed,
    Layout,
    MinReached,
    OpenRound,
    Reduced,
    RoundJudged,
    Scalar,
    Settings,
    StartRound,
    SumDescribed,
    ToRank,
    WindowDone,
    WindowPlan,
)

PATIENCE_S = 1.0
"""After a failed reduce we wait this long for the news of a death before we try again with everyone."""

MAX_ROUND_ATTEMPTS = 10
"""Attempts at one round before the run is stopped as stalled."""

NONFINITE_REMEDY = "lower the learning rate, set max_grad_norm, or look at the data"


class TrainingState(StrEnum):
    """Where the training stands."""

    FORMING = "forming"
    RUNNING = "running"
    FINISHED = "finished"
    STALLED = "stalled"


class Training:
    """See the module docstring. ``stall_s`` is the longest a reduce may take with everyone alive.

    ``outcasts`` are live ranks to be lost, and why: no attempt starts until the caller has taken and buried them.
    ``lowest_loss`` is the best closed epoch's, with that epoch's number; None before the first one with a finite loss.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        merge_single_tail: bool,
        membership: Membership,
        stall_s: float,
        now_s: float,
        transfers: Iterator[int],
        growth: Growth,
        start: ResumePoint | None = None,
    ) -> None:
        position = Position() if start is None else start.position
        self.state = TrainingState.FORMING
        self.version: Version = position.version - 1
        self.is_stopping = False
        self._stop_reason = SaveReason.CHECKPOINT
        self._is_winding_up = False
        self.stalled_reason = ""
        self.last: dict[RankId, LastWindow] = {}
        self.lowest_loss: tuple[int, float] | None = None
        self.merged: dict[RankId, tuple[int, int]] = {}
        self.outcasts: dict[RankId, str] = {}
        self.cadence = Cadence(settings.cadence, membership.live)
        if start is not None and start.cadence is not None:
            self.cadence.restore(start.cadence)
        self.elche = self.cadence.elche
        self.supply = Supply(settings, merge_single_tail, position)
        self.saving = Saving(settings.checkpoint, membership, transfers)
        self.callbacks = Callbacks(settings, membership, self.elche)
        self._first_version, self._first_step = position.version, position.global_step
        self._settings, self._layout = settings, layout
        self._membership, self._growth = membership, growth
        self._stall_s = stall_s
        self._formation = Formation()
        self._dispatch = Dispatch(settings.cadence)
        self._accounts: dict[int, EpochAccounts] = {}
        self._committed_s = now_s
        self._leaving: dict[RankId, None] = {}
        self._round = _gathered_round(self.version, membership.live)
        self._disagreement: Disagreement | None = None
        self._nonfinite_rounds = 0
        self._left_out: dict[RankId, str] = {}
        self._failed_attempts = 0
        self._retry_s: float | None = None
        self._stall_deadline_s: float | None = None

    # ----------------------------------------------------------------------------------------------------- contract
    @property
    def counts(self) -> Mapping[RankId, int]:
        """Planned batches per full window."""
        return self.elche.batch_counts

    @property
    def holds_consensus(self) -> bool:
        """True from a commit to the next window: every live rank has the published consensus in its model."""
        return self.version > self._round.version

    def begin(self, now_s: float) -> list[JobAction]:
        """The cohort is admitted: form its group, publish version 0."""
        return self._form(now_s) + self._advance(now_s)

    def stop(self, reason: SaveReason, now_s: float) -> list[JobAction]:
        """End in order: windows close at the next batch boundary, one more round merges what was trained, and the
        checkpoint of it, if there is to be one, says the ``reason``.
        """
        self.is_stopping, self._stop_reason = True, reason
        self._is_winding_up = not self._settings.cadence.mode.is_async
        return self._close(self._round.ranks_to_close(now=True)) + self._advance(now_s)

    def drain(self, ranks: Iterable[RankId]) -> None:
        """These shall leave behind the next commit, when all that they trained is merged."""
        self._leaving.update(dict.fromkeys(ranks))

    def missing(self) -> tuple[RankId, ...]:
        """The ranks whose window or reduce the round still waits for."""
        return self._round.missing()

    def tick(self, now_s: float) -> list[JobAction]:
        """Deadlines."""
        actions: list[JobAction] = []
        if self._formation.needs_retry(now_s):
            actions += self._form(now_s)
        if self._retry_s is not None and now_s >= self._retry_s:
            actions += self._retry(now_s, self._round.error())
        if self._stall_deadline_s is not None and now_s >= self._stall_deadline_s:
            missing = ", ".join(map(str, self._round.missing()))
            self._stall(
                f"round {self._round.version + 1} did not finish within {self._stall_s:g} s; waiting for {missing}"
            )
        actions += self.cadence.tick(now_s) + self.saving.tick(now_s) + self._advance(now_s)
        if not self._growth.take_eagerness():
            return actions
        return actions + self._close(self._round.ranks_to_close(now=True))  # a newcomer waits for the commit

    def next_deadline_s(self) -> float | None:
        """The earliest of the formation's, the save's, the newcomers', the retry's, the stall's and the guard's."""
        waits = (self._formation, self.cadence, self.saving, self._growth)
        deadlines = (*(wait.next_deadline_s() for wait in waits), self._retry_s, self._stall_deadline_s)
        return min((at for at in deadlines if at is not None), default=None)

    def check(self) -> None:
        """All invariants of the parts."""
        self.supply.check()
        self.elche.check()

    # ----------------------------------------------------------------------------------------------- ranks' messages
    def on_group(self, message: GroupFormed, now_s: float) -> list[JobAction]:
        """A rank's group stands, or does not."""
        self._formation.answer(message.rank, message.incarnation, message.attempt, message.error)
        if self._formation.needs_retry(now_s):
            return self._form(now_s)
        return self._advance(now_s)

    def on_min(self, message: MinReached) -> list[JobAction]:
        """A rank has done its least."""
        if message.version == self.version:
            self._round.reach_min(message.rank)
        return self._close(self._round.ranks_to_close())

    def on_window(self, report: WindowDone, now_s: float) -> list[JobAction]:
        """A rank's window is over.

        Raises:
            CoverageError: it reports samples that it was not leased; the caller shall lose it.
        """
        if not self._round.finish_window(report):
            return []
        self.supply.train(report.rank, report.samples)
        if not report.is_finite:
            self._leave_out(report.rank, _what_was_not_finite(report))
        return self._close(self._round.ranks_to_close()) + self._advance(now_s)

    def on_reduced(self, report: Reduced, now_s: float) -> list[JobAction]:
        """A rank's result of an attempt."""
        if not self._round.reduce(report):
            return []
        return self._judge(now_s)

    def on_described(self, answer: SumDescribed) -> list[JobAction]:
        """What a rank held in an attempt whose digests differed."""
        found = self._disagreement
        return [
            Record(
                "digest_difference",
                Severity.CRITICAL,
                f"round {answer.key.version}: {difference.describe()}",
                {"version": answer.key.version, "rank": difference.rank, "tensors": difference.tensors[:MAX_NAMED]},
            )
            for difference in (() if found is None else found.hear(answer))
        ]

    def on_judged(self, message: RoundJudged) -> list[JobAction]:
        """The user's convergence guard has answered."""
        return self.cadence.on_judged(message)

    def lose(self, ranks: tuple[RankId, ...], now_s: float) -> list[JobAction]:
        """This module's part of the cascade: round, samples, cadence, group. The ranks were live and are buried."""
        lost = f"{numbered('rank', ranks)} {'is' if len(ranks) == 1 else 'are'} lost"
        actions = self._abort(lost) if self._round.state is RoundState.REDUCING else []
        for rank in ranks:
            self._round.drop(rank)
            self._left_out.pop(rank, None)
            self._leaving.pop(rank, None)
            self.supply.reclaim(rank)
            self.elche.remove_rank(rank)
        self._failed_attempts = 0
        actions += self.saving.lose(ranks, now_s)
        if not self._membership.live:
            return actions
        actions += self._pass_on_calls(ranks)
        if self.state in (TrainingState.FINISHED, TrainingState.STALLED):
            return actions
        actions += self._form(now_s)
        return actions + self._close(self._round.ranks_to_close(now=self.is_stopping)) + self._advance(now_s)

    # ---------------------------------------------------------------------------------------------------- one round
    def _advance(self, now_s: float) -> list[JobAction]:
        """Start an attempt when the windows are gathered and the plane stands."""
        if self.state in (TrainingState.FINISHED, TrainingState.STALLED) or self._retry_s is not None or self.outcasts:
            return []
        newcomers = self._growth.take(now_s)
        if newcomers:
            return self._take_in(newcomers, now_s) + self._advance(now_s)
        if self._growth.is_handing_over or self._round.state is not RoundState.GATHERED or not self._is_plane_ready():
            return []
        if not any(report.is_finite for report in self._round.reports.values()):
            self._stall(f"loss or parameters are not finite on every rank: {self._name_left_out()}; {NONFINITE_REMEDY}")
            return []
        return self._start_attempt(now_s)

    def _take_in(self, ranks: tuple[RankId, ...], now_s: float) -> list[JobAction]:
        """Newcomers that hold the newest version are members from now on, with nothing to give to this round."""
        self._membership.admit(ranks)
        live = self._membership.live
        for rank in ranks:
            self.elche.add_rank(rank)
            self._round.add(rank)
        detail = f"{numbered('rank', ranks)} joined at version {self.version}; {len(live)} ranks train now"
        note = Record("rank_joined", Severity.INFO, detail, {"version": self.version, "ranks": ranks})
        size = len(self._membership)
        admitted = [self._to(rank, Admitted(rank, size, live, self.version)) for rank in live]
        return [note, *admitted, *self._form(now_s)]

    def _is_plane_ready(self) -> bool:
        return not self._settings.cadence.mode.is_collective or (
            self._formation.state is FormationState.FORMED
            and self._formation.incarnation == self._membership.incarnation
        )

    def _start_attempt(self, now_s: float) -> list[JobAction]:
        live = self._membership.live
        samples = self._round.trained_samples
        key = self._round.start(self._membership.incarnation)
        contributions = weigh(samples, self._settings.cadence.gamma)
        reports = self._round.reports
        source = max(live, key=lambda rank: (samples[rank], reports[rank].is_finite, -rank))
        if not any(samples.values()):
            contributions[source] = Contribution(1.0, 1.0)  # version 0, or a stop before the first step
        raw_source = source if self._is_seed or self._is_last_round() else None
        self._stall_deadline_s = now_s + self._stall_s
        actions = self._open_plane(key)
        for rank in live:
            part = contributions[rank]
            go = StartRound(rank, key, part.weight, part.buffer_weight, raw_source)
            actions.append(self._to(rank, go))
        return actions

    @property
    def _is_seed(self) -> bool:
        return self._round.version == self._first_version - 1

    def _is_last_round(self) -> bool:
        return self._is_winding_up or self.supply.is_last_dealt

    def _open_plane(self, key: RoundKey) -> list[JobAction]:
        if self._settings.cadence.mode.is_collective:
            return []
        live = self._membership.live
        hosts = self._membership.hosts_of(live)
        # The start is rank 0's to the bit, and what is returned at the end is not rounded.
        bf16 = self._settings.cadence.bf16_wire and not self._is_seed and not self._is_last_round()
        actions: list[JobAction] = [OpenReduction(key, hosts, self._layout, bf16)] if len(hosts) > 1 else []
        for host in hosts:
            ranks = self._membership.on_host(host, live)
            actions.append(SendHost(host, OpenRound(key, ranks, self._layout, len(hosts), bf16)))
        return actions

    def _judge(self, now_s: float) -> list[JobAction]:
        match self._round.verdict():
            case RoundVerdict.COMMIT:
                return self._commit(now_s)
            case RoundVerdict.NOT_FINITE:
                return self._exclude_nonfinite(now_s)
            case RoundVerdict.DISAGREED:
                return self._disagree(now_s)
            case RoundVerdict.BROKEN:
                if self._retry_s is None:
                    self._retry_s = now_s + PATIENCE_S
                return []
            case RoundVerdict.WAIT:
                return []
            case _ as verdict:
                assert_never(verdict)

    def _disagree(self, now_s: float) -> list[JobAction]:
        """Redo the round; who differs is told, then in which tensors; one that keeps differing is cast out."""
        key = self._round.key
        assert key is not None
        self._disagreement = found = Disagreement(key, self._round.digests())
        ranks = found.dissenters
        detail = f"round {key.version}: rank {', '.join(map(str, ranks))} holds another consensus than the others"
        note = Record("digest_mismatch", Severity.CRITICAL, detail, {"version": key.version, "ranks": ranks})
        asks = [self._to(rank, DescribeSum(rank, key)) for rank in found.asked]
        for rank in ranks if found.has_majority else ():
            if self._round.count_dissent(rank) >= MAX_DISSENTS:
                self.outcasts[rank] = f"held another consensus in {MAX_DISSENTS} attempts at round {key.version}"
        return [note, *asks, *self._retry(now_s, detail)]

    def _retry(self, now_s: float, reason: str) -> list[JobAction]:
        was_broken = self._round.verdict() is RoundVerdict.BROKEN
        detail = f"round {self._round.version + 1}, attempt {self._round.attempts} failed: {reason}"
        actions: list[JobAction] = [Record("round_failed", Severity.WARNING, detail, {})]
        self._failed_attempts += 1
        actions += self._abort(reason)
        if self._failed_attempts >= MAX_ROUND_ATTEMPTS:
            self._stall(f"round {self._round.version + 1} failed {MAX_ROUND_ATTEMPTS} times; the last time: {reason}")
            return actions
        if was_broken:
            actions += self._form(now_s)
        return actions + self._advance(now_s)

    def _exclude_nonfinite(self, now_s: float) -> list[JobAction]:
        ranks = self._round.not_finite()
        actions = self._abort("a contribution is not finite")
        for rank in ranks:
            self._leave_out(rank, _what_was_not_finite(self._round.reports[rank]))
        return actions + self._advance(now_s)

    def _leave_out(self, rank: RankId, what: str) -> None:
        """The rank takes part in this round with zeros; what it trained returns to the pool."""
        self._left_out[rank] = what
        self._round.discard_samples(rank)
        self.supply.untrain(rank)

    def _abort(self, reason: str) -> list[JobAction]:
        """The attempt never was: every live rank and the plane drop it."""
        key = self._round.abort()
        self._retry_s = self._stall_deadline_s = None
        live = self._membership.live
        actions: list[JobAction] = [self._to(rank, AbortRound(rank, key, reason)) for rank in live]
        if not self._settings.cadence.mode.is_collective:
            actions += [SendHost(host, CloseRound(key)) for host in self._membership.hosts_of(live)]
            actions.append(CloseReduction(key))
        return actions

    # ------------------------------------------------------------------------------------------------------- commit
    def _commit(self, now_s: float) -> list[JobAction]:
        reports, key = self._round.reports, self._round.key
        assert key is not None
        self._retry_s = self._stall_deadline_s = None
        self._failed_attempts = 0
        self.version = key.version
        actions: list[JobAction] = [self._to(rank, Commit(rank, key)) for rank in reports]
        if not self._settings.cadence.mode.is_collective:
            actions.append(CloseReduction(key))
        actions += [self._merge(key), *self._count_nonfinite()]
        self._committed_s = now_s
        self._dispatch.settle({rank: report.steps for rank, report in reports.items()})
        if not self._is_seed:
            self.last |= last_windows(reports)
            divergence = self._round.divergence()
            actions += self.cadence.observe(
                self.version, reports, self._round.reduce_ms(self._settings.cadence.mode.is_async), divergence, now_s
            )
        self.state = TrainingState.RUNNING if self.state is TrainingState.FORMING else self.state
        epochs = self.supply.close_epochs()
        for epoch in epochs:
            actions += self._close_epoch(epoch, now_s)
        actions += [*self.callbacks.ask(), *self._offer(epochs, now_s)]
        return actions + self._let_leave(now_s) + self._next_window()

    def _let_leave(self, now_s: float) -> list[JobAction]:
        """Ranks that are drained have given all that they had; one that is busy for the run leaves a commit later."""
        ranks = tuple(self._leaving)
        is_last = self.state is TrainingState.STALLED or self.supply.is_exhausted or self.is_stopping
        is_busy = self.saving.is_from(ranks)
        stay = [rank for rank in self._membership.live if rank not in ranks]
        are_enough = len(stay) >= (2 if self._settings.cadence.mode.is_collective else 1)  # others may have died since
        if not ranks or is_last or is_busy or not are_enough:
            return []
        self._leaving = {}
        self._membership.release(ranks)
        for rank in ranks:
            self.supply.reclaim(rank)
            self.elche.remove_rank(rank)
        left = len(self._membership.live)
        trains = f"{counted(left, 'rank')} {'trains' if left == 1 else 'train'} on"
        detail = f"{numbered('rank', ranks)} left at version {self.version}; {trains}"
        note = Record("rank_left", Severity.INFO, detail, {"version": self.version, "ranks": ranks})
        leave = [self._to(rank, FinishRank(rank, DRAINED)) for rank in ranks]
        return [note, *leave, *self._pass_on_calls(ranks), *self._form(now_s)]

    def _offer(self, epochs: Sequence[int], now_s: float) -> list[JobAction]:
        """Every rank holds the new version: save it where that is due, from the rank with most work in it."""
        self.saving.close_epochs(epochs)
        is_last = self.state is TrainingState.STALLED or self.supply.is_exhausted or self._is_winding_up
        if is_last:
            self.saving.forget_handover()
        elif self._growth.are_waiting:
            self.saving.demand_handover()
        if is_last and not self._is_seed:
            self.saving.demand(self._stop_reason)
        reports = self._round.reports
        ranks = sorted(self._membership.live, key=lambda rank: (rank in self._leaving, -reports[rank].samples, rank))
        steps = self._first_step + sum(steps for steps, _ in self.merged.values())
        position = Position(self.version, self.supply.epoch, self.supply.covered, steps, len(ranks))
        point = ResumePoint(position, self.cadence.state(), self._settings)
        actions = self.saving.hold(point, ranks, now_s)
        if self.saving.is_handing_over:
            self._growth.begin(now_s)
        return actions

    def _merge(self, key: RoundKey) -> JobAction:
        epoch = self.supply.epoch
        spans: list[tuple[int, int, int, int]] = []
        for rank, report in self._round.reports.items():
            merged = self.supply.merge(rank)
            spans += [(rank, each.pass_index, each.span.start, each.span.count) for each in merged]
            self._account(report, merged)
        detail = f"version {key.version}: {sum(count for *_, count in spans)} samples merged"
        fields: dict[str, Scalar | tuple[object, ...]] = {
            "version": key.version,
            "incarnation": key.incarnation,
            "attempt": key.attempt,
            "epoch": epoch,
            "spans": tuple(spans),
            "counts": tuple((rank, report.steps) for rank, report in self._round.reports.items()),
            "reduce_ms": self._round.reduce_ms(self._settings.cadence.mode.is_async),
        }
        return Record("commit", Severity.INFO, detail, fields)

    def _account(self, report: WindowDone, merged: tuple[Merged, ...]) -> None:
        """A window that reaches over an epoch's end counts for each epoch by the samples in it."""
        steps, samples = self.merged.get(report.rank, (0, 0))
        self.merged[report.rank] = (steps + report.steps, samples + report.samples)
        by_epoch: dict[int, int] = {}
        for each in merged:
            by_epoch[each.epoch] = by_epoch.get(each.epoch, 0) + each.span.count
        for epoch, count in by_epoch.items():
            self._accounts.setdefault(epoch, EpochAccounts(epoch, self._committed_s)).add(report, count)

    def _count_nonfinite(self) -> list[JobAction]:
        ranks = [rank for rank, report in self._round.reports.items() if not report.is_finite]
        named, self._left_out = self._name_left_out(), {}
        self._nonfinite_rounds = self._nonfinite_rounds + 1 if ranks else 0
        if not ranks:
            return []
        detail = f"version {self.version}: not finite and left out: {named}"
        if self._nonfinite_rounds >= self._settings.max_nonfinite:
            self._stall(
                f"not finite in {self._nonfinite_rounds} rounds in a row (max_nonfinite); at last {detail}; "
                f"{NONFINITE_REMEDY}"
            )
        return [Record("nonfinite", Severity.WARNING, detail, {"version": self.version, "ranks": tuple(ranks)})]

    def _name_left_out(self) -> str:
        return ", ".join(f"rank {rank} ({self._left_out[rank]})" for rank in sorted(self._left_out))

    def _close_epoch(self, epoch: int, now_s: float) -> list[JobAction]:
        devices = {member.rank: member.device for member in self._membership.all()}
        accounts = self._accounts.pop(epoch, None) or EpochAccounts(epoch, now_s)  # a part without a batch has none
        report = accounts.report(self.version, devices, now_s)
        loss = "-" if report.avg_loss is None else f"{report.avg_loss:.6g}"
        fields = {
            "epoch": epoch,
            "num_epochs": self.supply.epochs,
            "loss": report.avg_loss,
            "samples": report.samples,
            "epoch_ms": report.epoch_ms,
            "version": report.version,
            "shares": tuple(report.per_rank_batch_share.items()),
        }
        actions: list[JobAction] = [
            Record("epoch", Severity.INFO, f"epoch {epoch + 1}: loss {loss}", fields),
            SendHead(report),
        ]
        self._note_loss(epoch, report.avg_loss)
        self.callbacks.close_epoch(epoch)
        return actions

    def _note_loss(self, epoch: int, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss) and (self.lowest_loss is None or loss < self.lowest_loss[1]):
            self.lowest_loss = (epoch, loss)

    def _next_window(self) -> list[JobAction]:
        if self.state is TrainingState.STALLED:
            return []
        if self.supply.is_exhausted or self._is_winding_up:
            self.state = TrainingState.FINISHED
            return self._note_nothing_left() if self._is_seed and not self.is_stopping else []
        live = self._membership.live
        if self.is_stopping:  # one more round merges what the ranks have done beyond their counts
            self._is_winding_up = True
            plans = {rank: WindowPlan(rank, self.version, 0, 0, ()) for rank in live}
        else:
            plans = self._dispatch.plan(self.version, live, self.elche, self.supply)
        self.saving.release()
        progress = self.supply.merged_samples
        plans = {rank: replace(plan, progress_samples=progress) for rank, plan in plans.items()}
        self._round = Round(self.version, {rank: (plan.min_steps, plan.max_steps) for rank, plan in plans.items()})
        return [self._to(rank, plan) for rank, plan in plans.items()]

    def _note_nothing_left(self) -> list[JobAction]:
        source = self._settings.checkpoint.resume_from
        detail = f"nothing left to do: all {self.supply.epochs} epochs are in {source} already"
        return [Record("nothing_left", Severity.INFO, detail, {"path": source})]

    # ------------------------------------------------------------------------------------------------------ details
    def _form(self, now_s: float) -> list[JobAction]:
        if not self._settings.cadence.mode.is_collective:
            return []
        live, incarnation = self._membership.live, self._membership.incarnation
        errors = "; ".join(f"rank {rank}: {error}" for rank, error in self._formation.errors.items())
        silent = self._formation.silent(now_s)
        self._formation.begin(incarnation, live, now_s)
        if self._formation.state is FormationState.FAILED:
            if 0 < len(silent) < len(live):
                reason = f"did not answer in {FORMATION_TIMEOUT_S:g} s when the collective group was formed"
                self.outcasts |= dict.fromkeys(silent, reason)
                return []
            self._stall(f"the collective group of ranks {live} does not form: {errors or 'no answer in time'}")
            return []
        attempt = self._formation.attempt
        return [
            ResetStore(incarnation),
            *(self._to(rank, FormGroup(rank, incarnation, attempt, live, FORMATION_TIMEOUT_S)) for rank in live),
        ]

    def _pass_on_calls(self, lost: tuple[RankId, ...]) -> list[JobAction]:
        """To a rank whose model is the consensus; in the middle of a lockstep window there is none, behind it is."""
        self.callbacks.lose(lost)
        return self.callbacks.ask() if self.holds_consensus or self._settings.cadence.mode.is_async else []

    def _close(self, ranks: tuple[RankId, ...]) -> list[JobAction]:
        return [self._to(rank, CloseWindow(rank, self.version)) for rank in ranks]

    def _stall(self, reason: str) -> None:
        self.state, self.stalled_reason = TrainingState.STALLED, reason
        self._stop_reason = SaveReason.REDUCE_STALL
        self._retry_s = self._stall_deadline_s = None

    def _to(self, rank: RankId, message: ToRank) -> JobAction:
        return SendHost(self._membership[rank].host, message)


def _gathered_round(version: Version, ranks: tuple[RankId, ...]) -> Round:
    """A round that nobody trained for: everyone is done at once."""
    waiting = Round(version, dict.fromkeys(ranks, (0, 0)))
    for rank in ranks:
        waiting.finish_window(WindowDone(rank, version, 0, 0, 0.0, True, None, None, 0.0))
    return waiting


def _what_was_not_finite(report: WindowDone) -> str:
    if report.nonfinite_step:
        return f"the loss of its step {report.nonfinite_step}"
    return f"its parameters after its step {report.total_steps}"
