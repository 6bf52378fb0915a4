"""What tests of checkpoints on disk share."""

import pytest

from tests.unit.checkpoint.kills import Operations


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """File operations of the code that saves, of which the last one may be a kill."""
    return Operations(monkeypatch)
