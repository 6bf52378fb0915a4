"""What ``fdl join`` adds to the controller's words."""

from pathlib import Path

import pytest

from flodl.errors import JoinRefused
from flodl.launch.control import ControllerClient
from flodl.launch.join import JoinRequest, join


@pytest.mark.parametrize("is_wrong_token", [True, False])
def test_other_token_may_be_a_walk_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_wrong_token: bool) -> None:
    def refuse(*_: object) -> None:
        raise JoinRefused("it holds another token", is_wrong_token=is_wrong_token)

    monkeypatch.setattr(ControllerClient, "ask_bootstrap", refuse)
    request = JoinRequest("127.0.0.1", 1, "", b"\x5e" * 32, "box", ("cpu",), str(tmp_path), lambda run: tmp_path / run)
    with pytest.raises(JoinRefused) as caught:
        join(request)
    assert ("goes with --persist" in str(caught.value)) is is_wrong_token
