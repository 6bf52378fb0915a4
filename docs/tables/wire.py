"""What each connection may carry: the messages and their fields."""

import re
from dataclasses import fields
from typing import Any, get_args

from flodl import messages
from flodl.ids import Grant, RoundKey, Span
from flodl.messages import CadenceSettings, GuardKind, GuardSettings, GuardVerdict, Mode, Settings
from tables.markdown import first_sentence, table


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
