"""Whom a survey asks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from flodl.config.builder import local_cluster
from flodl.errors import HostUnreachable
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import NO_SCRIPT, HostKind, HostPlan, plan
from flodl.launch.probe.survey import survey
from flodl.launch.probe.talk import Channel
from tests.unit.launch.probe.describing import host


async def unreachable(plan: HostPlan, nonce: str) -> Channel:
    raise HostUnreachable(plan.name, "connect", "No route to host")


def test_host_that_dials_in_by_itself_is_not_counted_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path))
    hosts = (host("a"), host("b", kind=HostKind.MANAGED))
    spec = replace(plan(local_cluster(1), local_request(LaunchOptions((NO_SCRIPT,)))), hosts=hosts)
    found = asyncio.run(survey(spec, unreachable))
    assert (found.asked_count, set(found.unreachable)) == (1, {"a"})
