"""What every test may rely on: bounded waiting, one factor for all time limits, hypothesis profiles, the leak check.

Environment:
    FLODL_TEST_TIME_FACTOR: multiplies every time limit of the tests (default 1; a slow or busy machine takes more).
    HYPOTHESIS_PROFILE: ``ci`` (default), ``verify`` (many examples, random) or ``mutation`` (few, fast, no shrinking).
    FLODL_FIGURES: set, the last line of output is a JSON object with what tests have measured; for `make verify`.
"""

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings

T = TypeVar("T")
Figures: TypeAlias = dict[str, float]
"""What one test has measured, by name."""

POLL_S = 0.01
LEAK_GRACE_S = 5.0
"""How long what a test started may take to disappear behind it."""
FD_TOLERANCE = 2
"""Descriptors that libraries open once and keep (an epoll of a first event loop, /dev/urandom)."""
LEAK_MARK = "FLODL_TEST_MARK"
"""Inherited by every process that a test starts, so that orphans in sessions of their own are found as well."""

settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, print_blob=True)
settings.register_profile("verify", deadline=None, max_examples=2000, print_blob=True)
settings.register_profile(
    "mutation",
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _time_factor() -> float:
    return float(os.environ.get("FLODL_TEST_TIME_FACTOR", "1"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """One switch for all golden files."""
    parser.addoption("--rewrite", action="store_true", help="write the golden files anew instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stretch each test's own time limit by the factor; the default limit is stretched in pytest_configure."""
    factor = _time_factor()
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None and marker.args and factor != 1:
            item.add_marker(pytest.mark.timeout(marker.args[0] * factor, **marker.kwargs), append=False)


def pytest_configure(config: pytest.Config) -> None:
    """Stretch the default time limit by the factor; give Ctrl-C back its meaning.

    A shell starts what it runs in the background with SIGINT ignored, and every process of a test would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.timeout is None and _time_factor() != 1:
        config.option.timeout = float(config.getini("timeout") or 0) * _time_factor()


_FIGURES = pytest.StashKey[dict[str, Figures]]()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Fill it with what the test measures; see FLODL_FIGURES."""
    measured: Figures = {}
    request.config.stash.setdefault(_FIGURES, {})[request.node.name] = measured
    return measured


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist hands its figures over."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = session.config.stash.get(_FIGURES, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of pytest-xdist's processes has ended."""
    node.config.stash.setdefault(_FIGURES, {}).update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The figures of all tests, behind everything else."""
    if os.environ.get("FLODL_FIGURES") and not hasattr(config, "workeroutput"):
        print(json.dumps(config.stash.get(_FIGURES, {})))


@pytest.fixture(scope="session")
def deadline_factor() -> float:
    """Multiply every time limit by this."""
    return _time_factor()


@pytest.fixture(scope="session")
def wait_until(deadline_factor: float) -> Callable[[Callable[[], T], float, str], T]:
    """``wait_until(predicate, timeout_s, what)``: the predicate's first truthy value, or a failure that names ``what``.

    ``what`` may be a callable, asked only on failure, for the state that explains it.
    """

    def wait(predicate: Callable[[], T], timeout_s: float, what: str | Callable[[], Any]) -> T:
        limit_s = timeout_s * deadline_factor
        tick = threading.Event()
        deadline_s = time.monotonic() + limit_s
        while True:
            value = predicate()
            if value:
                return value
            if time.monotonic() >= deadline_s:
                pytest.fail(f"not within {limit_s:g} s: {what() if callable(what) else what}")
            tick.wait(POLL_S)

    return wait


# ------------------------------------------------------------------------------------------------------- leak check
@dataclass(frozen=True, slots=True)
class _Held:
    """What this process holds at one moment."""

    children: frozenset[tuple[int, float]]
    threads: frozenset[int]
    fds: dict[int, str]


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After an integration or system test no process, thread or descriptor of it is left."""
    if not {"integration", "system"} & set(Path(request.node.path).parts):
        yield
        return
    mark = uuid.uuid4().hex
    monkeypatch.setenv(LEAK_MARK, mark)
    before = _held()
    yield
    tick = threading.Event()
    deadline_s = time.monotonic() + LEAK_GRACE_S * _time_factor()
    while leaks := _leaks(before, _held(), mark):
        if time.monotonic() >= deadline_s:
            pytest.fail("left behind: " + "; ".join(leaks))
        tick.wait(POLL_S)


def _held() -> _Held:
    me = psutil.Process()
    return _Held(
        children=frozenset((child.pid, child.create_time()) for child in _alive(me.children(recursive=True))),
        threads=frozenset(id(thread) for thread in threading.enumerate() if not thread.daemon),
        fds=_open_fds(),
    )


def _alive(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        try:
            if process.is_running():
                yield process
        except psutil.NoSuchProcess:
            continue


def _open_fds() -> dict[int, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own descriptor
    return fds


def _leaks(before: _Held, after: _Held, mark: str) -> list[str]:
    pids = {pid for pid, _ in after.children - before.children} | _marked_pids(mark)
    leaks = [f"process {pid} ({_describe(pid)})" for pid in sorted(pids)]
    leaks += [f"thread {t.name}" for t in threading.enumerate() if not t.daemon and id(t) not in before.threads]
    opened = {fd: target for fd, target in after.fds.items() if before.fds.get(fd) != target}
    if len(after.fds) - len(before.fds) > FD_TOLERANCE:
        leaks.append("descriptors " + ", ".join(f"{fd} → {target}" for fd, target in sorted(opened.items())))
    return leaks


def _marked_pids(mark: str) -> set[int]:
    """Every other process that inherited the test's mark, whoever its parent is by now."""
    needle = f"{LEAK_MARK}={mark}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if needle in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
        except OSError:
            continue  # gone meanwhile
    return found


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.status()}: {' '.join(process.cmdline())[:120] or process.name()}"
    except psutil.NoSuchProcess:
        return "gone just now"
