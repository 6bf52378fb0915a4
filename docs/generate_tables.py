"""Writes the tables of the documents that can be read off the code.

    python docs/generate_tables.py            rewrite the documents
    python docs/generate_tables.py --check    exit 1 and name the documents that are not up to date

A generated part of a document stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; ``PARTS`` maps the
names to the functions that make them. Everything else in a document is written by hand.
"""

import argparse
import ast
import copy
import inspect
import json
import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, get_args

import click
from pydantic import BaseModel

import flodl_cli.main
from flodl import messages
from flodl.config.model import ClusterSpec
from flodl.core import elche, finale, formation, guards, meta, restarts, rounds, training
from flodl.core import events as ev
from flodl.core.rank import RankCore, Stage, Work
from flodl.ids import Grant, RoundKey, Span
from flodl.messages import CadenceSettings, GuardKind, GuardSettings, GuardVerdict, Mode, Reduced, Settings, WindowDone
from flodl.runtime import line, mux, streams
from flodl.wire import chunks, codec, frames, handshake

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
Transitions: TypeAlias = dict[tuple[str, str], dict[tuple[str, str], None]]
"""(state, event) → each outcome once: (state after, names of the actions)."""

MARKED = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, report what is out of date")
    is_check = parser.parse_args().check
    stale = [path for path in sorted(DOCS.glob("*.md")) if render(path.read_text()) != path.read_text()]
    for path in stale:
        if not is_check:
            path.write_text(render(path.read_text()))
        sys.stdout.write(f"{'out of date' if is_check else 'written'}: {path.relative_to(ROOT)}\n")
    return 1 if is_check and stale else 0


def render(text: str) -> str:
    """``text`` with every generated part made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; `|` inside cells is escaped."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


# --------------------------------------------------------------------------------------------------------- messages
def who_says_what() -> str:
    """The unions of ``flodl.messages``: what each connection may carry."""
    ways = (
        ("rank → daemon", messages.RankToDaemon),
        ("daemon → rank", messages.DaemonToRank),
        ("daemon → controller", messages.FromDaemon),
        ("controller → daemon", messages.ToDaemon),
        ("head → controller", messages.FromHead),
        ("controller → head", messages.ToHead),
        ("client → controller", messages.FromClient),
        ("controller → client", messages.ToClient),
    )
    return table(("way", "messages"), [(way, ", ".join(f"`{name}`" for name in _names(union))) for way, union in ways])


def message_fields() -> str:
    """Every message with its fields and the first sentence of its docstring."""
    speakers = (messages.handshake, messages.daemon, messages.rank, messages.controller, messages.head)
    said = [each for speaker in speakers for each in vars(speaker).values() if each in get_args(messages.Message)]
    rows = []
    for cls in said:
        listed = ", ".join(f"`{each.name}: {_type(each.type)}`" for each in fields(cls)) or "–"
        rows.append((f"`{cls.__name__}`", listed, first_sentence(cls.__doc__)))
    return table(("message", "fields", "meaning"), rows)


def nested_types() -> str:
    """The dataclasses and enums that stand inside messages."""
    spawning = (messages.Device, messages.RankSpec, messages.PlainGroup)
    own = (messages.Layout, *spawning, messages.RankBeat, messages.RoundFigures)
    rows = [
        (
            f"`{cls.__name__}`",
            ", ".join(f"`{each.name}: {_type(each.type)}`" for each in fields(cls)),
            first_sentence(cls.__doc__),
        )
        for cls in (Span, Grant, RoundKey, *own, Settings, CadenceSettings, GuardSettings)
    ]
    rows += [
        (f"`{enum.__name__}`", ", ".join(f"`{each}`" for each in enum), first_sentence(enum.__doc__))
        for enum in (Mode, GuardKind, GuardVerdict)
    ]
    return table(("type", "fields", "meaning"), rows)


def _names(union: Any) -> list[str]:
    return [cls.__name__ for cls in (get_args(union) or (union,))]


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = str(annotation) if "[" in str(annotation) or "|" in str(annotation) else text
    return re.sub(r"\b(?:flodl(?:\.[a-z_]+)+|collections\.abc|typing)\.", "", text)


def first_sentence(doc: str | None) -> str:
    """The first sentence of a docstring on one line."""
    text = " ".join((doc or "").split()).replace("``", "`")
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


# ----------------------------------------------------------------------------------------------------------- limits
def limits() -> str:
    """Named limits of the wire, with the reason that stands beside each."""
    chosen: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (frames, ("PRE_AUTH_FRAME_BYTES", "FRAME_BYTES")),
        (codec, ("MAX_DEPTH", "MAX_ELEMENTS")),
        (chunks, ("CHUNK_BYTES", "MAX_CHUNK_BYTES", "MAX_TOTAL_BYTES")),
        (handshake, ("TOKEN_BYTES", "NONCE_BYTES", "PROOF_BYTES", "MAX_NAME_LENGTH", "MAX_REASON_LENGTH")),
        (mux, ("MAX_STRANGERS", "STRANGER_S", "LOGGED_STRANGERS")),
        (line, ("TLS_HANDSHAKE_BYTES",)),
        (streams, ("OUTBOUND_BYTES", "INBOX_FRAMES", "INBOX_BYTES", "CLOSE_S", "SILENCE_S")),
    )
    return constants(chosen)


def core_limits() -> str:
    """Deadlines and counts of the cores."""
    return constants(
        (
            (formation, ("FORMATION_TIMEOUT_S", "MAX_ATTEMPTS")),
            (training, ("PATIENCE_S", "MAX_ROUND_ATTEMPTS")),
            (finale, ("STATE_TIMEOUT_S", "KILL_MARGIN_S")),
            (restarts, ("MAX_PORT_TRIES",)),
        )
    )


def elche_constants() -> str:
    """The numbers of the cadence: ElChe, guards, meta-controller."""
    rows = []
    for module in (elche, guards, meta):
        where = module.__name__.removeprefix("flodl.core.")
        found = re.findall(r"^([A-Z]\w+) = [^\n#]+(?:# ([^\n]*))?$", inspect.getsource(module), re.MULTILINE)
        numbers = [(name, comment) for name, comment in found if isinstance(getattr(module, name), int | float)]
        rows += [(f"`{where}.{name}`", f"{getattr(module, name):g}", comment) for name, comment in numbers]
    return table(("constant of `core`", "value", "meaning"), rows)


def constants(chosen: Iterable[tuple[Any, tuple[str, ...]]]) -> str:
    """Constants with their values and the docstring under each."""
    rows = []
    for module, names in chosen:
        said = documented(ast.parse(inspect.getsource(module)).body)
        where = module.__name__.removeprefix("flodl.")
        rows += [(f"`{where}.{name}`", human(name, getattr(module, name)), said.get(name, "")) for name in names]
    return table(("limit", "value", "why"), rows)


def human(name: str, value: Any) -> str:
    """A constant's value with its unit."""
    if name.endswith("_BYTES") and value >= 1024:
        for power, unit in ((40, "TiB"), (20, "MiB"), (10, "KiB")):
            if value % (1 << power) == 0:
                return f"{value / (1 << power):g} {unit}"
    unit = next((unit for suffix, unit in (("_BYTES", " bytes"), ("_S", " s")) if name.endswith(suffix)), "")
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value:,}{unit}"


def documented(body: list[ast.stmt]) -> dict[str, str]:
    """Names assigned in ``body`` that have a string below them, with that string on one line."""
    found: dict[str, str] = {}
    for before, after in pairwise(body):
        target = before.targets[0] if isinstance(before, ast.Assign) else getattr(before, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return found


# ---------------------------------------------------------------------------------------------------- state machines
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


# ------------------------------------------------------------------------------------------------- surface: CLI, file
def commands() -> str:
    """Every command with its options, as click knows them."""
    parts = []
    context = click.Context(flodl_cli.main.cli)
    for name in flodl_cli.main.COMMANDS:
        command = flodl_cli.main.cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            parts += [describe_command(f"{name} {sub}", each) for sub, each in sorted(command.commands.items())]
        else:
            parts.append(describe_command(name, command))
    return "\n\n".join(parts)


def describe_command(name: str, command: click.Command) -> str:
    """One command: usage, help, options."""
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    text = re.sub(r"\b(RUN|FILE|SCRIPT|PATH)\b", r"`\1`", " ".join((command.help or "").split()))
    rows = [
        (
            ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts)),
            option.metavar or "",
            option.help or "",
        )
        for option in command.params
        if isinstance(option, click.Option)
    ]
    listed = "\n\n" + table(("option", "value", "does"), rows) if rows else ""
    return f"**`fdl {name} {usage}`**\n\n{text}{listed}"


def cluster_file() -> str:
    """Every key of the cluster file with its type, default and meaning."""
    return table(("key", "type", "default", "meaning"), list(keys_of(ClusterSpec, "cluster")))


def keys_of(model: type[BaseModel], path: str) -> Iterable[tuple[str, ...]]:
    """The rows of ``model``, nested models in their place."""
    shapes = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        nested = next((arg for arg in _arguments(field.annotation) if is_model(arg)), None)
        is_list = "tuple" in str(field.annotation)
        key = f"{path}.{name}" + ("[]" if nested and is_list else "")
        if nested is not None:
            yield from keys_of(nested, key)
            continue
        default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
        yield f"`{key}`", _shape(shapes[name]), default, " ".join((field.description or "").split())


def is_model(annotation: Any) -> bool:
    """Whether ``annotation`` is one of the file's sections."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _arguments(annotation: Any) -> list[Any]:
    inner = [leaf for each in get_args(annotation) for leaf in _arguments(each)]
    return [annotation, *inner]


def _default(value: Any) -> str:
    if value is None:
        return "–"
    if value == () or isinstance(value, Mapping):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _shape(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    options = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if "const" in schema:
        return f"`{schema['const']}`"
    if options:
        return " or ".join(_shape(each) for each in options)
    words = {"array": "list", "object": "mapping", "string": "text", "integer": "whole number", "boolean": "yes/no"}
    kind = str(schema.get("type", "text"))
    return words.get(kind, kind)


def knobs() -> str:
    """Every knob of ``TrainerConfig`` and the builder."""
    return _knobs(ROOT / "flodl/spec/knobs.py", "Knobs")


def cadence_knobs() -> str:
    """Every knob of ``ElCheConfig``."""
    return _knobs(ROOT / "flodl/spec/cadence.py", "CadenceKnobs")


def _knobs(path: Path, name: str) -> str:
    tree = ast.parse(path.read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    said = documented(cls.body)
    rows = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            default = next((word.value for word in node.value.keywords if word.arg == "default"), None)
            rows.append((f"`{node.target.id}`", _knob_default(default), said.get(node.target.id, "")))
    return table(("knob", "default", "meaning"), rows)


def _knob_default(node: ast.expr | None) -> str:
    if node is None:
        return "required"
    text = ast.unparse(node)
    if text.startswith("CadenceSettings()."):
        return f"`{getattr(CadenceSettings(), text.removeprefix('CadenceSettings().'))}`"
    return f"`{text}`"


def layers() -> str:
    """The import layers as pyproject.toml states them, highest first."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(rule["layers"] for rule in rules if rule["id"] == "layers")
    return "\n".join(["```", "flodl_cli | flodl_daemon", *listed, "```"])


def quality() -> str:
    """The figures that benchmarks/quality.py has kept."""
    if not (DOCS / "quality.json").exists():
        return "(not measured: `python benchmarks/quality.py --write` makes this table)"
    kept = json.loads((DOCS / "quality.json").read_text())
    rows = []
    for row in kept["rows"]:
        worse = "" if row["worse_by"] is None else f"{row['worse_by']:+.4f}"
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        held_out = f"{row['mean']:.4f} ± {row['deviation']:.4f}"
        verdict = "" if row["worse_by"] is None else "yes" if row["is_good"] else "**no**"
        rows.append((row["task"], f"`{row['mode']}`", f"{row['rounds']:.0f}", held_out, worse, error, verdict))
    header = ("example", "mode", "rounds", "held out, mean ± deviation", "worse by", "standard error", "within two")
    return f"{kept['seeds']} seeds; {kept['measure']}.\n\n{table(header, rows)}"


def reliability() -> str:
    """The figures that benchmarks/reliability.py has kept."""
    if not (DOCS / "reliability.json").exists():
        return "(not measured: `python benchmarks/reliability.py --write` makes this table)"
    kept = json.loads((DOCS / "reliability.json").read_text())
    rows = []
    for what, row in kept.items():
        came = [each for each in row["next_s"] if each is not None]
        pauses = [each for each in row["pause_s"] if each is not None]
        mode, _, moment = what.partition(" ")
        rows.append(
            (
                f"`{mode}`",
                moment or "step",
                f"{len(came)} of {len(row['next_s'])}",
                f"{row['median_s']:.3f}",
                f"{max(came, default=math.inf):.3f}",
                f"{statistics.median(pauses):.3f}",
                f"{max(row['steps_redone'], default=0)}",
            )
        )
    header = (
        "who",
        "killed in",
        "went on",
        "next step, median s",
        "most s",
        "longest pause, median s",
        "steps done again",
    )
    return table(header, rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "quality": quality,
    "reliability": reliability,
    "who-says-what": who_says_what,
    "messages": message_fields,
    "nested-types": nested_types,
    "limits": limits,
    "core-limits": core_limits,
    "elche-constants": elche_constants,
    "rank-transitions": rank_transitions,
    "round-story": round_transitions,
    "commands": commands,
    "cluster-file": cluster_file,
    "knobs": knobs,
    "cadence-knobs": cadence_knobs,
    "layers": layers,
}

if __name__ == "__main__":
    sys.exit(main())
