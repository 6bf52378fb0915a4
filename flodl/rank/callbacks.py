"""The script's functions that run behind an epoch, on the rank that was elected: they leave no trace in the training.

An exception of theirs is printed here, goes into the event, and nothing else comes of it.
"""

import traceback
from typing import Any, assert_never

from flodl.core.actions import CallBack, Evaluate
from flodl.core.events import CalledBack, Evaluated
from flodl.messages import CallbackKind
from flodl.rank.evaluation import evaluate, undisturbed
from flodl.rank.stepper import Stepper
from flodl.rank.words import describe
from flodl.spec import context
from flodl.spec.knobs import JobConfig
from flodl.spec.worker import Worker


class ScriptCallbacks:
    """Calls them, one at a time, on the training thread, while the model holds the consensus."""

    def __init__(self, stepper: Stepper, config: JobConfig) -> None:
        """Assigns only."""
        self._stepper, self._config = stepper, config

    def __call__(self, action: Evaluate | CallBack) -> Evaluated | CalledBack:
        """Do what ``action`` says; the event that follows from it."""
        stepper = self._stepper
        match action:
            case Evaluate(epoch):
                return evaluate(stepper.model, stepper.device, self._config, epoch)
            case CallBack(kind, epoch):
                try:
                    with undisturbed(stepper.model, stepper.device):
                        self._run(kind, epoch)
                except Exception as error:  # noqa: BLE001  # whatever the script raised
                    traceback.print_exc()
                    return CalledBack(kind, epoch, describe(error))
                return CalledBack(kind, epoch, "")
            case _:
                assert_never(action)

    def _run(self, kind: CallbackKind, epoch: int) -> None:
        config, stepper = self._config, self._stepper
        match kind:
            case CallbackKind.EPOCH:
                assert config.epoch_fn is not None
                config.epoch_fn(epoch, self._worker())
            case CallbackKind.CHECKPOINT:
                assert config.checkpoint_fn is not None
                config.checkpoint_fn(epoch, stepper.model)
            case _:
                assert_never(kind)

    def _worker(self) -> Worker:
        stepper = self._stepper
        rate: Any = stepper.optimizer.param_groups[0].get("lr")
        lr = None if rate is None else float(rate)
        return Worker(context.rank(), context.world_size(), stepper.device, stepper.model, lr)
