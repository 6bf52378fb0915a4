"""The user's entrance: three functions and a config in, a handle out."""

from flodl.spec.handle import TrainHandle
from flodl.spec.job import BuildModel, MakeOptimizer, TrainingJob, TrainStep, checked_functions
from flodl.spec.knobs import resolve
from flodl.trainer.config import TrainerBuilder, TrainerConfig
from flodl.trainer.start import start


class Trainer:
    """Trains one model, wherever the script was started: in this process, or over the ranks of a cluster."""

    @staticmethod
    def builder(build_model: BuildModel, make_optimizer: MakeOptimizer, train_step: TrainStep) -> TrainerBuilder:
        """Start a chain: ``Trainer.builder(...).dataset(ds).batch_size(64).num_epochs(50).run()``.

        Args:
            build_model: ``build_model(device) -> nn.Module``, called once in every rank.
            make_optimizer: ``make_optimizer(parameters) -> Optimizer``, likewise.
            train_step: ``train_step(model, batch) -> loss``, a 0-d tensor. flodl owns backward, clipping, the
                optimizer's step and ``zero_grad``.

        Raises:
            UsageError: one of the three is not a function, or not one of its arguments.
        """
        return TrainerBuilder(build_model, make_optimizer, train_step)

    @staticmethod
    def run(
        build_model: BuildModel, make_optimizer: MakeOptimizer, train_step: TrainStep, config: TrainerConfig
    ) -> TrainHandle:
        """Train as ``config`` says, in the role that this process has; the arguments are ``builder``'s.

        A rank trains here and its process ends here. In the head and in a solo process the handle comes back at once.

        Raises:
            UsageError: called twice, in a thread, in a re-imported script, or with something that is no function.
            ConfigError: the config contradicts itself or the way the script was started.
        """
        checked_functions(build_model, make_optimizer, train_step)
        return start(TrainingJob(build_model, make_optimizer, train_step, resolve(config)))
