"""The command lines of a run's own processes: pure, so that ``--dry-run`` shows what is executed.

A daemon runs under its warden, which leaves nothing of it behind. ``-P`` keeps the project folder off the import path
of flodl's own processes: a ``queue.py`` next to the script must not break them.
"""

import shlex
from typing import TYPE_CHECKING, Final

from flodl import __version__

if TYPE_CHECKING:
    from flodl.launch.plan import HostPlan

WARDEN: Final = ("-P", "-m", "flodl_daemon.warden")
DAEMON: Final = ("-P", "-m", "flodl_daemon", "run", "--bootstrap-stdin")
FOLDER_MISSING: Final = 91
INTERPRETER_MISSING: Final = 92

_EXPAND: Final = (
    'case "$1" in "~"|"~/"*) fdl_dir="$HOME${1#"~"}";; *) fdl_dir=$1;; esac; '
    'case "$2" in "~/"*) fdl_py="$HOME${2#"~"}";; *) fdl_py=$2;; esac; '
)
_FIND: Final = f'command -v -- "$fdl_py" >/dev/null 2>&1 || exit {INTERPRETER_MISSING}; '
_START: Final = (
    f'{_EXPAND}cd -- "$fdl_dir" 2>/dev/null || exit {FOLDER_MISSING}; {_FIND}'
    'exec "$fdl_py" -P -m flodl_daemon.warden -- "$fdl_py" -P -m flodl_daemon run --bootstrap-stdin'
)

_AGENT: Final = (
    'case "$2" in "~/"*) fdl_py="$HOME${2#"~"}";; *) fdl_py=$2;; esac; '
    f'command -v -- "$fdl_py" >/dev/null 2>&1 || exit {INTERPRETER_MISSING}; '
    'exec "$fdl_py" -I -c "import sys; read = sys.stdin.buffer; exec(read.read(int(read.readline())))"'
)

_LOGIN_SHELL: Final = (
    'case "${SHELL##*/}" in bash|zsh|ksh|dash|ash|sh) fdl_sh=$SHELL;; *) fdl_sh=/bin/sh;; esac; '
    'exec "$fdl_sh" -lc "$3" fdl "$1" "$2"'
)


def install_command(python: str) -> str:
    """How a host gets the flodl that runs here, which is on no index: from a wheel, which the README makes."""
    return (
        f"{python} -m pip install ./flodl-{__version__}-py3-none-any.whl -c constraints.txt "
        "(README, 'Install on a host')"
    )


def daemon_argv(python: str, bound_grace_s: float | None = None, pulse_fd: int = -1) -> list[str]:
    """The daemon under its warden, on this machine. With ``bound_grace_s`` it lives no longer than whoever holds the
    other end of its standard input: it is told to end then, and killed so many seconds later. With ``pulse_fd``, a
    descriptor that it inherits, it writes a byte there for each of its beats.
    """
    pulse = [] if pulse_fd < 0 else ["--pulse-fd", str(pulse_fd)]
    bound = [] if bound_grace_s is None else ["--parent-fd", "0", "--grace", f"{bound_grace_s:g}"]
    return [python, *WARDEN, *bound, "--", python, *DAEMON, *pulse]


def controller_argv(python: str, run_dir: str) -> list[str]:
    """The controller's process."""
    return [python, "-P", "-m", "flodl.controller", run_dir]


def remote_command(host: "HostPlan") -> str:
    """What ssh is asked to run on ``host``: one line for any login shell, every word quoted, nothing expanded by it.

    It ends with 91 when the folder is missing and 92 when the interpreter is. Without a configured interpreter, a
    login shell is asked for its PATH's ``python3``.
    """
    return _by_interpreter(host, _START)


def agent_command(host: "HostPlan") -> str:
    """What ssh is asked to run on ``host`` for a sync: its interpreter, which takes its program from the input, a line
    with its length in front. It ends with 92 when the interpreter is missing.
    """
    return _by_interpreter(host, _AGENT)


def remote_question(host: "HostPlan", code: str, nonce: str) -> str:
    """What ssh is asked to run for preflight: Python ``code`` in the very interpreter and, where there is one, folder
    of the daemon. It ends with 92 when the interpreter is missing.
    """
    ask = shlex.join(["-c", code, nonce])
    return _by_interpreter(host, f'{_EXPAND}cd -- "$fdl_dir" 2>/dev/null; {_FIND}exec "$fdl_py" {ask}')


def _by_interpreter(host: "HostPlan", script: str) -> str:
    if host.python:
        words = ["/bin/sh", "-c", script, "fdl", host.cwd, host.python]
    else:
        words = ["/bin/sh", "-c", _LOGIN_SHELL, "fdl", host.cwd, "python3", script]
    return "exec " + " ".join(shlex.quote(word) for word in words)


def openssh_command(host: "HostPlan") -> list[str]:
    """The ``ssh`` call that does the same, for people: flodl itself uses asyncssh with the user's configuration."""
    ssh = host.ssh
    if ssh is None:
        return []
    argv = ["ssh"]
    argv += ["-p", str(ssh.port)] if ssh.port is not None else []
    argv += ["-l", ssh.user] if ssh.user is not None else []
    argv += ["-i", ssh.identity_file] if ssh.identity_file is not None else []
    argv += ["-J", ssh.proxy_jump] if ssh.proxy_jump is not None else []
    for option in ssh.options:
        argv += ["-o", option]
    return [*argv, "--", ssh.target, remote_command(host)]
