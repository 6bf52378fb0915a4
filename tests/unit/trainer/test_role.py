"""The role of a process, and the traps of entering a script again."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import flodl
from flodl.config.builder import ClusterBuilder
from flodl.errors import ConfigError, ProtocolError, UsageError
from flodl.trainer.role import HeadRole, Promoted, RankRole, Role, Solo, refuse_wrong_place, take_role
from flodl.trainer.trainer import Trainer

TIMEOUT_S = 60
CLUSTER = ClusterBuilder()
TICKET = {"run_id": "abc", "rank": 1, "world_size": 3}


def role(cluster: Any = None, gpus: int = 0, **environ: str) -> Role:
    return take_role(cluster, environ, pid=77, visible_gpus=lambda: [object()] * gpus)


def run_script(tmp_path: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(Path(flodl.__file__).parents[1])} | environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(("kind", "expected"), [("rank", RankRole(TICKET)), ("head", HeadRole(TICKET))])
def test_a_ticket_gives_the_role_and_is_used_up(kind: str, expected: Role) -> None:
    environ = {"FLODL_ROLE": f"{kind}:{json.dumps(TICKET)}"}
    assert take_role(None, environ, pid=77, visible_gpus=list) == expected
    assert environ == {"FLODL_ROLE": "taken:77"}


def test_a_second_call_in_the_same_process_is_told_so() -> None:
    with pytest.raises(UsageError, match="called twice; one launch runs one training"):
        role(FLODL_ROLE="taken:77")


def test_a_process_that_inherited_the_ticket_is_told_of_the_missing_guard() -> None:
    with pytest.raises(UsageError, match='under `if __name__ == "__main__":`'):
        role(FLODL_ROLE="taken:78")


def test_a_script_with_a_trainer_is_told_to_leave_plain_out() -> None:
    with pytest.raises(UsageError, match="leave --plain out"):
        role(FLODL_ROLE="plain")


@pytest.mark.parametrize("text", ["rank:", "rank:[1]", "rank:{", "king:{}", "rank"])
def test_an_unreadable_ticket_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="unset it to run"):
        role(FLODL_ROLE=text)


def test_without_a_ticket_the_process_is_solo() -> None:
    assert role() == Solo()


def test_under_pytest_no_process_promotes_itself() -> None:
    assert role(gpus=8) == Solo()


def test_a_cluster_in_code_or_in_the_environment_promotes() -> None:
    assert role(cluster=CLUSTER) == Promoted(CLUSTER)
    assert role(FDL_CLUSTER="/lab/hosts.yml") == Promoted("/lab/hosts.yml")


def test_flodl_solo_forbids_promotion() -> None:
    assert role(cluster=CLUSTER, FLODL_SOLO="1") == Solo()


def test_a_cluster_in_code_beside_a_cluster_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hosts\.yml names one too; drop \.cluster"):
        role(cluster=CLUSTER, FDL_CLUSTER="/lab/hosts.yml")
    with pytest.raises(ConfigError, match=r"drop \.cluster"):
        role(cluster=CLUSTER, FLODL_ROLE="rank:" + json.dumps(TICKET | {"cluster_file": "/lab/hosts.yml"}))


def test_a_call_in_a_thread_is_refused() -> None:
    caught: list[UsageError] = []

    def call() -> None:
        try:
            refuse_wrong_place()
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(TIMEOUT_S)
    assert "call it in the main thread" in str(caught[0])


def test_a_spawned_child_that_imports_an_unguarded_script_is_told_of_the_guard(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import multiprocessing
        from flodl.trainer.role import refuse_wrong_place

        refuse_wrong_place()
        child = multiprocessing.get_context("spawn").Process(target=print)
        child.start()
        child.join(30)
        """,
    )
    assert 'under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ((3, torch.optim.Adam, max), "build_model is 3; pass a function"),
        ((torch.nn.Linear(1, 1), torch.optim.Adam, max), "build_model is a model already"),
        ((max, torch.optim.SGD([torch.zeros(1)]), max), "make_optimizer is an optimizer already"),
        ((max, torch.optim.Adam, None), "train_step is None"),
        (
            (lambda: 1, torch.optim.Adam, max),
            r"build_model is called as build_model\(device\), and <lambda> takes \(\)",
        ),
        ((max, lambda p, lr: 1, max), r"called as make_optimizer\(parameters\), and <lambda> takes \(p, lr\)"),
        (
            (max, max, lambda model, x, y: 1),
            r"called as train_step\(model, batch\), and <lambda> takes \(model, x, y\)",
        ),
    ],
)
def test_what_is_no_function_is_refused(functions: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Trainer.builder(*functions)


def test_import_flodl_is_light_and_the_public_names_are_there(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import sys
        import flodl
        assert flodl.is_head() and flodl.rank() == 0 and flodl.world_size() == 1
        assert not {"torch", "numpy"} & set(sys.modules)
        for name in dir(flodl):
            getattr(flodl, name)
        import flodl.rank
        assert flodl.rank() == 0
        """,
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        flodl.Trainr  # noqa: B018
