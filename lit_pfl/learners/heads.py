"""What goes into a learner's head and what comes out, read or replaced in the learner's own steps."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_pfl.data.batches import plain
from lit_pfl.errors import ConfigError


def find_head(learner: nn.Module, names: frozenset[str], by_pattern: bool, method: str) -> nn.Module:
    """Return the module that is a learner's head: its attribute ``head``, or the innermost with exactly these names.

    Args:
        learner: the learner.
        names: the head's entries in the learner's ``state_dict()``.
        by_pattern: whether the names come from the option ``head``, and not from an attribute.
        method: the method that needs it, for the error.

    Raises:
        ConfigError: when the names belong to no single module.
    """
    if not by_pattern:
        head = learner.head
        assert isinstance(head, nn.Module)
        return head
    found = None
    for path, module in learner.named_modules(remove_duplicate=False):
        if path and {f"{path}.{name}" for name in module.state_dict()} == names:
            found = module
    if found is None:
        raise ConfigError(
            f"model.head names parameters of several modules, or some of a module's; {method} needs one module of "
            f"{type(learner).__name__} that maps features to logits, with all its parameters."
        )
    return found


def linear_layers(head: nn.Module) -> list[nn.Module]:
    """Return a head's linear layers, however their weights are made; of frozen and trained ones the trained ones."""
    # peft wraps a head that trains beside its frozen original; the wrapper passes on the attributes of the first
    like = {part for part in head.modules() if hasattr(part, "in_features") and hasattr(part, "out_features")}
    layers = [part for part in head.modules() if part in like and not like & {*part.modules()} - {part}]
    return [layer for layer in layers if any(weight.requires_grad for weight in layer.parameters())] or layers


def sizes_of_head(head: nn.Module, method: str) -> tuple[int, int]:
    """Return the number of features d that a head takes, and of logits C that it returns.

    Raises:
        ConfigError: when it has no linear layer.
    """
    layers: list[Any] = linear_layers(head)
    if not layers:
        raise ConfigError(
            f"model.head: {method} needs a head with a linear layer, of which it reads the numbers of features and of "
            f"logits; {type(head).__name__} has none."
        )
    return layers[0].in_features, layers[-1].out_features


@torch.no_grad()
def takes_features(head: nn.Module, features: Tensor, method: str) -> None:
    """See that a head can be given (B, d) features, as one that pools images cannot.

    Raises:
        ConfigError: when it cannot.
    """
    try:
        copy.deepcopy(head).eval()(features)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"model.head: {method} gives heads (B, d) features, and {type(head).__name__} cannot take them; name its "
            f"linear part. ({error})"
        ) from error


class HeadCall:
    """What went into a head and came out, of a step that has to call it once."""

    def __init__(self) -> None:
        self._count = 0
        self._features: Tensor | None = None
        self._logits: Tensor | None = None

    @property
    def features(self) -> Tensor:
        """(B, d) what went in, as the body made it."""
        self._refuse_other_counts()
        assert self._features is not None
        return self._features

    @property
    def logits(self) -> Tensor:
        """(B, C) what came out, as the head made it."""
        self._refuse_other_counts()
        assert self._logits is not None
        return self._logits

    def _refuse_other_counts(self) -> None:
        if self._count != 1:
            raise ConfigError(
                "model.head: this method needs a head that training_step calls once, and it is called "
                f"{self._count} times; name another by model.head."
            )


@contextmanager
def at_head(
    head: nn.Module,
    features: Callable[[Tensor], Tensor] | None = None,
    logits: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Iterator[HeadCall]:
    """See what a head maps to what, in whatever calls it meanwhile, and replace either.

    A module as a replacement goes along into a copy of the learner; a plain function refers to what it always did.

    Args:
        head: maps features to (B, C) logits. Features of more dimensions are seen as (B, d), and replaced equally.
        features: returns what goes into the head instead, from the (B, d) features.
        logits: returns what comes out instead, from the (B, d) features, as the body made them, and the logits.

    Raises:
        ConfigError: in the call, when features or logits are of other shapes.
    """
    seen = HeadCall()
    hooks = [
        head.register_forward_pre_hook(_Before(seen, features)),
        head.register_forward_hook(_After(seen, logits)),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class _Before:
    def __init__(self, seen: HeadCall, change: Callable[[Tensor], Tensor] | None) -> None:
        self.seen, self.change = seen, change

    def __call__(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or given.dim() < 2:
            what = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else "no tensor"
            raise ConfigError(f"model.head: this method needs a head that is given (B, d) features; they are {what}.")
        self.seen._features = plain(given).flatten(1)
        if self.change is None:
            return None
        return (self.change(self.seen._features).reshape(given.shape), *args[1:])


class _After:
    def __init__(self, seen: HeadCall, change: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        self.seen, self.change = seen, change

    def __call__(self, head: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        features = self.seen._features
        assert features is not None
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[:1] != features.shape[:1]:
            what = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else "no tensor"
            raise ConfigError(f"model.head: this method needs a head that returns (B, C) logits; they are {what}.")
        self.seen._count, self.seen._logits = self.seen._count + 1, plain(output)
        return None if self.change is None else self.change(features, self.seen._logits)


class AddLogits(nn.Module):
    """Adds what a second head makes of the features to a head's logits, as a replacement in :func:`at_head`.

    Args:
        head: the second one.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return the sum."""
        return logits + self.head(features)


def log_mixture(logits: Tensor, probabilities: Tensor, weight: float) -> Tensor:
    """Return ``log(weight * probabilities + (1 - weight) * softmax(logits))``, (B, C); as logits it gives the mixture.

    Args:
        logits: (B, C).
        probabilities: (B, C), rows sum to 1.
        weight: of the probabilities.
    """
    if not weight:
        return logits
    mixed = weight * probabilities + (1 - weight) * logits.softmax(1)
    return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()
