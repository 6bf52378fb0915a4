"""A line of the run's event log, which the controller and daemons ask for alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from flodl.messages import Scalar


class Severity(StrEnum):
    """How much a recorded event matters: critical means that something was lost."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Record:
    """Write one line to the run's event log. ``event`` is a short class name such as ``rank_lost``."""

    event: str
    severity: Severity
    detail: str
    fields: Mapping[str, Scalar | tuple[object, ...]]
