"""A real systemd as PID 1 of namespaces of its own, on a machine whose init is something else. Needs root.

What it writes stays there: /run, /tmp and what it keeps below /var are its own, and /etc is this machine's below a
layer of its own. It shares the network, so that what it runs can dial this machine. ``Systemd`` is a context manager;
its end ends all below.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

START_S: Final = 30.0
CALL_S: Final = 300.0
INIT: Final = "/lib/systemd/systemd"
PROJECT: Final = Path(__file__).resolve().parents[2]
"""May lie in /tmp, which is a new one inside."""
TOOLS: Final = ("unshare", "nsenter", "mount", "systemctl", "systemd-analyze")

_BOOT: Final = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/etc/own /run/etc/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/etc/own,workdir=/run/etc/work /etc
exec 9<{project}
for folder in /tmp /var/tmp /var/log /var/lib/systemd; do mount -t tmpfs tmpfs $folder; done
mkdir -p {project}
[ -e {project}/pyproject.toml ] || mount -c --bind /proc/self/fd/9 {project}
exec 9<&-
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for unit in systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket \\
    systemd-udev-trigger.service systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service \\
    systemd-tmpfiles-clean.timer systemd-sysctl.service systemd-modules-load.service \\
    systemd-random-seed.service systemd-remount-fs.service; do
  ln -s /dev/null /run/systemd/system/$unit
done
mount --make-rshared /
printf '[Unit]\\nDefaultDependencies=no\\n' > /run/systemd/system/lab.target
exec env -i PATH="$PATH" container=lab {init} --system --unit=lab.target
"""

_PROBE: Final = """\
mount -t tmpfs tmpfs /run
mkdir /run/own /run/work /run/group
mount -t cgroup2 cgroup2 /run/group
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/own,workdir=/run/work /etc
"""

WaitUntil = Callable[..., Any]


class Systemd:
    """``with Systemd(folder, wait_until) as machine``: it has booted."""

    def __init__(self, folder: Path, wait_until: WaitUntil) -> None:
        self._wait_until, self._log_path = wait_until, folder / "boot.log"
        self._outer: subprocess.Popen[bytes] | None = None
        self._init = 0

    @staticmethod
    def obstacle() -> str:
        """Why there can be none here; empty when there can."""
        if os.geteuid() != 0:
            return "a systemd of its own needs root"
        missing = [name for name in (*TOOLS, INIT) if shutil.which(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        done = subprocess.run(["unshare", "-m", "-C", "sh", "-ec", _PROBE], capture_output=True, text=True, check=False)
        return f"cannot mount here: {done.stderr.strip()}" if done.returncode else ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._down)
            self._boot()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._down()

    def _boot(self) -> None:
        namespaces = ["--fork", "--pid", "--mount", "--mount-proc", "--uts", "--ipc", "--cgroup", "--kill-child"]
        with self._log_path.open("wb") as log:
            self._outer = subprocess.Popen(
                ["unshare", *namespaces, "bash", "-c", _BOOT.format(init=INIT, project=PROJECT)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until(self._has_booted, START_S, self._log_path.read_text)
        self.systemctl("start", "systemd-journald.service")  # else it starts with the first word, within some test

    def _has_booted(self) -> bool:
        assert self._outer is not None
        for child in psutil.Process(self._outer.pid).children():
            if child.name() == "systemd" and os.path.exists(f"/proc/{child.pid}/root/run/systemd/private"):
                self._init = child.pid
        return bool(self._init)

    def _down(self) -> None:
        if self._outer is not None:
            self._outer.kill()  # its child, PID 1 of the namespace, goes with it, and everything below
            self._outer.wait(START_S)

    # --------------------------------------------------------------------------------------------------------- using
    @property
    def root(self) -> Path:
        """Its file system as seen from here."""
        return Path(f"/proc/{self._init}/root")

    def call(self, *command: object) -> "subprocess.CompletedProcess[str]":
        """Run a command there, with a clean environment, to its end."""
        enter = [
            "nsenter",
            "-t",
            str(self._init),
            "-m",
            "-p",
            "-u",
            "-i",
            "-C",
            "env",
            "-i",
            f"PATH={os.environ['PATH']}",
        ]
        return subprocess.run(
            [*enter, "HOME=/root", *map(str, command)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_S,
            check=False,
        )

    def systemctl(self, *words: str) -> str:
        """Its standard output; fails the caller where systemctl does."""
        done = self.call("systemctl", "--no-pager", *words)
        assert done.returncode == 0, f"systemctl {' '.join(words)}: {done.returncode} {done.stdout} {done.stderr}"
        return done.stdout

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", unit, "-p", name, "--value").strip()

    def main_process(self, unit: str) -> psutil.Process:
        """The unit's main process, as this machine sees it."""
        wanted = int(self.show(unit, "MainPID"))
        assert wanted, f"{unit} has no main process"
        for process in psutil.Process(self._init).children(recursive=True):
            with contextlib.suppress(OSError):
                numbers = Path(f"/proc/{process.pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()
                if int(numbers[-1]) == wanted:
                    return process
        raise AssertionError(f"process {wanted} of {unit} is not below {self._init}")

    def processes_of(self, unit: str) -> list[psutil.Process]:
        """Everything in the unit's control group."""
        group = self.show(unit, "ControlGroup")
        found = []
        for process in psutil.Process(self._init).children(recursive=True):
            with contextlib.suppress(OSError):
                if group and group in Path(f"/proc/{process.pid}/cgroup").read_text():
                    found.append(process)
        return found

    def signal_all(self, unit: str, number: signal.Signals) -> None:
        """To every process of the unit."""
        for process in self.processes_of(unit):
            process.send_signal(number)
