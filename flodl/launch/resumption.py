"""``fdl launch --resume``: a run that has ended, or whose controller is gone, once more from its last checkpoint.

What was asked for stands in the old run's run.json, where its checkpoints lie in its event log. The new run is asked
for the same, under a number of its own, and goes on from there whatever ranks there are by now.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from flodl.checkpoint.bundle import RESUME_VARIABLE
from flodl.checkpoint.reader import look
from flodl.errors import CheckpointError, ConfigError
from flodl.launch.document import DocumentFault, load
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import RunSpec
from flodl.launch.rundir import RunDir, read_document


def plan_resumption(run: RunDir, options: LaunchOptions) -> tuple[RunSpec, Path]:
    """What is launched in the place of ``run``, and the checkpoint that it goes on from; ``options.script`` is unused.

    Raises:
        ConfigError: the run is still live, was a plain one, or its directory does not say what was asked for.
        CheckpointError: it has left no checkpoint, or none that is whole.
    """
    if run.is_live():
        raise ConfigError(f"run {run.run_id} is live; fdl stop {run.run_id} saves and ends it")
    old = _asked(run)
    if old.plain is not None:
        raise ConfigError(f"run {run.run_id} was a plain run: its script alone knows what it saved; launch it again")
    stem = _last_checkpoint(run, old)
    request = local_request(options)
    env = {**old.env, "FDL_RUN_ID": request.run_id, RESUME_VARIABLE: str(stem)}
    spec = replace(
        old,
        run_id=request.run_id,
        name=options.name or old.name,
        created_s=request.created_s,
        port=old.port if old.cluster_file else 0,
        env=env,
        stop_timeout_s=options.stop_timeout_s,
        spawns_head=True,
    )
    return spec, stem


def last_checkpoint(run: RunDir) -> Path:
    """The checkpoint that a resumption of ``run`` would go on from.

    Raises:
        ConfigError: its directory does not say what was asked for.
        CheckpointError: it has left no checkpoint, or none that is whole.
    """
    return _last_checkpoint(run, _asked(run))


def _asked(run: RunDir) -> RunSpec:
    try:
        return load(RunSpec, read_document(run.run_json))
    except (OSError, DocumentFault) as error:
        raise ConfigError(f"{run.run_json}: {error}; without it nobody knows what was launched") from None


def _last_checkpoint(run: RunDir, spec: RunSpec) -> Path:
    """The stem of the run's own checkpoint; of the one that it went on from, where it has not come to save."""
    stems = _stems(run)
    if stems is None:
        raise CheckpointError(
            f"run {run.run_id} has not begun to train, so there is nothing to go on from; launch anew"
        )
    saved, begun = (Path(spec.cwd, stem) if stem else None for stem in stems)
    if saved is None and begun is None:
        raise CheckpointError(f"run {run.run_id} has no save_path, so it saved nothing; set one, and launch anew")
    if saved is not None:
        try:
            found = look(saved)
        except CheckpointError:
            if begun is None:
                raise
        else:
            if found.meta.saved_at_s >= spec.created_s or saved == begun:
                return saved
    if begun is None:
        raise CheckpointError(
            f"run {run.run_id} ended before its first checkpoint, and what lies at {saved} is older than it; "
            "launch anew"
        )
    look(begun)
    return begun


def _stems(run: RunDir) -> tuple[str, str] | None:
    """``save_path`` and ``resume_from`` as the run's head gave them; None when it never came so far."""
    try:
        with (run.path / "events.jsonl").open() as file:
            for line in file:
                record = _record(line)
                if record.get("event") == "admitted":
                    fields = record["fields"]
                    return str(fields["save_path"]), str(fields["resume_from"])
    except OSError:
        return None
    return None


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # the last line of a controller that was killed
        return {}
    return record if isinstance(record, dict) else {}
