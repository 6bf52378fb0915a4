"""Other people's training loops, launched with --plain: what runs under torchrun runs here. Needs the extra
``frameworks``.
"""

import importlib.util
import re

import pytest

from tests.runs import ROOT, Fdl

pytestmark = pytest.mark.timeout(240)

SCRIPTS = {"hugging_face": "transformers", "accelerate_loop": "accelerate", "lightning_fit": "lightning"}
STEPS = {"hugging_face": 8, "accelerate_loop": 80, "lightning_fit": 16}
"""With two ranks; one that trained alone would need twice as many."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_loop_of_a_framework_trains_over_two_ranks(fdl: Fdl, name: str) -> None:
    package = SCRIPTS[name]
    needed = {"transformers", "accelerate"} if package == "transformers" else {package}
    missing = [each for each in sorted(needed) if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install '.[frameworks]')")
    script = ROOT / "tests" / "scripts" / f"{name}.py"
    arguments = () if name == "accelerate_loop" else (fdl.folder / "out",)

    run = fdl.launch("--stop-timeout", 5, "--local", 2, "--plain", script, *arguments)

    assert run.wait() == 0, run.story()
    ranks = sorted(re.findall(r"rank (\d) of 2: step (\d+)", run.stdout))
    assert ranks == [("0", str(STEPS[name])), ("1", str(STEPS[name]))], run.story()
    run.wait_until_clean()
