"""A process that is killed at any of its file operations, as the code that saves checkpoints sees it."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest

from flodl.checkpoint import keeping, writer

OPERATIONS: Final = ("open", "write", "fsync", "rename", "unlink", "close", "link", "copyfile")


class Killed(BaseException):
    """The process ended here: nothing after this instruction happened."""


class Operations:
    """After ``left`` file operations the process is killed, halfway through a write or a copy."""

    NEVER: Final = 10**9

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = self.NEVER
        self.has_links = True
        real = {name: getattr(os, name) for name in dir(os)}
        real |= {"copyfile": _copy, "link": self._link}
        fake = real | {name: self._guarded(name, real[name]) for name in OPERATIONS}
        for module in (writer, keeping):
            patch.setattr(module, "os", SimpleNamespace(**fake))
        patch.setattr(keeping, "shutil", SimpleNamespace(copyfile=fake["copyfile"]))

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if self.left == 0 and name == "copyfile":
                real(*arguments, half=True)
            if self.left <= 0:
                raise Killed
            # Nothing outside this process looks at the disk, and syncing hundreds of times takes a minute.
            return None if name == "fsync" else real(*arguments, **options)

        return operate

    def _link(self, source: Any, target: Any) -> None:
        if not self.has_links:
            raise PermissionError(1, "Operation not permitted")
        os.link(source, target)


def _copy(source: Any, target: Any, half: bool = False) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        data = old.read()
        new.write(data[: len(data) // 2] if half else data)
