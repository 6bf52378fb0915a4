"""What import-linter cannot see: what is in memory once the light rooms have been imported."""

import subprocess
import sys

LIGHT = (
    "flodl_cli", "flodl_daemon", "flodl.launch", "flodl.config", "flodl.monitor", "flodl.controller",
    "flodl.core", "flodl.wire", "flodl.runtime", "flodl.checkpoint",
)  # fmt: skip

IMPORT_ALL = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    folder = importlib.import_module(package)
    for module in pkgutil.walk_packages(folder.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            assert "torch" not in sys.modules, f"{module.name} brings torch"
"""


def test_light_rooms_load_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *LIGHT], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr


def test_package_itself_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, flodl; assert 'torch' not in sys.modules"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
