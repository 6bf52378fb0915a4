"""Rounds under messages in any order: nothing is committed but what every participant of the attempt agreed on."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from flodl.core.rounds import Round, RoundState, RoundVerdict, weigh
from flodl.ids import RoundKey
from flodl.messages import Reduced, WindowDone

RANKS = st.integers(0, 3)
VERSION = 7


class RoundMachine(RuleBasedStateMachine):
    """A model that remembers, per attempt, who takes part and what each has said."""

    @initialize(ranks=st.sets(RANKS, min_size=1))
    def start(self, ranks: set[int]) -> None:
        self.round = Round(VERSION, dict.fromkeys(sorted(ranks), (1, 4)))
        self.alive, self.training = set(ranks), set(ranks)
        self.below = set(ranks)
        self.said: dict[int, Reduced] = {}
        self.keys: set[RoundKey] = set()

    @rule(rank=RANKS, version=st.sampled_from([VERSION, VERSION, VERSION, VERSION - 1]))
    def finish_window(self, rank: int, version: int) -> None:
        report = WindowDone(rank, version, 4, 1, 1.0, True, None, None, 1.0)
        is_new = version == VERSION and rank in self.training
        assert self.round.finish_window(report) == is_new
        if is_new:
            self.training.discard(rank)
            self.below.discard(rank)

    @rule(rank=RANKS)
    def reach_min(self, rank: int) -> None:
        self.round.reach_min(rank)
        self.below.discard(rank)

    @rule()
    def close(self) -> None:
        is_open = self.round.state is RoundState.COLLECTING
        expected = self.training if is_open and not self.below else set()
        assert set(self.round.ranks_to_close()) == expected

    @precondition(lambda self: self.round.state is RoundState.GATHERED)
    @rule(incarnation=st.integers(0, 3))
    def start_attempt(self, incarnation: int) -> None:
        assert not self.training
        key = self.round.start(incarnation)
        assert key not in self.keys
        self.keys.add(key)
        self.said = {}

    @rule(
        rank=RANKS, digest=st.sampled_from("xxxy"), is_finite=st.sampled_from([True] * 4 + [False]),
        error=st.sampled_from([""] * 4 + ["reset"]), age=st.sampled_from([0, 0, 0, 1]),
    )  # fmt: skip
    def reduce(self, rank: int, digest: str, is_finite: bool, error: str, age: int) -> None:
        current = self.round.key or RoundKey(0, VERSION + 1, 99)
        key = RoundKey(current.incarnation, current.version, current.attempt - age)
        report = Reduced(rank, key, digest, is_finite, 0.0, 1.0, error)
        is_heard = self.round.state is RoundState.REDUCING and age == 0 and rank in self.alive
        assert self.round.reduce(report) == is_heard
        if is_heard:
            self.said[rank] = report
        self.judge()

    @precondition(lambda self: self.round.state is RoundState.REDUCING)
    @rule()
    def abort(self) -> None:
        self.round.abort()
        self.said = {}

    @precondition(lambda self: len(self.alive) > 1)
    @rule(rank=RANKS)
    def drop(self, rank: int) -> None:
        if self.alive == {rank}:
            return
        self.round.drop(rank)
        for ranks in (self.alive, self.training, self.below):
            ranks.discard(rank)
        self.said.pop(rank, None)
        self.judge()

    def judge(self) -> None:
        reports = self.said.values()
        may_commit = (
            self.round.state is RoundState.REDUCING
            and self.said.keys() == self.alive
            and all(report.is_finite and not report.error for report in reports)
            and len({report.digest for report in reports}) == 1
        )
        assert (self.round.verdict() is RoundVerdict.COMMIT) == may_commit


TestRoundMachine = RoundMachine.TestCase


@given(st.dictionaries(RANKS, st.integers(0, 1000), min_size=1), st.floats(0, 2))
def test_weights_add_up_to_one_unless_nobody_trained(samples: dict[int, int], gamma: float) -> None:
    weights = weigh(samples, gamma)
    total = 1.0 if any(samples.values()) else 0.0
    assert weights.keys() == samples.keys()
    assert abs(sum(part.weight for part in weights.values()) - total) < 1e-9
    assert abs(sum(part.buffer_weight for part in weights.values()) - total) < 1e-9
    assert all((part.weight > 0) == (samples[rank] > 0) for rank, part in weights.items())
