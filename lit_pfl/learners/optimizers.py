"""What a learner's ``configure_optimizers`` returns, made to serve a method."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import optimizers_in
from lit_pfl.nn import composed_layers


def single_optimizer(configured: Any) -> torch.optim.Optimizer:
    """Return the one optimizer in what ``configure_optimizers`` returned.

    Raises:
        ConfigError: when there is none, or more than one.
    """
    found = optimizers_in(configured)
    if len(found) != 1:
        raise ConfigError(
            f"model.learner: its configure_optimizers gives {len(found)} optimizers; a client's learner needs exactly "
            "one, as automatic optimization does."
        )
    return found[0]


def configured_by(learner: L.LightningModule) -> Any:
    """Return what a learner's ``configure_optimizers`` returns, where a method may have replaced layers.

    Raises:
        ConfigError: when it fails on replaced layers, or its optimizers train them in part or still train what they
            replace.
    """
    replaced = dict(composed_layers(learner))
    if not replaced:
        return learner.configure_optimizers()
    name = type(learner).__name__
    try:
        configured = learner.configure_optimizers()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.learner: configure_optimizers of {name} fails on layers that this method replaces "
            f"({_parameters_of(replaced)}): {type(error).__name__}: {error}"
        ) from error
    groups = [group for one in optimizers_in(configured) for group in one.param_groups]
    given = {id(weight) for group in groups for weight in group["params"]}
    others = bool(given - {id(weight) for weight in learner.parameters()})
    for layer, part in replaced.items():
        trained = {f"{layer}.{weight}": id(w) for weight, w in part.named_parameters() if w.requires_grad}
        missing = [weight for weight, own in trained.items() if own not in given]
        if missing and others:
            raise ConfigError(
                f"model.learner: the optimizer of {name} has weights of layers that this method has replaced, and not "
                f"{missing[0]}; make it in configure_optimizers, from self.parameters() as they are then."
            )
        if missing and len(missing) < len(trained):
            raise ConfigError(
                f"model.learner: configure_optimizers of {name} leaves out {missing[0]}, so it would not train; choose "
                f"parameters of replaced layers by their names now ({_parameters_of(replaced)})."
            )
        if missing and given:
            rank_zero_warn(f"{name}: no optimizer has a parameter of {layer} ({missing[0]}), so it does not train.")
    return configured


def _parameters_of(replaced: Mapping[str, nn.Module]) -> str:
    """Return a replaced layer's kind and the names of its parameters, for a message."""
    layer, part = next(iter(replaced.items()))
    return f"{layer} is a {type(part).__name__} of {', '.join(name for name, _ in part.named_parameters())}"


def set_schedules_to(rounds: int, local_epochs: int, trainer: L.Trainer) -> None:
    """Let schedules of epochs count rounds: bring them up to the rounds completed, and step them once in this one.

    Args:
        rounds: number of rounds completed by the federation, whoever took part.
        local_epochs: epochs of a round.
        trainer: the client's Trainer.

    Raises:
        ConfigError: for a schedule that does not say how far it is (``last_epoch``).
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch" and not config.reduce_on_plateau:
            if not hasattr(config.scheduler, "last_epoch"):
                raise ConfigError(
                    f"model.scheduler_counts=rounds: a {type(config.scheduler).__name__} does not say how many "
                    "epochs it has counted (last_epoch), as most of PyTorch's do; use epochs."
                )
            # of its own, which is overwritten here
            every = vars(config).setdefault("every_n_rounds", config.frequency)
            config.frequency = local_epochs if (rounds + 1) % every == 0 else sys.maxsize
            while config.scheduler.last_epoch < rounds // every:
                with _newcomer() if config.scheduler.last_epoch == 0 else nullcontext():
                    config.scheduler.step()  # type: ignore[call-arg]


@contextmanager
def _newcomer() -> Iterator[None]:
    """Leave out PyTorch's warning of an optimizer that has not stepped. After it, other warnings may come again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step")
        yield


def extend(optimizer: torch.optim.Optimizer, twin: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Let an optimizer train a second network too: next to every parameter its twin, in the same group.

    Groups stay as many, so schedules that are attached already continue as they are.

    Args:
        optimizer: a fresh optimizer of the first network.
        twin: returns the second network's parameter for one of the first.

    Raises:
        ConfigError: when the optimizer prepared a state for its parameters already.
    """
    _refuse_state(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [*group["params"], *map(twin, group["params"])]


def _refuse_state(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise ConfigError(
            f"model.learner: {type(optimizer).__name__} keeps a state of its parameters from the start, to which a "
            "second network's cannot be added; use SGD, Adam, AdamW or another that begins at its first step."
        )


def add_parameters(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let an optimizer train further parameters too, in its last group; see :func:`extend`."""
    _refuse_state(optimizer)
    group = optimizer.param_groups[-1]
    group["params"] = [*group["params"], *parameters]


def refuse_scaled_gradients(trainer: L.Trainer, what: str) -> None:
    """Refuse half precision with scaled losses, for a method that takes gradients without the Trainer.

    Raises:
        ConfigError: when the Trainer has it.
    """
    if trainer.precision == "16-mixed":
        raise ConfigError(
            f"trainer.precision=16-mixed: {what} takes gradients of its own, which are not scaled and would vanish in "
            "16 bits; choose bf16-mixed or 32-true."
        )
