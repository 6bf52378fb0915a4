"""The state machines of a rank and of a round, found by trying every event in every state."""

import copy
from collections.abc import Mapping
from typing import TypeAlias

from flodl import messages
from flodl.core import events as ev
from flodl.core import rounds
from flodl.core.rank import RankCore, Stage, Work
from flodl.ids import Grant, RoundKey, Span
from flodl.messages import CadenceSettings, Mode, Reduced, Settings, WindowDone
from tables.markdown import table

Transitions: TypeAlias = dict[tuple[str, str], dict[tuple[str, str], None]]
"""(state, event) → each outcome once: (state after, names of the actions)."""


ROUND_EVENTS = (
    "`StartRound`", "`ReduceSlice`", "`ResultReady`", "`AbortRound`", "`Commit`", "packed", "slice summed", "sum ready",
    "sum failed",
)  # fmt: skip


def rank_transitions() -> str:
    """RankCore's transitions, found by trying every event in every state that can be reached."""
    seen: Transitions = {}
    for mode in (Mode.NCCL_CADENCE, Mode.CPU_CADENCE, Mode.CPU_ASYNC):
        explore(RankCore(0, Settings(100, 10, 1, 0, CadenceSettings(mode)), False), seen)
    return f"Work:\n\n{track_table(seen, is_round=False)}\n\nRound:\n\n{track_table(seen, is_round=True)}"


def track_table(seen: Transitions, is_round: bool) -> str:
    """The transitions of one of the two tracks."""
    here = {key: outcomes for key, outcomes in seen.items() if (key[1] in ROUND_EVENTS) is is_round}
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for (state, event), outcomes in here.items():
        after = " or ".join(dict.fromkeys("stays" if to == state else f"*{to}*" for to, _ in outcomes))
        grouped.setdefault((event, after, actions_of(outcomes)), []).append(state)
    states = [str(state) for state in (Stage if is_round else Work) if state is not Work.ENDED]
    rows = [(event, in_states(found, states), after, does) for (event, after, does), found in grouped.items()]
    return table(("on", "in state", "goes to", "and does"), rows)


def in_states(found: list[str], states: list[str]) -> str:
    """The states by name, or in fewer words."""
    if len(found) == len(states):
        return "any"
    return ", ".join(f"*{state}*" for state in states if state in found)


def explore(start: RankCore, seen: Transitions) -> None:
    """Breadth first over what a core can become; fills ``seen`` with (state, event) → (state after, actions)."""
    waiting, known = [start], set()
    while waiting:
        core = waiting.pop(0)
        seen_of = core.snapshot()
        shape = tuple(str(seen_of[name]) for name in ("work", "stage", "version", "window_steps", "held_batches"))
        if shape in known or core.version > 0:
            continue
        known.add(shape)
        for name, event in rank_events(core):
            after = copy.deepcopy(core)
            actions = [type(action).__name__ for action in after.handle(event, 1.0)]
            before, now = state_of(core, name), state_of(after, name)
            if actions or now != before:
                seen.setdefault((before, name), {})[now, ", ".join(actions)] = None
                waiting.append(after)


def state_of(core: RankCore, event: str) -> str:
    """The state of the track that the event belongs to."""
    return str(core.stage if event in ROUND_EVENTS else core.work)


def rank_events(core: RankCore) -> list[tuple[str, ev.RankEvent]]:
    """Everything that may happen to ``core`` next, stale messages left out."""
    version, key = core.version, RoundKey(1, core.version + 1, 1)
    needs_lease = core.snapshot()["held_batches"] == 0
    grants = (Grant(0, (Span(0, 20),)),) if needs_lease else ()
    most = 2 if needs_lease else 1
    said: tuple[messages.DaemonToRank, ...] = (
        messages.Admitted(0, 2, (0, 1)),
        messages.FormGroup(0, 1, 1, (0, 1), 60.0),
        messages.WindowPlan(0, version, 1, most, grants),
        messages.CloseWindow(0, version),
        messages.StartRound(0, key, 0.5, 0.5, None),
        messages.ReduceSlice(0, key, 0, 2, (0, 1)),
        messages.ResultReady(0, key),
        messages.AbortRound(0, key, "a rank is lost"),
        messages.Commit(0, key),
        messages.RunEval(0, 0),
        messages.SendState(0, 1, True),
        messages.LoadState(0, 1),
        messages.FinishRank(0, "done"),
        messages.Evict(0, "silent"),
    )
    own: tuple[tuple[str, ev.RankEvent], ...] = (
        ("step done", ev.StepDone(10, 0.0, 0.1)),
        ("snapshot taken", ev.SnapshotTaken(True)),
        ("window accounted", ev.WindowAccounted(1.0, True, {})),
        ("group settled", ev.GroupSettled(1, 1, "")),
        ("packed", ev.Packed(key, True)),
        ("slice summed", ev.SliceSummed(key)),
        ("sum ready", ev.SumReady(key, "digest", 0.0, "")),
        ("sum failed", ev.SumReady(key, "", 0.0, "a peer is gone")),
        ("evaluated", ev.Evaluated(0, 0.5, "")),
        ("state written", ev.StateWritten(1, 10, "")),
        ("state taken", ev.StateTaken(1, "")),
        ("the daemon's socket closed", ev.DaemonDropped()),
    )
    heard = [(f"`{type(message).__name__}`", ev.DaemonSaid(message)) for message in said]
    return [*heard, *((name, event) for name, event in own if can_happen(core, name))]


def can_happen(core: RankCore, name: str) -> bool:
    """Whether the shell could post this event of its own now."""
    return name != "step done" or core.wants_step


def actions_of(outcomes: Mapping[tuple[str, str], None]) -> str:
    """The actions of all outcomes, each list once."""
    listed = dict.fromkeys(", ".join(f"`{name}`" for name in names.split(", ")) for _, names in outcomes if names)
    return " or ".join(listed) or "–"


def round_transitions() -> str:
    """The story of a round, told by a real ``Round``: two ranks, one failed attempt, then a commit."""
    story = rounds.Round(0, {0: (1, 2), 1: (1, 2)})
    rows = [("a new window begins", f"*{story.state}*", f"{story.verdict()}")]

    def tell(what: str) -> None:
        rows.append((what, f"*{story.state}*", f"{story.verdict()}"))

    def done(rank: int) -> WindowDone:
        return WindowDone(rank, 0, 10, 1, 1.0, True, 1.0, 1.0, 1.0)

    story.reach_min(0)
    tell("`MinReached` of rank 0")
    story.reach_min(1)
    tell("`MinReached` of rank 1")
    story.ranks_to_close()
    tell("all have done their least: `CloseWindow` goes out")
    story.finish_window(done(0))
    tell("`WindowDone` of rank 0")
    story.finish_window(done(1))
    tell("`WindowDone` of rank 1")
    key = story.start(1)
    tell("`StartRound` goes out: attempt 1")
    story.reduce(Reduced(0, key, "", True, 0.0, 1.0, "connection reset"))
    tell("`Reduced` of rank 0, with an error")
    story.abort()
    tell("`AbortRound` goes out: attempt 1 never was")
    key = story.start(1)
    tell("`StartRound` goes out: attempt 2")
    story.reduce(Reduced(0, key, "same", True, 0.0, 1.0, ""))
    tell("`Reduced` of rank 0")
    story.reduce(Reduced(1, key, "same", True, 0.0, 1.0, ""))
    tell("`Reduced` of rank 1, same digest: `Commit` goes out")
    return table(("what happens", "state", "verdict"), rows)
