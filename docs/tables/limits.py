"""Limits and constants, with the reason that stands beside each in the code."""

import ast
import inspect
import re
from collections.abc import Iterable
from typing import Any

from flodl.core import elche, finale, formation, guards, meta, restarts, training
from flodl.runtime import line, mux, streams, tls
from flodl.wire import chunks, codec, frames, handshake
from tables.markdown import documented, table


def limits() -> str:
    """Named limits of the wire, with the reason that stands beside each."""
    chosen: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (frames, ("PRE_AUTH_FRAME_BYTES", "FRAME_BYTES")),
        (codec, ("MAX_DEPTH", "MAX_ELEMENTS")),
        (chunks, ("CHUNK_BYTES", "MAX_CHUNK_BYTES", "MAX_TOTAL_BYTES")),
        (handshake, ("TOKEN_BYTES", "NONCE_BYTES", "PROOF_BYTES", "MAX_NAME_LENGTH", "MAX_REASON_LENGTH")),
        (mux, ("MAX_STRANGERS", "STRANGER_S", "LOGGED_STRANGERS")),
        (line, ("TLS_HANDSHAKE_BYTES",)),
        (tls, ("SILENT_BYTES",)),
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
