"""What a script cannot do without."""

import pytest

from flodl.launch.probe.imports import needed_modules


def test_what_is_imported_on_the_way_down_is_needed() -> None:
    source = "import os, numpy.linalg as la\nfrom sklearn.datasets import load_digits\nimport torch\nimport flodl\n"
    assert needed_modules(source) == ("os", "numpy", "sklearn")


def test_what_the_script_may_do_without_is_not_needed() -> None:
    source = (
        "try:\n import wandb\nexcept ImportError:\n wandb = None\n"
        "if False:\n import apex\n"
        "def main():\n import pandas\n"
        "from . import sibling\nfrom .other import x\n"
    )
    assert needed_modules(source) == ()


@pytest.mark.parametrize("source", ["def", "\0", "(" * 5000])
def test_what_cannot_be_parsed_needs_nothing(source: str) -> None:
    assert needed_modules(source) == ()
