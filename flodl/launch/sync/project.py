"""What a sync brings to a host, and what it says of it: no ssh is needed to know these."""

from collections.abc import Callable
from dataclasses import dataclass

from flodl.errors import ConfigError
from flodl.launch.document import DocumentFault, load
from flodl.launch.plan import RunSpec, SyncMode
from flodl.launch.rundir import RunDir, read_document
from flodl.launch.sync.plan import SyncPlan
from flodl.launch.tree import Tree


@dataclass(frozen=True, slots=True)
class Project:
    """What is to be on every host: ``tree``, of ``folder`` on this machine; ``mode`` is rsync or sftp."""

    folder: str
    tree: Tree
    mode: SyncMode


@dataclass(frozen=True, slots=True)
class Brought:
    """What a sync has done. ``by`` is how files travelled, ``wire_bytes`` how many bytes that took."""

    plan: SyncPlan
    by: SyncMode
    wire_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Telling:
    """Who hears of a sync: ``say`` takes sentences, ``moved`` the bytes that travelled and those that will."""

    say: Callable[[str], None]
    moved: Callable[[int, int], None]


def project_of(run: RunDir, spec: RunSpec) -> Project:
    """The project as it was at the launch of ``run``, from its directory.

    Raises:
        ConfigError: the directory has no record of it.
    """
    try:
        tree = load(Tree, read_document(run.tree_json))
    except (OSError, DocumentFault) as error:
        raise ConfigError(f"{run.tree_json}: {error}; launch again") from None
    return Project(spec.project or spec.cwd, tree, spec.sync.mode)
