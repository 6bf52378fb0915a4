"""Other people's training loops, launched with --plain: what runs under torchrun runs here. Needs the extra
``frameworks``.
"""

import importlib.util
import re
from typing import Final

import pytest

from tests.runs import ROOT, Fdl

pytestmark = pytest.mark.timeout(240)

STEPS: Final = {"hugging_face": 8, "accelerate_loop": 80, "lightning_fit": 16}
"""Of each script with two ranks; one rank that trained alone would need twice as many."""

MISSING: Final = [
    each for each in ("accelerate", "lightning", "transformers") if importlib.util.find_spec(each) is None
]


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install '.[frameworks]')")
def test_loops_of_frameworks_train_over_two_ranks(fdl: Fdl) -> None:
    options = ("--stop-timeout", 5, "--local", 2, "--plain")
    runs = {
        name: fdl.launch(*options, ROOT / "tests" / "scripts" / f"{name}.py", "--folder", fdl.folder / name)
        for name in STEPS
    }

    for name, run in runs.items():
        assert run.wait() == 0, run.story()
        ranks = sorted(re.findall(r"rank (\d) of 2: step (\d+)", run.stdout))
        assert ranks == [("0", str(STEPS[name])), ("1", str(STEPS[name]))], run.story()
        run.wait_until_clean()
