"""flodl: data-parallel PyTorch training on unequal machines.

The public names below are imported when they are first used, so that ``import flodl`` is quick and torch-free.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl.averaging.outer import NesterovMomentum as NesterovMomentum
    from flodl.averaging.outer import OuterAvg as OuterAvg
    from flodl.averaging.outer import OuterOptimizer as OuterOptimizer
    from flodl.averaging.outer import SlowMomentum as SlowMomentum
    from flodl.config.builder import ClusterBuilder as ClusterBuilder
    from flodl.config.gpus import GpuInfo as GpuInfo
    from flodl.config.gpus import detect_gpus as detect_gpus
    from flodl.core.guards import ConvergenceAction as ConvergenceAction
    from flodl.core.guards import ConvergenceGuard as ConvergenceGuard
    from flodl.core.guards import MsfGuard as MsfGuard
    from flodl.core.guards import NoGuard as NoGuard
    from flodl.core.guards import TrendGuard as TrendGuard
    from flodl.errors import CheckpointError as CheckpointError
    from flodl.errors import ConfigError as ConfigError
    from flodl.errors import CoverageError as CoverageError
    from flodl.errors import DeadlineExceeded as DeadlineExceeded
    from flodl.errors import FlodlError as FlodlError
    from flodl.errors import HostUnreachable as HostUnreachable
    from flodl.errors import InvariantViolation as InvariantViolation
    from flodl.errors import JoinRefused as JoinRefused
    from flodl.errors import LocalProtocolError as LocalProtocolError
    from flodl.errors import PeerLost as PeerLost
    from flodl.errors import PreflightError as PreflightError
    from flodl.errors import ProtocolError as ProtocolError
    from flodl.errors import RankFailed as RankFailed
    from flodl.errors import RemoteProtocolError as RemoteProtocolError
    from flodl.errors import TooFewRanks as TooFewRanks
    from flodl.errors import UnknownArgument as UnknownArgument
    from flodl.errors import UnknownSetting as UnknownSetting
    from flodl.errors import UsageError as UsageError
    from flodl.messages import Precision as Precision
    from flodl.messages import RoundFigures as RoundFigures
    from flodl.spec.cadence import ElCheConfig as ElCheConfig
    from flodl.spec.cadence import ElCheMode as ElCheMode
    from flodl.spec.context import is_head as is_head
    from flodl.spec.context import rank as rank
    from flodl.spec.context import record_scalar as record_scalar
    from flodl.spec.context import world_size as world_size
    from flodl.spec.handle import TrainHandle as TrainHandle
    from flodl.spec.knobs import EpochCallbackPolicy as EpochCallbackPolicy
    from flodl.spec.metrics import EpochMetrics as EpochMetrics
    from flodl.spec.metrics import RankEpoch as RankEpoch
    from flodl.spec.state import TrainedState as TrainedState
    from flodl.spec.weights import save_checkpoint as save_checkpoint
    from flodl.spec.worker import Worker as Worker
    from flodl.trainer.config import TrainerConfig as TrainerConfig
    from flodl.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "flodl.errors",
    "ClusterBuilder": "flodl.config.builder",
    "ConfigError": "flodl.errors",
    "ConvergenceAction": "flodl.core.guards",
    "ConvergenceGuard": "flodl.core.guards",
    "CoverageError": "flodl.errors",
    "DeadlineExceeded": "flodl.errors",
    "ElCheConfig": "flodl.spec.cadence",
    "ElCheMode": "flodl.spec.cadence",
    "EpochCallbackPolicy": "flodl.spec.knobs",
    "EpochMetrics": "flodl.spec.metrics",
    "FlodlError": "flodl.errors",
    "GpuInfo": "flodl.config.gpus",
    "HostUnreachable": "flodl.errors",
    "InvariantViolation": "flodl.errors",
    "JoinRefused": "flodl.errors",
    "LocalProtocolError": "flodl.errors",
    "MsfGuard": "flodl.core.guards",
    "NesterovMomentum": "flodl.averaging.outer",
    "NoGuard": "flodl.core.guards",
    "OuterAvg": "flodl.averaging.outer",
    "OuterOptimizer": "flodl.averaging.outer",
    "PeerLost": "flodl.errors",
    "Precision": "flodl.messages",
    "PreflightError": "flodl.errors",
    "ProtocolError": "flodl.errors",
    "RankEpoch": "flodl.spec.metrics",
    "RankFailed": "flodl.errors",
    "RemoteProtocolError": "flodl.errors",
    "RoundFigures": "flodl.messages",
    "SlowMomentum": "flodl.averaging.outer",
    "TooFewRanks": "flodl.errors",
    "TrainHandle": "flodl.spec.handle",
    "TrainedState": "flodl.spec.state",
    "Trainer": "flodl.trainer.trainer",
    "TrainerConfig": "flodl.trainer.config",
    "TrendGuard": "flodl.core.guards",
    "UnknownArgument": "flodl.errors",
    "UnknownSetting": "flodl.errors",
    "UsageError": "flodl.errors",
    "Worker": "flodl.spec.worker",
    "detect_gpus": "flodl.config.gpus",
    "is_head": "flodl.spec.context",
    "rank": "flodl.spec.context",
    "record_scalar": "flodl.spec.context",
    "save_checkpoint": "flodl.spec.weights",
    "world_size": "flodl.spec.context",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flodl' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
