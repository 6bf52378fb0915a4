"""The program that a host runs to describe itself: sent over standard input, standard library only.

Neither flodl nor torch need be there, and CUDA is never touched: torch, where it is asked for, is imported by a child,
which reads what it was built for. Facts alone are gathered here; what they mean, the other side decides
(``flodl.launch.probe.judge``).

Lines in: the request, then the peers to reach; end of file ends it. Answers out: frames behind a marker, so that no
banner and no rc file can be taken for one. ``RUN`` is what the host's interpreter is started with.
"""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pwd
import re
import resource
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

RUN: Final = (
    "import os,sys;v=sys.version_info;"
    r"os.write(1,('\nFDL1 python %s %d.%d.%d\n'%(sys.argv[1],v[0],v[1],v[2])).encode());"
    "v[:2]<(3,11) and sys.exit(0);"
    "sys.path[:]=[p for p in sys.path if p];"
    "r=sys.stdin.buffer;exec(compile(r.read(int(r.readline())),'fdl-probe','exec'),{'__name__':'fdl_probe'})"
)
"""``python -c``: says its version in words that any Python speaks, then reads and runs this file."""

LIFETIME_S: Final = 300
"""The kernel ends this program then, whatever holds it."""

MAX_PEERS: Final = 64
PAYLOAD_BYTES: Final = 64 * 1024
"""More than one packet of any size: what only loses large packets is found out."""

MAX_TEXT_BYTES: Final = 64 * 1024
MAX_PROCESSES: Final = 256

_TORCH = """
import json, torch
arches, nccl = getattr(torch._C, "_cuda_getArchFlags", None), ""
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    pass
print("\\nFDL1 " + json.dumps({"error": "", "arches": ((arches and arches()) or "").split(), "nccl": nccl}))
"""
_SMI_QUERY = "--query-gpu=index,uuid,name,compute_cap,memory.total"
_SMI_OLD_QUERY = "--query-gpu=index,uuid,name,pstate,memory.total"
_SMI_USE = "--query-gpu=uuid,memory.used,driver_version"
_SMI_APPS = "--query-compute-apps=gpu_uuid,pid,used_memory"
_CSV = "--format=csv,noheader,nounits"

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU = 0x8913, 0x8915, 0x8921


def main() -> None:
    """Answer on standard output: facts, then who could be reached; then listen until standard input ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFETIME_S)
    answers, nonce = os.dup(1), sys.argv[1]
    os.dup2(2, 1)  # what anything else prints is not an answer
    lines = sys.stdin.buffer

    def answer(record: dict[str, Any]) -> None:
        body = json.dumps(record).encode()
        data = b"\nFDL1 %s %d\n%s" % (nonce.encode(), len(body), body)
        while data:
            data = data[os.write(answers, data) :]

    request = json.loads(lines.readline())
    port = _listen(request["token"])
    answer({**facts(request), "port": port})
    if asked := lines.readline():
        heard_s = time.time()
        reached = _reach_all(json.loads(asked))
        answer({"heard_s": heard_s, **reached, "said_s": time.time()})
        lines.read(1)
    os._exit(0)  # no thread of ours, and nothing that site packages left, may hold the session


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that ``request`` asks for, gathered side by side.

    Args:
        request: ``packages`` and ``modules`` by name; ``folder``, ``script`` and ``env`` of the ranks; ``code``, files
            of the project with their SHA-256; ``places``, pairs of a role and a folder; ``gpus``: whether to ask for
            them; ``smi_timeout_s``, ``torch_timeout_s``; ``own_run``, whose processes do not count as left over.
    """
    folder = os.path.expanduser(request["folder"])
    with ThreadPoolExecutor(8) as pool:
        smi = pool.submit(_nvidia_smi, request["smi_timeout_s"]) if request["gpus"] else None
        build = _torch_build()
        deep = None
        if request["gpus"] and build and build["cuda"]:
            deep = pool.submit(_torch_import, request["torch_timeout_s"], request["env"])
        places = [pool.submit(place, role, path) for role, path in request["places"]]
        return {
            "hostname": socket.gethostname(),
            "user": _user(),
            "is_root": os.geteuid() == 0,
            "python": ".".join(map(str, sys.version_info[:3])),
            "executable": sys.executable,
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": _memory(),
            "packages": {name: version(name) for name in request["packages"]},
            "torch": build,
            "limits": _limits(),
            "has_rdma": os.path.isdir("/sys/class/infiniband"),
            "interfaces": _interfaces(),
            "script": _script(folder, request["script"]),
            "code": _code(folder, request["code"]),
            "missing_modules": missing_modules(request["modules"], folder, request["script"], request["env"]),
            "runs": _runs(request["own_run"]),
            "driver": _first_line("/proc/driver/nvidia/version"),
            "amd": "/dev/kfd" if os.path.exists("/dev/kfd") else shutil.which("rocm-smi") or "",
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "places": [each.result() for each in places],
            "smi": smi.result() if smi else None,
            "torch_import": deep.result() if deep else None,
        }


# ------------------------------------------------------------------------------------------------- python and packages
def version(package: str) -> str:
    """Its version; "unknown" where it is there without one; empty where it is not there."""
    module = {"pyyaml": "yaml"}.get(package, package)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package) or "unknown"
    beside = os.path.join(os.path.dirname(spec.origin or ""), "version.py")  # torch's is there
    return _assigned(spec.origin, "__version__") or _assigned(beside, "__version__") or "unknown"


def _torch_build() -> dict[str, str] | None:
    """What this torch was built for, read from its file: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "version.py")
    return {"version": _assigned(path, "__version__"), "cuda": _assigned(path, "cuda"), "hip": _assigned(path, "hip")}


def _assigned(path: str | None, name: str) -> str:
    try:
        text = Path(path or "").read_text(encoding="utf-8", errors="replace")[:MAX_TEXT_BYTES]
    except OSError:
        return ""
    found = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"\n]*)['\"]", text, re.MULTILINE)
    return found.group(1) if found else ""


def _torch_import(timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
    text, reason = _output([sys.executable, "-P", "-c", _TORCH], timeout_s, env)
    lines = [line for line in text.splitlines() if line.startswith("FDL1 ")]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1][5:])
        return found
    said = [line for line in text.splitlines() if line.strip()]
    return {"error": reason if reason.startswith("no answer") or not said else said[-1][:500], "arches": [], "nccl": ""}


def missing_modules(modules: Iterable[str], folder: str, script: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Those that a script run in ``folder`` would not find."""
    folders = import_folders(folder, script, env)
    return [name for name in modules if not _is_there(name, folders)]


def import_folders(folder: str, script: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Where a script run in ``folder`` finds modules of its own: beside it, and on its PYTHONPATH."""
    beside = folder if not script or script[0] == "-m" else os.path.dirname(os.path.join(folder, script[0]))
    return [beside, *(os.path.join(folder, each) for each in env.get("PYTHONPATH", "").split(os.pathsep) if each)]


def _is_there(module: str, folders: list[str]) -> bool:
    if module in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(module, folders):
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _script(folder: str, script: list[str]) -> str:
    """Empty where it can be read or cannot be known, else what is wrong."""
    if not script or script[0] in ("-m", "-") or not os.path.isdir(folder):
        return ""
    path = os.path.join(folder, script[0])
    if not os.path.exists(path):
        return f"{path} not found"
    return "" if os.access(path, os.R_OK) else f"{path} cannot be read"


def _code(folder: str, wanted: dict[str, str]) -> dict[str, str]:
    """Files that are not what they should be: their SHA-256, or empty where they are missing."""
    found = {path: _sha256(os.path.join(folder, path)) for path in wanted} if os.path.isdir(folder) else {}
    return {path: content for path, content in found.items() if content != wanted[path]}


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------------- machine
def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _limits() -> dict[str, int]:
    numbers = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    return {name: resource.getrlimit(number)[0] for name, number in numbers.items()}


def place(role: str, path: str) -> dict[str, Any]:
    """A folder and the room on its file system; of one that is not there yet, the nearest above counts. Without a
    ``path``: the one for temporary files.
    """
    path = os.path.expanduser(path) or os.environ.get("TMPDIR") or "/tmp"
    found = {"role": role, "path": path, "is_folder": os.path.isdir(path), "is_read_only": False}
    while not os.path.exists(path) and path not in ("", "/"):
        path = os.path.dirname(path)
    try:
        disk = os.statvfs(path or "/")
    except OSError as error:
        return {**found, "total_bytes": 0, "free_bytes": 0, "error": error.strerror or str(error)}
    return {
        **found,
        "is_read_only": bool(disk.f_flag & os.ST_RDONLY),
        "total_bytes": disk.f_blocks * disk.f_frsize,
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "error": "",
    }


def _runs(own_run: str) -> list[dict[str, Any]]:
    """Processes of this user that carry a run's mark, by run; attended: below a daemon or head that lives."""
    runs: dict[str, dict[str, Any]] = {}
    for pid in _own_processes():
        mark = re.search(rb"(?:^|\0)FLODL_RUN_MARK=([^\0:]{1,128}):", _proc(pid, "environ"))
        run_id = mark.group(1).decode(errors="replace") if mark else ""
        if not run_id or run_id == own_run:
            continue
        run = runs.setdefault(run_id, {"run_id": run_id, "pids": [], "is_attended": True})
        run["pids"].append(pid)
        run["is_attended"] = run["is_attended"] and _is_attended(pid)
        if len(runs) >= MAX_PEERS:
            break
    return list(runs.values())


def _own_processes() -> Iterator[int]:
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid() and count < MAX_PROCESSES * 16:
                count += 1
                yield int(name)


def _is_attended(pid: int) -> bool:
    for _ in range(32):
        command = _proc(pid, "cmdline").split(b"\0")
        if any(word.startswith((b"flodl_daemon", b"flodl.controller")) for word in command):
            return True
        stat = _proc(pid, "stat").rpartition(b")")[2].split()
        pid = int(stat[1]) if len(stat) > 1 else 0
        if pid <= 1:
            break
    return False


def _proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()[:MAX_TEXT_BYTES]
    except OSError:
        return b""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0][:300]
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------------------- GPUs
def _nvidia_smi(timeout_s: float) -> dict[str, str]:
    """What it prints, untouched; ``reason`` says why that is of no use."""
    program = shutil.which("nvidia-smi")
    if program is None:
        empty = {"path": "", "query": "", "use": "", "apps": "", "listing": ""}
        return {**empty, "reason": "nvidia-smi is not on PATH"}
    asked = {"use": [_SMI_USE, _CSV], "apps": [_SMI_APPS, _CSV], "listing": ["-L"]}
    with ThreadPoolExecutor(4) as pool:
        gpus = pool.submit(_gpus, program, timeout_s)
        answers = {name: pool.submit(_output, [program, *words], timeout_s) for name, words in asked.items()}
        texts = {name: text for name, each in answers.items() for text, reason in [each.result()] if not reason}
        query, reason = gpus.result()
    return {"path": program, "query": query, "use": "", "apps": "", "listing": "", **texts, "reason": reason}


def _gpus(program: str, timeout_s: float) -> tuple[str, str]:
    """The list of GPUs; drivers that do not know a field are asked without it."""
    text, reason = "", ""
    for query in (_SMI_QUERY, _SMI_OLD_QUERY):
        text, reason = _output([program, query, _CSV], timeout_s)
        if "not a valid field" not in text:
            break
    if not reason:
        return text, ""
    said = next((line.strip() for line in text.splitlines() if line.strip()), "it printed nothing")
    return "", f"nvidia-smi: {reason}: {said[:200]}"


def _output(command: list[str], timeout_s: float, env: dict[str, str] | None = None) -> tuple[str, str]:
    """What it printed, and why that does not count; its whole session is ended when it does not answer in time."""
    with tempfile.TemporaryFile() as file:  # a file: a grandchild that keeps a pipe open cannot hold us
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            return "", f"cannot be run: {error.strerror}"
        reason = ""
        try:
            code = process.wait(timeout_s)
            reason = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"no answer within {timeout_s:g} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        file.seek(0)
        return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace"), reason


# ------------------------------------------------------------------------------------------------------------- network
def _interfaces() -> list[dict[str, Any]]:
    """Those that are up, with their addresses that others can dial: no loopback, no link-local."""
    wide: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":
                wide.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            flags = _ask(sock, _SIOCGIFFLAGS, name, "H")
            if not flags or not flags & 1 or flags & 8:  # IFF_UP, IFF_LOOPBACK
                continue
            narrow = _ask(sock, _SIOCGIFADDR, name, "4x4s")
            addresses = ([socket.inet_ntoa(narrow)] if narrow else []) + wide.get(name, [])
            found.append({"name": name, "mtu": _ask(sock, _SIOCGIFMTU, name, "i") or 0, "addresses": addresses})
    return found


def _ask(sock: socket.socket, request: int, interface: str, shape: str) -> Any:
    try:
        reply = fcntl.ioctl(sock, request, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return struct.unpack_from(shape, reply, 16)[0]


def _listen(token: str) -> int:
    """Wait for peers on any free port; who knows ``token`` and gets a large piece through is told so."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0))
    slots = threading.BoundedSemaphore(MAX_PEERS)

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            if slots.acquire(blocking=False):
                threading.Thread(target=_admit, args=(connection, token.encode(), slots.release), daemon=True).start()
            else:
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def _admit(connection: socket.socket, token: bytes, release: Callable[[], None]) -> None:
    try:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            if secrets.compare_digest(_exactly(connection, len(token)), token):
                _exactly(connection, PAYLOAD_BYTES)
                connection.sendall(token)
    finally:
        release()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise OSError("closed")
        data += piece
    return data


def _reach_all(asked: dict[str, Any]) -> dict[str, Any]:
    """``peers``: name → where they listen; ``controllers``: pairs of address and port, of which one has to answer."""
    timeout_s = asked["timeout_s"]
    with ThreadPoolExecutor(MAX_PEERS) as pool:
        peers = {
            name: pool.submit(_reach, [(each, peer["port"]) for each in peer["addresses"]], timeout_s, peer)
            for name, peer in asked["peers"].items()
        }
        controllers = pool.submit(_reach, [tuple(each) for each in asked["controllers"]], timeout_s, None)
        return {"peers": {name: peer.result() for name, peer in peers.items()}, "controller": controllers.result()}


def _reach(addresses: list[tuple[str, int]], timeout_s: float, peer: dict[str, Any] | None) -> dict[str, str]:
    reasons = []
    for address, port in addresses:
        source = (peer["source"], 0) if peer and peer["source"] else None
        try:
            with socket.create_connection((address, port), timeout_s, source) as connection:
                own = str(connection.getsockname()[0]).removeprefix("::ffff:")
                wrong = _prove(connection, peer["token"].encode()) if peer else ""
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
            continue
        if not wrong:
            return {"address": address, "source": own, "error": ""}
        reasons.append(f"{address}: {wrong}")
    return {"address": "", "source": "", "error": "; ".join(reasons[:4]) or "no address to dial"}


def _prove(connection: socket.socket, token: bytes) -> str:
    try:
        connection.sendall(token + bytes(PAYLOAD_BYTES))
        return "" if _exactly(connection, len(token)) == token else "somebody else answers there"
    except TimeoutError:
        return f"connects, but {PAYLOAD_BYTES // 1024} KiB do not pass"
    except OSError as error:
        return f"connects, then {error.strerror or error}"


if __name__ == "fdl_probe":
    main()
