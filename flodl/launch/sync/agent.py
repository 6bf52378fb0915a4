"""A sync's hand on the host: standard library only, sent over ssh as text and run by the host's interpreter.

Requests and replies are lines of ASCII JSON; the first line of all is ``MARKER``, so that what a login shell prints
before it is no reply. Each request is answered by any number of objects and then by one with ``done`` or ``fault``.
In the project's folder it keeps ``.fdl-sync``: a lock, a ledger of what syncs have put there, and, during a sync,
``new``, where files arrive. They are renamed into place when all have arrived and every byte of them is right, so that
a file is whole at every moment, old or new. The end of the input ends it; what had arrived is dropped then.

The ledger holds only what a sync has put in place. Before the first rename it names what is ``coming``, and as what it
lies in ``new``: after a kill, what still lies there was not put in place.

Names are ``flodl.launch.tree``'s: UTF-8, with lone surrogates for other bytes, whatever the host's locale.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, BinaryIO

MARKER = "FDL1 sync"
NOTES = ".fdl-sync"
NEW = f"{NOTES}/new"
LEDGER = f"{NOTES}/ledger.json"
CACHE = b"__pycache__"
IN_THE_WAY = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENOTEMPTY)
BATCH = 256
PIECE_BYTES = 1 << 20
BEAT_S = 1.0
LOCK_POLL_S = 0.05
IDLE_S = 600
"""Without a line from the other side, or one that it takes: its machine is gone, and the lock with it."""


class Fault(Exception):
    """What the host cannot do; the text is for people."""


class Agent:
    """Serves one conversation; paths are relative to the folder that ``open`` names."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO, idle_s: int = 0) -> None:
        self._requests, self._replies = requests, replies
        self._root = b""
        self._lock = -1
        self._ledger: dict[str, list[str]] = {}
        self._was_cut_off = False
        self._beat_s = 0.0
        self._idle_s = idle_s

    def serve(self) -> None:
        """Answer until the input ends."""
        self._say_line(f"\n{MARKER}")
        try:
            while line := self._requests.readline():
                self._stay()
                if line.strip():
                    self._answer(json.loads(line))
        finally:
            if self._lock >= 0:
                with contextlib.suppress(OSError):
                    self._clear_new()
                os.close(self._lock)

    def _answer(self, request: "dict[str, Any]") -> None:
        kind = request.pop("do")
        works = {"open": self._open, "look": self._look, "begin": self._begin, "install": self._install}
        work: Callable[..., dict[str, Any]] = works[kind]  # type: ignore[assignment]  # each takes its own fields
        try:
            done = work(**request)
        except Fault as fault:
            self._say({"fault": str(fault)})
        except OSError as error:
            self._say({"fault": self._words(error)})
        else:
            self._say({"done": kind, **done})

    # ------------------------------------------------------------------------------------------------------- requests
    def _open(self, root: str) -> "dict[str, Any]":
        """The project's folder, which need not exist; ``~`` is this user's home."""
        folder = os.path.abspath(os.path.expanduser(_bytes(root)))
        if os.path.islink(folder) and not os.path.exists(folder):
            target = _text(os.readlink(folder))
            raise Fault(f"{_text(folder)} is a link to {target}, which is not there: make that folder, or another link")
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise Fault(f"{_text(folder)} is no folder")
        self._root = folder
        return {"root": _text(folder), "rsync": shutil.which("rsync") or ""}

    def _look(self, wanted: "list[list[Any]]") -> "dict[str, Any]":
        """What is at each path (with the size that is expected), then which files of the ledger are not among them:
        ``stale`` as they were put there, ``altered`` since. Writes nothing.
        """
        seen: dict[str, bool] = {}
        for start in range(0, len(wanted), BATCH):
            found = [self._found(path, size, seen) for path, size in wanted[start : start + BATCH]]
            self._say({"found": found})
        self._ledger, mark = self._read_ledger()
        here = {path for path, _ in wanted}
        stale: list[str] = []
        altered: list[str] = []
        for path, contents in self._ledger.items():
            if path not in here:
                content = self._found(path, -1, seen)[0]
                (stale if content in contents else altered if content else []).append(path)
        for name, paths in (("stale", stale), ("altered", altered)):
            for start in range(0, len(paths), BATCH):
                self._say({name: paths[start : start + BATCH]})
        return {"mark": mark}

    def _begin(self, who: str, wait_s: float) -> "dict[str, Any]":
        """Keep all others out, and make room for what comes. ``mark`` is the ledger's as found: it differs from
        ``look``'s where somebody was here in between. ``free`` are the bytes that there is room for.
        """
        os.makedirs(self._root, exist_ok=True)
        notes = self._at(NOTES)
        os.makedirs(notes, mode=0o700, exist_ok=True)
        found = os.lstat(notes)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise Fault(f"{_text(notes)} is no folder of this user: another user syncs to this path")
        self._take_lock(who, wait_s)
        self._ledger, mark = self._read_ledger()
        self._clear_new()
        os.mkdir(self._at(NEW), 0o700)
        disk = os.statvfs(self._root)
        return {"mark": mark, "free": disk.f_bavail * disk.f_frsize}

    def _install(
        self,
        remove: "list[str]",
        files: "list[list[Any]]",
        links: "list[list[str]]",
        modes: "list[list[Any]]",
        ledger: "dict[str, str]",
        retain: "list[str]",
    ) -> "dict[str, Any]":
        """Put into place what has arrived. ``absent`` names files that did not arrive, ``changed`` those that are not
        what they should be: then nothing is put anywhere. ``kept`` are files to remove that somebody has altered.
        Of ``ledger``, the tree here, only what a sync has put there is noted.
        """
        arrived = [(path, content, self._digest(self._at(f"{NEW}/{name}"))) for name, path, _, content in files]
        absent = [path for path, _, found in arrived if not found]
        changed = [path for path, content, found in arrived if found and found != content]
        if absent or changed:
            return {"absent": absent[:BATCH], "changed": changed[:BATCH], "kept": []}
        coming = [(path, content, name) for name, path, _, content in files]
        coming += [(path, f"->{target}", secrets.token_hex(8)) for path, target in links]
        self._check_way([path for path, _, _ in coming], remove)
        for name, _, mode, _ in files:
            os.chmod(self._at(f"{NEW}/{name}"), mode)
        for _, content, name in coming[len(files) :]:
            os.symlink(_bytes(content[2:]), self._at(f"{NEW}/{name}"))
        self._write_ledger(self._ledger, coming)
        seen: dict[str, bool] = {}
        kept = [path for path in remove if not self._remove(path, seen)]
        for path, _, name in coming:
            self._make_way(path)
            os.rename(self._at(f"{NEW}/{name}"), self._at(path))
            self._beat()
        for path, is_executable in modes:
            self._set_mode(path, is_executable)
        left = {path: self._ledger[path] for path in retain if path in self._ledger}
        put = {path for path, _, _ in coming}
        here = {path: [each] for path, each in ledger.items() if path in put or each in self._ledger.get(path, ())}
        self._write_ledger({**left, **here})
        self._clear_new()
        return {"absent": [], "changed": [], "kept": kept}

    # --------------------------------------------------------------------------------------------------- what is there
    def _found(self, path: str, size: int, seen: "dict[str, bool]") -> "list[Any]":
        """``[content, is_executable]`` as in ``tree.Found``; a file of another size is not read, and a folder without a
        file is nothing. ``seen`` remembers which folders are there.
        """
        self._beat()
        for folder in _folders(path):
            if folder not in seen:
                found = self._lstat(folder)
                if found is None:
                    return ["", False]
                seen[folder] = stat.S_ISDIR(found.st_mode)
            if not seen[folder]:
                return [f"!{folder}", False]
        found = self._lstat(path)
        if found is None:
            return ["", False]
        kind = found.st_mode
        if stat.S_ISLNK(kind):
            return [f"->{_text(os.readlink(self._at(path)))}", False]
        if stat.S_ISDIR(kind):
            return ["/" if self._holds(path) else "", False]
        if not stat.S_ISREG(kind):
            return ["?", False]
        is_executable = bool(kind & stat.S_IXUSR)
        if size not in (-1, found.st_size):
            return [f"{found.st_size} bytes", is_executable]
        return [self._digest(self._at(path)) or "?", is_executable]

    def _holds(self, folder: str, leaving: "Collection[str]" = ()) -> bool:
        """Whether anything is in it but folders, what interpreters write anew, and what is ``leaving``."""
        waiting = [folder]
        while waiting:
            below = waiting.pop()
            try:
                with os.scandir(self._at(below)) as found:
                    for each in found:
                        path = f"{below}/{_text(each.name)}"
                        if not each.is_dir(follow_symlinks=False):
                            if path not in leaving:
                                return True
                        elif each.name != CACHE:
                            waiting.append(path)
            except OSError:  # whoever cannot look into it cannot remove it
                return True
        return False

    def _lstat(self, path: str) -> "os.stat_result | None":
        try:
            return os.lstat(self._at(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _digest(self, path: bytes) -> str:
        """SHA-256 of the file; empty where it cannot be read, or is none."""
        digest = hashlib.sha256()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                self._beat()
        return digest.hexdigest()

    # -------------------------------------------------------------------------------------------------------- changing
    def _remove(self, path: str, seen: "dict[str, bool]") -> bool:
        """Remove what a sync has put there, and the folders that are empty then; whether it was that."""
        content = self._found(path, -1, seen)[0]
        if content not in self._ledger.get(path, ()):
            return not content
        os.unlink(self._at(path))
        for folder in reversed(list(_folders(path))):
            try:
                os.rmdir(self._at(folder))
            except OSError:
                break
            seen.clear()
        return True

    def _check_way(self, paths: "list[str]", remove: "list[str]") -> None:
        """What is in the way of ``paths`` has to leave with ``remove``: else nothing may be touched."""
        seen: dict[str, bool] = {}
        leaving = {path for path in remove if self._found(path, -1, seen)[0] in self._ledger.get(path, ())}
        for path in paths:
            for folder in _folders(path):
                found = self._lstat(folder)
                if found is None or folder in leaving:
                    break
                if not stat.S_ISDIR(found.st_mode):
                    at = _text(self._at(folder))
                    raise Fault(f"{at} is no folder there, and one here: move it, or exclude it here")
            else:
                found = self._lstat(path)
                if found is not None and stat.S_ISDIR(found.st_mode) and self._holds(path, leaving):
                    at = _text(self._at(path))
                    raise Fault(f"{at} is a folder there, and none here: move it, or exclude it here")

    def _make_way(self, path: str) -> None:
        for folder in _folders(path):
            if self._lstat(folder) is None:
                os.mkdir(self._at(folder))
        found = self._lstat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            self._remove_empty(path)

    def _remove_empty(self, folder: str) -> None:
        """Remove a folder of folders, and what interpreters write anew; anything else in it stays, and is a fault."""
        for where, folders, _ in os.walk(self._at(folder), topdown=False):
            if CACHE in folders:
                shutil.rmtree(os.path.join(where, CACHE))
            if CACHE not in where.split(b"/"):
                os.rmdir(where)

    def _set_mode(self, path: str, is_executable: bool) -> None:
        """A file that has other names, too, is replaced: they keep their mode."""
        at = self._at(path)
        found = os.lstat(at)
        if not stat.S_ISREG(found.st_mode):
            return
        mode = stat.S_IMODE(found.st_mode)
        # who may read it may run it
        mode = mode | (mode & 0o444) >> 2 if is_executable else mode & ~0o111
        if found.st_nlink == 1:
            os.chmod(at, mode)
            return
        new = self._at(f"{NEW}/{secrets.token_hex(8)}")
        shutil.copyfile(at, new, follow_symlinks=False)
        os.chmod(new, mode)
        os.rename(new, at)

    def _clear_new(self) -> None:
        """Drop what has arrived, once the ledger does not need it to know what was put in place."""
        ours, _ = self._read_ledger()
        if self._was_cut_off:
            self._write_ledger(ours)
        shutil.rmtree(self._at(NEW), ignore_errors=True)

    # ---------------------------------------------------------------------------------------------------------- notes
    def _take_lock(self, who: str, wait_s: float) -> None:
        if self._lock >= 0:
            return
        lock = os.open(self._at(f"{NOTES}/lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _text(os.pread(lock, 256, 0)) or "somebody"
                if time.monotonic() >= deadline_s:
                    os.close(lock)
                    raise Fault(
                        f"{holder} copies to {_text(self._root)} since {wait_s:g} s or more: end that launch, or wait; "
                        f"where its machine is gone, the folder is free {IDLE_S // 60} min later"
                    ) from None
                self._say({"waits_for": holder}) if self._is_due() else None
                time.sleep(LOCK_POLL_S)
        os.truncate(lock, 0)
        os.pwrite(lock, _bytes(who)[:256], 0)
        self._lock = lock

    def _read_ledger(self) -> "tuple[dict[str, list[str]], str]":
        """What syncs have put here, and which state of the ledger that is; one that is none counts as empty. Of what
        was coming when a sync was cut off, only what is not in ``new`` any more was put in place.
        """
        self._was_cut_off = False
        try:
            with open(self._at(LEDGER), "rb") as file:
                noted = json.loads(file.read())
            files = {
                path: [content for content in contents if type(content) is str]
                for path, contents in noted["files"].items()
                if type(contents) is list and _is_inside(path)
            }
            for path, content, name in noted.get("coming", ()):
                self._was_cut_off = True
                if _is_inside(path) and not os.path.lexists(self._at(f"{NEW}/{name}")):
                    files.setdefault(path, []).append(str(content))
            return files, str(noted["mark"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}, ""

    def _write_ledger(self, files: "dict[str, list[str]]", coming: "Collection[tuple[str, str, str]]" = ()) -> None:
        """``coming``: path, content, and the name in ``new`` of what is about to be put in place."""
        arrived = self._at(f"{NOTES}/ledger.tmp")
        descriptor = os.open(arrived, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump({"mark": secrets.token_hex(8), "files": files, "coming": list(coming)}, file)
        os.rename(arrived, self._at(LEDGER))

    # --------------------------------------------------------------------------------------------------------- talking
    def _words(self, error: OSError) -> str:
        where = error.filename2 or error.filename
        if not isinstance(where, (str, bytes)):
            return error.strerror or str(error)
        is_note = os.fsencode(where).startswith(self._at(f"{NOTES}/"))
        remedy = ": it is in a sync's way, remove it there" if is_note and error.errno in IN_THE_WAY else ""
        return f"{os.fsdecode(where)}: {error.strerror}{remedy}"

    def _at(self, path: str) -> bytes:
        return os.path.join(self._root, _bytes(path))

    def _beat(self) -> None:
        """Say that something still moves, now and then."""
        if self._is_due():
            self._say({"beat": True})

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._beat_s < BEAT_S:
            return False
        self._beat_s = now_s
        return True

    def _say(self, reply: "dict[str, Any]") -> None:
        self._say_line(json.dumps(reply))

    def _say_line(self, line: str) -> None:
        self._replies.write(line.encode("ascii") + b"\n")
        self._replies.flush()
        self._stay()

    def _stay(self) -> None:
        """For ``idle_s`` more; then the system ends this process."""
        if self._idle_s:
            signal.alarm(self._idle_s)


def _folders(path: str) -> "list[str]":
    """The folders on the way to ``path``, outermost first."""
    names = path.split("/")[:-1]
    return ["/".join(names[: count + 1]) for count in range(len(names))]


def _is_inside(path: str) -> bool:
    return all(name not in ("", ".", "..") for name in path.split("/")) and path.split("/")[0] != NOTES


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


if __name__ == "__main__":
    Agent(sys.stdin.buffer, sys.stdout.buffer, IDLE_S).serve()
