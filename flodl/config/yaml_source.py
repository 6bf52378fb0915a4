"""A YAML file as plain data, with the place of every key and value, and nothing coerced in silence.

Quoted text is text. Unquoted text is a boolean (``true``, ``false``), a decimal number or, unless some YAML reader
would take it for something else, text. The rest is a ``Trap``: ``no``, ``01337``, ``13:37``, ``1e3``, dates, ``~``.
Where the schema expects one of a few words (``off``), the word itself is no trap. Tags are refused, anchors, aliases
and merge keys work within the limits below. Lists become tuples.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from flodl.config.model import Place
from flodl.config.problems import ClusterFileError, KeyPath, Problem, format_path, shorten

MAX_FILE_BYTES = 256 << 10
"""A roster of 1,000 hosts with everything spelled out is smaller."""

MAX_DEPTH = 32
"""The deepest key of the model lies at 6."""

MAX_VALUES = 50_000
"""Keys and values after aliases are expanded."""

MAX_NUMBER_CHARS = 18
"""Beyond that a double and most integers of other languages lose digits."""

_BRACKETED_IP = re.compile(r":\s+\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]")

IsWord: TypeAlias = Callable[[KeyPath, str], bool]
"""Whether the schema has ``text`` as one of the words allowed at a path."""


@dataclass(frozen=True, slots=True)
class Trap:
    """Unquoted text that YAML readers take for something else.

    ``reads_as`` says for what; ``decimal`` is the number as it should be written, empty when the text is no number.
    """

    text: str
    reads_as: str
    decimal: str = ""


@dataclass(slots=True)
class Document:
    """What was read: ``data`` of dicts, tuples, scalars and traps, with places by key path."""

    data: object
    values: dict[KeyPath, Place] = field(default_factory=dict)
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(content: bytes, file: str, is_word: IsWord) -> Document:
    """Read one document.

    Args:
        content: the file, UTF-8 with or without a byte order mark.
        file: its name for messages.
        is_word: what tells a word of the schema from a trap.

    Raises:
        ClusterFileError: it is no YAML, or beyond a limit; lesser problems are listed in the document.
    """
    text = _decode(content, file)
    try:
        root = _compose(text)
    except _Unreadable as failure:
        line = failure.line + 1
        lines = text.splitlines()
        read = shorten(lines[failure.line]) if failure.line < len(lines) else ""
        fix = 'put an address in brackets into quotes: "[::1]"' if _BRACKETED_IP.search(read) else ""
        raise ClusterFileError([Problem(file, line, failure.column + 1, "", read, failure.expected, fix)]) from None
    if root is None:
        raise ClusterFileError([Problem(file, 1, 1, "", "an empty file", "a mapping with the key `cluster`")])
    reader = _Reader(text, file, is_word)
    reader.document.data = reader.convert(root, (), 0)
    return reader.document


def plain_value(text: str) -> str | int | float | bool | Trap:
    """Say what unquoted ``text`` is."""
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.casefold() == "true"
    if len(text) > MAX_NUMBER_CHARS and re.fullmatch(r"[-+0-9._]+", text):
        return Trap(text, f"a number of more than {MAX_NUMBER_CHARS} characters")
    if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text):
        return int(text)
    if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)\.[0-9]+", text):
        return float(text)
    for pattern, trap in _TRAPS:
        if pattern.fullmatch(text):
            return trap(text)
    return text


# ------------------------------------------------------------------------------------------------------------ traps
def _boolean(text: str) -> Trap:
    return Trap(text, f"the boolean {'true' if text.casefold() in ('y', 'yes', 'on') else 'false'}")


def _null(text: str) -> Trap:
    return Trap(text, "null, that is no value")


def _octal(text: str) -> Trap:
    digits = text.replace("_", "").replace("o", "")
    return Trap(text, f"the octal number {int(digits, 8)}", decimal=_decimal(digits))


def _leading_zero(text: str) -> Trap:
    return Trap(text, "a number in some readers and text in others", decimal=_decimal(text))


def _based(text: str) -> Trap:
    value = int(text.replace("_", ""), 0)
    return Trap(text, f"the number {value}", decimal=str(value))


def _underscored(text: str) -> Trap:
    plain = text.replace("_", "")
    return Trap(text, f"the number {plain}", decimal=plain)


def _sexagesimal(text: str) -> Trap:
    return Trap(text, "a number in base 60")


def _float(text: str) -> Trap:
    value = float(text)
    is_short = abs(value) < 1e15
    decimal = (str(int(value)) if value.is_integer() else repr(value)) if is_short else ""
    return Trap(text, "a number in scientific or short notation", decimal="" if "e" in decimal else decimal)


def _special_float(text: str) -> Trap:
    return Trap(text, "infinity or not-a-number")


def _date(text: str) -> Trap:
    return Trap(text, "a date")


def _merge(text: str) -> Trap:
    return Trap(text, "a sign of YAML's own")


def _decimal(digits: str) -> str:
    sign = "-" if digits.startswith("-") else ""
    return sign + (digits.lstrip("+-0") or "0")


_TRAPS: tuple[tuple[re.Pattern[str], Callable[[str], Trap]], ...] = (
    (re.compile(r"y|yes|n|no|on|off", re.IGNORECASE), _boolean),
    (re.compile(r"|~|null", re.IGNORECASE), _null),
    (re.compile(r"[-+]?0[0-7_]*[0-7]|0o[0-7]+"), _octal),
    (re.compile(r"[-+]?0[0-9]+"), _leading_zero),
    (re.compile(r"[-+]?0x[0-9a-fA-F_]*[0-9a-fA-F]|[-+]?0b[01_]*[01]"), _based),
    (re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?"), _underscored),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), _sexagesimal),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?"), _float),
    (re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE), _special_float),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?"), _date),
    (re.compile(r"=|<<"), _merge),
)


# ---------------------------------------------------------------------------------------------------------- composing
class _Unreadable(Exception):
    """No YAML; ``line`` and ``column`` count from 0."""

    def __init__(self, line: int, column: int, expected: str) -> None:
        self.line, self.column, self.expected = line, column, expected
        super().__init__(expected)


class _Composer(yaml.SafeLoader):
    """PyYAML up to its node tree: no tags, bounded depth."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise _at(event.start_mark, "no tag (`!…`): types follow from the key")
        if self._depth >= MAX_DEPTH:
            raise _at(event.start_mark, f"at most {MAX_DEPTH} levels")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _decode(content: bytes, file: str) -> str:
    if len(content) > MAX_FILE_BYTES:
        expected = f"a cluster file of at most {MAX_FILE_BYTES >> 10} KiB"
        raise ClusterFileError([Problem(file, None, None, "", f"{len(content)} bytes", expected)])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        before = content[: wrong.start].decode("utf-8-sig").split("\n")
        read = f"the byte 0x{content[wrong.start]:02x}"
        problem = Problem(file, len(before), len(before[-1]) + 1, "", read, "UTF-8 text", "save the file as UTF-8")
        raise ClusterFileError([problem]) from None


def _compose(text: str) -> yaml.Node | None:
    try:
        composer = _Composer(text)
    except yaml.reader.ReaderError as wrong:
        before = text[: wrong.position].split("\n")
        raise _Unreadable(len(before) - 1, len(before[-1]), "printable text; found a control character") from None
    try:
        return composer.get_single_node()
    except yaml.MarkedYAMLError as wrong:
        raise _syntax(wrong) from None
    except (ValueError, OverflowError):  # PyYAML's own slips, such as chr() of an escape beyond Unicode
        raise _at(composer.get_mark(), "valid YAML: an escape or a number is out of range") from None
    finally:
        composer.dispose()


def _syntax(wrong: yaml.MarkedYAMLError) -> _Unreadable:
    mark = wrong.problem_mark or wrong.context_mark
    problem = wrong.problem or "unreadable"
    if "'\\t'" in problem:
        return _at(mark, "spaces: YAML does not allow a tab here")
    if "single document" in (wrong.context or ""):
        return _at(mark, "one document; found a second one (`---`)")
    context = f" {wrong.context}" if wrong.context else ""
    return _at(mark, f"valid YAML: {problem}{context}")


def _at(mark: Any, expected: str) -> _Unreadable:
    return _Unreadable(mark.line if mark else 0, mark.column if mark else 0, expected)


# --------------------------------------------------------------------------------------------------------- converting
@dataclass(slots=True)
class _Reader:
    """One walk over the node tree; ``document`` collects what it sees."""

    text: str
    file: str
    is_word: IsWord
    document: Document = field(default_factory=lambda: Document(None))
    count: int = 0

    def convert(self, node: yaml.Node, path: KeyPath, depth: int) -> object:
        self._bound(node, depth)
        self.document.values[path] = self._place(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.convert(item, (*path, place), depth + 1) for place, item in enumerate(node.value))
        text = str(node.value)
        if _is_quoted(node):
            return text
        value = plain_value(text)
        return text if isinstance(value, Trap) and self.is_word(path, text) else value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node, is_merged in self._pairs(node, path, depth):
            key = self._key(key_node, path)
            if key is None or (is_merged and key in result):
                continue
            here = (*path, key)
            if key in result:
                expected = f"each key once; `{key}` stands on line {self.document.keys[here].line} already"
                self._problem(key_node, here, expected)
                continue
            self.document.keys[here] = self._place(key_node)
            result[key] = self.convert(value_node, here, depth + 1)
        return result

    def _pairs(
        self, node: yaml.MappingNode, path: KeyPath, depth: int, is_merged: bool = False
    ) -> list[tuple[yaml.Node, yaml.Node, bool]]:
        """Key and value nodes, those that ``<<`` merges in last: the mapping's own keys win."""
        own: list[tuple[yaml.Node, yaml.Node, bool]] = []
        merged: list[tuple[yaml.Node, yaml.Node, bool]] = []
        for key, value in node.value:
            self._bound(key, depth)
            if key.value != "<<" or _is_quoted(key):
                own.append((key, value, is_merged))
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                self._bound(source, depth)
                if isinstance(source, yaml.MappingNode):
                    merged += self._pairs(source, path, depth + 1, is_merged=True)
                else:
                    self._problem(source, (*path, "<<"), "a mapping to merge, or a list of mappings")
        return own + merged

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._problem(node, path, "a key that is text")
            return None
        value = node.value if _is_quoted(node) else plain_value(node.value)
        if isinstance(value, str):
            return value
        reads_as = value.reads_as if isinstance(value, Trap) else "a number or a boolean"
        self._problem(node, path, f"a key that is text; YAML readers take this for {reads_as}", "put the key in quotes")
        return None

    def _bound(self, node: yaml.Node, depth: int) -> None:
        self.count += 1
        if depth > MAX_DEPTH:
            self._give_up(node, f"at most {MAX_DEPTH} levels, aliases included")
        if self.count > MAX_VALUES:
            self._give_up(node, f"at most {MAX_VALUES} values, aliases expanded")

    def _give_up(self, node: yaml.Node, expected: str) -> None:
        self._problem(node, (), expected)
        raise ClusterFileError(self.document.problems[-1:])

    def _problem(self, node: yaml.Node, path: KeyPath, expected: str, fix: str = "") -> None:
        place = self._place(node)
        problem = Problem(self.file, place.line, place.column, format_path(path), shorten(place.raw), expected, fix)
        self.document.problems.append(problem)

    def _place(self, node: yaml.Node) -> Place:
        start, end = node.start_mark, node.end_mark
        # Cut here: with aliases the same long text would be kept once per value.
        return Place(start.line + 1, start.column + 1, self.text[start.index : min(end.index, start.index + 500)])


def _is_quoted(node: yaml.Node) -> bool:
    """Whether a scalar stands in quotes or in a block; only plain text is interpreted."""
    return getattr(node, "style", None) is not None
