"""What a script cannot do without."""

import pytest

from flodl.launch.probe.imports import MAX_CODE_BYTES, MAX_MODULES, code_of, needed_modules


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
