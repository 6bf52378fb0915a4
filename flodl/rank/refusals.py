"""What a script may not do with its functions, said in words that name the remedy instead of torch's own."""

import functools
import inspect
from typing import Any, Final

import torch

from flodl.errors import UsageError
from flodl.rank.words import describe_value

# How torch begins or names these; there is no class of its own for either.
_ONE_VALUE_PER_CHANNEL: Final = "Expected more than 1 value per channel"
_GRAPH_IS_GONE: Final = "backward through the graph a second time"


def refusal(message: str, function: object, name: str) -> UsageError:
    """The error for a misuse in ``function`` of the script; where it is defined stands below the message."""
    error = UsageError(message)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is not None:
        error.add_note(f'  {name}: File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}')
    return error


def checked_optimizer(optimizer: Any, make_optimizer: object) -> torch.optim.Optimizer:
    """``optimizer``, if it is one whose step flodl can take.

    Raises:
        UsageError: it is none, or its step needs a closure.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        said = f"make_optimizer returned {describe_value(optimizer)}; return a torch.optim.Optimizer"
        raise refusal(said, make_optimizer, "make_optimizer")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        said = (
            f"make_optimizer returned a {type(optimizer).__name__}, whose step needs a closure that computes the loss "
            "anew; flodl calls train_step once per batch: take an optimizer without closure, such as "
            "torch.optim.AdamW or torch.optim.SGD"
        )
        raise refusal(said, make_optimizer, "make_optimizer") from None
    return optimizer


def checked_loss(loss: Any, train_step: object) -> torch.Tensor:
    """``loss``, if backward can start from it.

    Raises:
        UsageError: it is no tensor of one real number, or has no graph.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        kind = "a complex number" if _is_one_number(loss) else describe_value(loss)
        said = f"train_step returned {kind}; return the loss of the batch, a 0-d tensor"
        raise refusal(said, train_step, "train_step")
    if not loss.requires_grad:
        said = (
            "train_step returned a loss without a graph, so there is no gradient; return it as it was computed from "
            "the model's output: without .detach(), .item() or torch.tensor(...), outside of torch.no_grad(), and "
            "with parameters that are not all frozen"
        )
        raise refusal(said, train_step, "train_step")
    return loss


def misuse_behind(error: Exception, samples: int, train_step: object) -> UsageError | None:
    """The misuse that torch complains about in its own words, with torch's traceback; None for any other error.

    Args:
        error: raised by ``train_step``, or by backward from its loss.
        samples: of the batch, or of the micro-batch.
        train_step: the script's.
    """
    text = str(error)
    if isinstance(error, ValueError) and text.startswith(_ONE_VALUE_PER_CHANNEL):
        said = (
            "train_step was given a batch of one sample, on which batch norm cannot train; set batch_size to at least "
            "2 (a last batch of one sample joins the batch before it), or take a norm that works on single samples, "
            "such as GroupNorm or LayerNorm"
            if samples == 1
            else f"batch norm got one value per channel, though the batch has {samples} samples ({text}); it needs at "
            "least 2: see what train_step and the model make of the batch"
        )
    elif isinstance(error, RuntimeError) and _GRAPH_IS_GONE in text:
        said = (
            "backward from the loss of train_step met a graph that an earlier backward has used up; leave out "
            "loss.backward() in train_step, for flodl calls it, and detach() what one step keeps for the next"
        )
    else:
        return None
    return refusal(said, train_step, "train_step").with_traceback(error.__traceback__)


def _is_one_number(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor) and loss.numel() == 1
