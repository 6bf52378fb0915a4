"""The two ways to write down a run: one object with keyword arguments and setters, or a chain from the functions."""

from flodl.spec.handle import TrainHandle
from flodl.spec.job import BuildModel, MakeOptimizer, TrainingJob, TrainStep, checked_functions
from flodl.spec.knob import Chained
from flodl.spec.knobs import Knobs, resolve
from flodl.trainer.start import start


class TrainerConfig(Knobs, Chained):
    """Every knob of a run: ``TrainerConfig(ds, batch_size=64, num_epochs=50).max_grad_norm(1.0)``.

    Keyword arguments and setters are the same knobs (``flodl.spec.knobs.Knobs`` explains each). Setters change this
    object and return it.

    Raises:
        ConfigError: a value cannot be used, or two contradict each other; the message names the fix.
        UnknownArgument: an argument without a default is missing, or none has that name; a TypeError too.
    """

    def _constructed(self) -> None:
        resolve(self)


class TrainerBuilder(Knobs, Chained):
    """The same knobs as a chain that ends with ``run()``; made by ``Trainer.builder``."""

    def __init__(self, build_model: BuildModel, make_optimizer: MakeOptimizer, train_step: TrainStep) -> None:
        self._values = {}
        checked_functions(build_model, make_optimizer, train_step)
        self._functions = (build_model, make_optimizer, train_step)

    def run(self) -> TrainHandle:
        """Start the training; ``Trainer.run`` says how and what it raises."""
        return start(TrainingJob(*self._functions, config=resolve(self)))
