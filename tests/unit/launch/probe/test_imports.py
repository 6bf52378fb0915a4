"""What a script cannot do without."""

import pytest

from flodl.launch.probe.imports import MAX_CODE_BYTES, MAX_MODULES, Vital, code_of, needed_modules, vital_of


def test_what_is_imported_on_the_way_down_is_needed() -> None:
    source = b"import os, numpy.linalg as la\nfrom sklearn.datasets import load_digits\nimport torch\nimport flodl\n"
    assert needed_modules(source) == ("os", "numpy", "sklearn")


def test_what_the_script_may_do_without_is_not_needed() -> None:
    source = (
        b"try:\n import wandb\nexcept ImportError:\n wandb = None\n"
        b"if False:\n import apex\n"
        b"def main():\n import pandas\n"
        b"from . import sibling\nfrom .other import x\n"
    )
    assert needed_modules(source) == ()


@pytest.mark.parametrize("source", [b"def", b"\0", b"(" * 5000, b"\xff", b"# coding: nix"])
def test_what_cannot_be_parsed_needs_nothing(source: bytes) -> None:
    assert needed_modules(source) == ()


PROJECT = {
    "/p/train.py": b"import lib.model\nfrom data import load\nimport numpy\ndef main():\n from lib import late\n",
    "/p/lib/__init__.py": b"from .base import Base\n",
    "/p/lib/base.py": b"from .. import above\nfrom . import late\n",
    "/p/lib/model.py": b"import lib.model\n",
    "/p/lib/late.py": b"def broken(",
    "/p/data.py": b"",
    "/p/unused.py": b"",
    "/p/above.py": b"",
}


def test_code_is_the_script_with_all_it_imports_of_the_project() -> None:
    assert next(iter(code_of(["train.py", "-x"], "/p", PROJECT.get))) == "/p/train.py"
    assert set(code_of(["train.py"], "/p", PROJECT.get)) == set(PROJECT) - {"/p/unused.py"}
    assert set(code_of(["../p/train.py"], "/q", PROJECT.get)) == set(PROJECT) - {"/p/unused.py"}


def test_code_of_a_module_is_that_module_with_its_package() -> None:
    assert set(code_of(["-m", "lib.model"], "/p", PROJECT.get)) == {
        path for path in PROJECT if "lib" in path or "above" in path
    }
    package = {"/p/app/__main__.py": b"import app.core", "/p/app/__init__.py": b"", "/p/app/core.py": b""}
    assert set(code_of(["-m", "app"], "/p", package.get)) == set(package)


def test_script_that_is_not_there_has_no_code() -> None:
    assert code_of(["gone.py"], "/p", PROJECT.get) == {}


def test_code_has_an_end() -> None:
    endless = {f"/p/m{n}.py": b"import m%d" % (n + 1) for n in range(2 * MAX_MODULES)}
    assert len(code_of(["m0.py"], "/p", endless.get)) == MAX_MODULES
    large = {"/p/a.py": b"import b\n", "/p/b.py": b"#" * MAX_CODE_BYTES}
    assert set(code_of(["a.py"], "/p", large.get)) == {"/p/a.py"}


OPTIONAL = {
    "/p/train.py": b"""
import sys, app.model
from app import net, settings
from typing import TYPE_CHECKING
try:
    import local_settings
except ImportError:
    local_settings = None
if TYPE_CHECKING:
    import stubs
if sys.platform == "win32":
    import windows
def main():
    import late
""",
    "/p/app/__init__.py": b"from . import tools\ntry:\n from . import settings\nexcept ImportError:\n pass\n",
    "/p/app/model.py": b"from .base import Base\ntry:\n from ._version import version\nexcept ImportError:\n pass\n",
    **dict.fromkeys((f"/p/app/{name}.py" for name in ("base", "net", "tools", "settings", "_version")), b""),
    **dict.fromkeys((f"/p/{name}.py" for name in ("local_settings", "stubs", "windows", "late")), b"import deeper"),
    "/p/deeper.py": b"",
}


def test_only_what_is_imported_on_the_way_down_is_vital() -> None:
    code = code_of(["train.py"], "/p", OPTIONAL.get)
    assert set(code) == set(OPTIONAL)
    vital = vital_of(["train.py"], "/p", code)
    assert vital.script == {"/p/train.py"}
    assert vital.imported == {f"/p/app/{name}.py" for name in ("__init__", "model", "base", "net", "tools")}


def test_module_as_script_is_vital_with_its_package() -> None:
    code = {"/p/app/__init__.py": b"", "/p/app/__main__.py": b"from . import core\n", "/p/app/core.py": b"import app"}
    vital = vital_of(["-m", "app"], "/p", code)
    assert vital == Vital(frozenset({"/p/app/__init__.py", "/p/app/__main__.py"}), frozenset({"/p/app/core.py"}))


def test_script_that_is_not_there_has_nothing_vital() -> None:
    assert vital_of(["gone.py"], "/p", {}) == Vital()
