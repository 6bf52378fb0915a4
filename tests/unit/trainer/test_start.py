"""What a script that was started by itself is told about the machine."""

from pathlib import Path

import pytest

from flodl.trainer import start


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo version mismatch; exit 18", "warning: no GPU was found here, so this process trains alone: nvidia-smi"),
        ("echo '0, GPU-aa, A, 8.0, 10'", ""),
    ],
)
def test_gpus_that_are_not_offered_are_no_silent_end_of_the_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answer: str, words: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(start._visible_gpus()) == (not words)
    told = capfd.readouterr().err
    assert words in told
    assert bool(told) == bool(words)
