"""The parent of the daemon and of the head: when its child ends, nothing of the child's tree lives on.

    python -m flodl_daemon.warden [--parent-fd N] [--grace S] -- argv...

The child runs in a session of its own and gets every TERM, INT, HUP, QUIT, USR1 and USR2 that the warden gets. When
the other end of ``--parent-fd`` closes (never read, so the child's standard input will do: 0), the child gets TERM and
after ``--grace`` seconds (default 30) KILL. When the child has ended, all its descendants get KILL until none is left
(the warden is their subreaper); then the warden ends as the child did, by the same code or signal. The child inherits
the read end of a pipe, FLODL_WARDEN_FD: end of file there means that the warden itself was killed, and a child that
owns processes has to end them. Standard library only: it starts in milliseconds.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def _main(argv: list[str]) -> None:
    options = {"--parent-fd": "-1", "--grace": "30"}
    while len(argv) > 1 and argv[0] in options:
        options[argv[0]], argv = argv[1], argv[2:]
    if argv[0:1] != ["--"] or len(argv) < 2:
        sys.exit("usage: warden [--parent-fd N] [--grace S] -- argv...")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    (wake_fd, wake_writer), (child_fd, _held_open) = os.pipe(), os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    parent_fd, grace_s = int(options["--parent-fd"]), float(options["--grace"])
    env = {**os.environ, "FLODL_WARDEN_FD": str(child_fd)}
    os.set_inheritable(child_fd, True)
    try:
        child = os.posix_spawnp(argv[1], argv[1:], env, setsid=True, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
    except OSError as error:
        sys.exit(f"warden: cannot start {argv[1]}: {error.strerror}")
    code = os.waitstatus_to_exitcode(_watch(child, wake_fd, parent_fd, grace_s))
    deadline_s = time.monotonic() + 10  # only a process stuck in the kernel outlives ten seconds of KILL
    while _kill_descendants() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _watch(child: int, wake_fd: int, parent_fd: int, grace_s: float) -> int:
    poller, kill_at_s = select.poll(), float("inf")
    poller.register(wake_fd, select.POLLIN)
    poller.register(parent_fd, select.POLLRDHUP) if parent_fd >= 0 else None
    while (status := _reap().get(child)) is None:
        left_s = kill_at_s - time.monotonic()
        if left_s <= 0:
            os.kill(child, signal.SIGKILL)
        for fd, _ in poller.poll(min(max(left_s, 0.05), 3600) * 1000):
            numbers = os.read(fd, 4096) if fd == wake_fd else [signal.SIGTERM]
            if fd == parent_fd:
                poller.unregister(fd)
                kill_at_s = time.monotonic() + grace_s
            for number in PASSED_ON.intersection(numbers):
                os.kill(child, number)
    return status


def _reap() -> dict[int, int]:
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


def _kill_descendants() -> bool:
    tree, parents = {os.getpid()}, {pid: _parent(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    for pid in tree - {os.getpid()}:
        with contextlib.suppress(OSError):
            if _parent(pid) in tree:  # still one of ours, not a stranger under the same number
                os.kill(pid, signal.SIGKILL)
    _reap()
    return len(tree) > 1


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[1])
    return 0


if __name__ == "__main__":
    _main(sys.argv[1:])
