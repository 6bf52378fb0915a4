"""One definition per knob: constructor keyword, chained setter and plain value come from the same line.

A table of knobs is a class whose annotations are ``Knob[T]``. A subclass that is also ``Chained`` turns each knob into
a setter (``config.batch_size(64)`` returns the config); one that is also ``Values`` reads it (``job.batch_size``).
Type checkers see both, and the keyword arguments, through the descriptor and ``dataclass_transform`` (PEP 681).
"""

import difflib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, dataclass_transform, overload

from flodl.errors import ConfigError, UnknownArgument, UnknownSetting, UsageError

T = TypeVar("T")
ChainedT = TypeVar("ChainedT", bound="Chained")
Check = Callable[[str, Any], Any]
"""Takes a knob's name and a value; returns the value to store or raises ConfigError with the fix."""

REQUIRED: Any = inspect.Parameter.empty
"""Stands for "no default"."""


class Chained:
    """Mixed into a table whose knobs are setters that return the table."""


class Values:
    """Mixed into a table whose knobs are read-only values."""


class Knob(Generic[T]):
    """The descriptor behind one annotated line of a table."""

    def __init__(
        self, default: Any, check: Check | None, kw_only: bool, table: "type[KnobTable] | None" = None
    ) -> None:
        self.default, self.check, self.kw_only, self.name = default, check, kw_only, ""
        self.table = table

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: ChainedT, owner: type) -> Callable[[T], ChainedT]: ...
    @overload
    def __get__(self, instance: Values, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(instance, Values):
            return instance._values[self.name]  # type: ignore[attr-defined]  # every Values is a KnobTable

        def setter(*values: T, **others: object) -> Any:
            if len(values) != 1 or others:
                raise UnknownArgument(self._misused(others))
            instance._values[self.name] = self.checked(values[0])
            return instance

        setter.__name__ = self.name
        return setter

    def __set__(self, instance: object, value: T) -> None:
        raise UsageError(f"{self.name} cannot be assigned; write .{self.name}({value!r})")

    def checked(self, value: Any) -> Any:
        """``value`` as it is stored. Raises ConfigError when it cannot be used."""
        return self.check(self.name, value) if self.check else value

    def inner(self, name: str) -> str:
        """This knob's value with ``name`` set in it; empty when it is no table, or has no such knob."""
        if self.table is None or name not in self.table.knobs():
            return ""
        return f"{self.table.__name__}({name}=...)"

    def _misused(self, others: Iterable[str]) -> str:
        value = next(filter(None, map(self.inner, others)), "...")
        return f"{self.name} takes one value: .{self.name}({value})"


def knob(
    *,
    default: Any = REQUIRED,
    check: Check | None = None,
    kw_only: bool = True,
    kind: type[Knob[Any]] = Knob,
    table: "type[KnobTable] | None" = None,
) -> Any:
    """Declare one line of a table: the value of an annotation such as ``batch_size: Knob[int]``.

    Args:
        default: the value of a knob that was not set; without it the knob must be set.
        check: turns what the user passed into what is stored, or raises ConfigError.
        kw_only: False lets the constructor take it by position too.
        kind: the annotation's own class, where its setter takes more than the value.
        table: the value's class, where that is a table of knobs itself.
    """
    return kind(default, check, kw_only, table)


@dataclass_transform(kw_only_default=True, field_specifiers=(knob,))
class KnobTable:
    """Base of every table. Holds the values that were set; defaults are applied when they are read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(type(self), args, kwargs)
        self._values: dict[str, Any] = {name: getattr(type(self), name).checked(value) for name, value in given.items()}
        self._constructed()

    def _constructed(self) -> None:
        """Called at the end of the constructor; a table whose values must fit each other checks that here.

        A constructor of its own would hide the keyword arguments from type checkers.
        """

    @classmethod
    def knobs(cls) -> dict[str, Knob[Any]]:
        """Every knob of the table by name, in the order of definition."""
        found: dict[str, Knob[Any]] = {}
        for base in reversed(cls.__mro__):
            found |= {name: entry for name, entry in vars(base).items() if isinstance(entry, Knob)}
        return found

    def all_values(self) -> dict[str, Any]:
        """Every knob's value, defaults filled in. Raises UsageError naming the knobs that have none."""
        values = {name: entry.default for name, entry in self.knobs().items()} | self._values
        missing = [name for name, value in values.items() if value is REQUIRED]
        if missing:
            fix = " ".join(f".{name}(...)" for name in missing)
            raise UsageError(f"{', '.join(missing)} must be set; add {fix} before the run starts")
        return values

    if not TYPE_CHECKING:  # type checkers know every knob, and shall go on to refuse the others

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            # A name, so that the interpreter adds no guess of its own.
            raise UnknownSetting(_unknown(type(self), name), name=name)

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and not hasattr(type(self), name):
                raise UnknownSetting(_unknown(type(self), name), name=name)
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({settings})"


def _signature(table: type[KnobTable]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY if entry.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=entry.default,
            )
            for name, entry in table.knobs().items()
        ]
    )


def _bind(table: type[KnobTable], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The values by name. Raises UnknownArgument, which is a TypeError too, in words that name the fix."""
    for name in kwargs:
        if name not in table.knobs():
            raise UnknownArgument(_unknown(table, name))
    try:
        given = _signature(table).bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise UnknownArgument(f"{table.__name__}: {error}; pass knobs by name") from None
    missing = [name for name, entry in table.knobs().items() if entry.default is REQUIRED and name not in given]
    if missing:
        raise UnknownArgument(f"{table.__name__}: {', '.join(missing)} must be set; add {missing[0]}=...")
    return given


def _unknown(table: type[KnobTable], name: str) -> str:
    known = list(table.knobs())
    for entry in table.knobs().values():
        if inner := entry.inner(name):
            return f"{table.__name__} has no knob {name!r}; {entry.name} has: {inner}"
    close = difflib.get_close_matches(name.lower(), known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"{table.__name__} has no knob {name!r}; {remedy}"


def whole_number(minimum: int, maximum: int = 2**63 - 1, *, optional: bool = False) -> Check:
    """A whole number within ``[minimum, maximum]``; None too when ``optional``."""
    or_none = " or None" * optional

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {minimum}" + or_none)
        if not minimum <= number <= maximum:
            bound = f"at least {minimum}" if number < minimum else f"at most {maximum}"
            raise ConfigError(f"{name} is {number}; it must be {bound}" + or_none)
        return number

    return check


def positive_number(maximum: float = sys.float_info.max, *, optional: bool = False) -> Check:
    """A number within ``(0, maximum]``; None too when ``optional``."""
    wanted = "a finite number above 0" if maximum == sys.float_info.max else f"a number in (0, {maximum:g}]"

    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        try:
            number = 0.0 if isinstance(value, bool | str | bytes) else float(value)
        except (TypeError, ValueError):
            number = 0.0
        if not 0.0 < number <= maximum:
            raise ConfigError(f"{name} is {value!r}; it must be {wanted}" + " or None" * optional)
        return number

    return check


def non_negative_number(maximum: float = sys.float_info.max) -> Check:
    """A number within ``[0, maximum]``."""

    def check(name: str, value: Any) -> float:
        try:
            number = -1.0 if isinstance(value, bool | str | bytes) else float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0.0 <= number <= maximum:
            bound = f"at least 0 and at most {maximum:g}" if maximum < sys.float_info.max else "finite and at least 0"
            raise ConfigError(f"{name} is {value!r}; it must be a number that is {bound}")
        return number

    return check


def yes_or_no(name: str, value: Any) -> bool:
    """True or False; nothing else that happens to be true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")
    return value


def function(*arguments: str, is_open: bool = False) -> Check:
    """A callable that takes these arguments by position, or None for none.

    ``is_open``: in the place of all but the first there may be any others, one at least.
    """

    def check(name: str, value: Any) -> Any:
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is {value!r}; pass a function, not its result")
        if value is not None and (fault := call_fault(name, value, arguments, is_open=is_open)):
            raise ConfigError(fault)
        return value

    return check


def call_fault(name: str, value: Callable[..., Any], arguments: tuple[str, ...], *, is_open: bool = False) -> str:
    """Why the function behind ``name`` cannot be called with ``arguments``; empty when it can, or when nobody knows."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # one of C code that does not say
        return ""
    counts = range(2, 2 + len(signature.parameters)) if is_open else (len(arguments),)
    if any(_takes(signature, count) for count in counts):
        return ""
    label = getattr(value, "__name__", type(value).__name__)
    return f"{name} is called as {name}({', '.join(arguments)}), and {label} takes {signature!s:.200}"


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
