"""What is sent: the role of every tensor of a learner, and how parts of a learner are found."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Literal, get_args

import lightning as L
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.adapters import adapter_prefixes, is_of_adapter

Role = Literal["body", "head", "u", "v", "mu", "norm", "norm_stats", "adapter"]
EVERYTHING: frozenset[Role] = frozenset({"body", "u", "v", "mu", "norm", "head", "adapter"})
BODY: frozenset[Role] = EVERYTHING - {"head"}
NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def roles_of(learner: nn.Module, head: frozenset[str]) -> dict[str, Role]:
    """Return the role of every entry of a learner's ``state_dict()``.

    ``head`` is all of the classifier, however its weight is made. Of the body, ``u``, ``v`` and ``mu`` are the factors
    of factorized weights, ``adapter`` the adapters of ``peft``, ``norm`` the affine parameters and ``norm_stats`` the
    running statistics of normalization layers, and ``body`` is all the rest. A tensor with two names (tied weights) has
    its role under the first.

    Args:
        learner: the learner.
        head: names of the head's entries, see :func:`names_of_head`.
    """
    factors = {name for name, _ in factorized_layers(learner)}
    adapters = adapter_prefixes(learner)
    norms = {name for name, module in learner.named_modules() if isinstance(module, _NORMS)}

    def role(name: str) -> Role:
        owner, _, leaf = name.rpartition(".")
        if leaf in NORM_STATISTICS:
            return "norm_stats"
        if name in head:
            return "head"
        if is_of_adapter(name, adapters):
            return "adapter"
        if owner in factors and leaf in ("u", "v", "mu"):
            return leaf  # type: ignore[return-value]
        return "norm" if owner in norms else "body"

    return {name: role(name) for name in _first_names(learner)}


def _first_names(learner: nn.Module) -> Iterator[str]:
    # What else is in a state_dict (get_extra_state) stays at home, tensors too.
    left = {id(tensor) for tensor in chain(learner.parameters(), learner.buffers())}
    for name, tensor in learner.state_dict(keep_vars=True).items():
        if id(tensor) in left:
            left.remove(id(tensor))
            yield name


def names_of_head(learner: nn.Module, pattern: str | None) -> frozenset[str]:
    """Return the names of the head's entries in a learner's ``state_dict()``; none where it has no known head.

    Args:
        learner: the learner.
        pattern: a regular expression searched in the names; by default the head is the learner's attribute ``head``.

    Raises:
        ConfigError: when the pattern finds nothing, or is not a regular expression.
    """
    if pattern is not None:
        return names_found(learner, pattern, "head")
    head = getattr(learner, "head", None)
    prefixes = tuple(f"{path}." for path, module in learner.named_modules(remove_duplicate=False) if module is head)
    return frozenset(name for name in learner.state_dict() if name.startswith(prefixes))


def names_found(
    learner: nn.Module, pattern: str, option: str, roles: Mapping[str, Role] = MappingProxyType({})
) -> frozenset[str]:
    """Return the names in a learner's ``state_dict()`` in which a regular expression is found.

    Args:
        learner: the learner.
        pattern: the regular expression; or a role, for all that have it.
        option: of the client, which it is the value of.
        roles: the roles of names.

    Raises:
        ConfigError: when it finds nothing, or is not a regular expression.
    """
    names = list(learner.state_dict())
    try:
        found = frozenset(name for name in names if re.search(pattern, name) or roles.get(name) == pattern)
    except re.error as error:
        raise ConfigError(f"model.{option}={pattern!r} is not a regular expression: {error}.") from None
    if not found:
        raise ConfigError(
            f"model.{option}={pattern!r} is found in no name of {type(learner).__name__}, which has "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
        )
    return found


def refuse_reserved(names: Iterable[str], reserved: Iterable[str], method: str) -> None:
    """See that no tensor of a learner that is sent has a name under which its method sends something else."""
    for name in sorted(names):
        if any(is_reserved(name, taken) for taken in reserved):
            raise ConfigError(
                f"model.learner: {name!r} is a name under which {method} sends something of its own; rename that part "
                "of the module, or keep it local (model.local)."
            )


def is_reserved(name: str, taken: str) -> bool:
    """Say whether a name is one of those that are meant by one of :attr:`Client.reserved`."""
    begins, ends = taken.endswith("."), taken.startswith(".")
    return name == taken or (begins and name.startswith(taken)) or (ends and name.endswith(taken))


def encoder_of(learner: nn.Module, path: str | None) -> nn.Module | None:
    """Return the part of a learner that embeds its input, or None where it is not known.

    Args:
        learner: the learner.
        path: where it is (``net.encoder``); by default the learner's attribute ``body``, or else ``encoder``.

    Raises:
        ConfigError: when there is no such part.
    """
    if path is not None:
        try:
            return learner.get_submodule(path)
        except AttributeError:
            parts = [name for name, _ in learner.named_modules() if name]
            raise ConfigError(
                f"model.encoder={path!r} is not a part of {type(learner).__name__}, which has "
                f"{', '.join(parts[:8])}{', ...' if len(parts) > 8 else ''}."
            ) from None
    parts_named = (getattr(learner, name, None) for name in ("body", "encoder"))
    return next((part for part in parts_named if isinstance(part, nn.Module)), None)


def needs_head(learner: L.LightningModule, head: frozenset[str], method: str) -> None:
    """Refuse a learner whose head is not known, for a method that treats it in a way of its own."""
    if not head:
        raise ConfigError(
            f"model.head: {method} has to know which parameters of {type(learner).__name__} are its head; give a "
            "regular expression over their names, such as --model.head '^out', or an attribute `head`."
        )


def last_layers(roles: Mapping[str, Role], count: int, option: str) -> frozenset[str]:
    """Return the names in a learner's ``state_dict()`` of its last layers.

    Args:
        roles: the roles of its entries, see :func:`roles_of`.
        count: how many, the classifier being one.
        option: what the number is called, for the error.

    Raises:
        ConfigError: when there are not that many.
    """
    layers: list[list[str]] = []
    owner = None
    for name, role in sorted(roles.items(), key=lambda item: item[1] == "head"):
        of: str = role if role == "head" else name.rpartition(".")[0]
        if not layers or (of != owner and role not in ("norm", "norm_stats")):
            layers.append([])
            owner = of
        layers[-1].append(name)
    if not 0 <= count <= len(layers):
        raise ConfigError(f"{option}={count}: the learner has {len(layers)} layers; give 0 to {len(layers)}.")
    return frozenset(name for layer in layers[len(layers) - count :] for name in layer)


def check_sharing(
    shares: frozenset[str], share_head: bool | None, labels_agree: bool, method: str, needs_common_labels: str
) -> None:
    """See that what a method shares are roles, and that nothing of labels is to be shared where these differ."""
    if needs_common_labels and not labels_agree:
        raise ConfigError(
            f"model={method} {needs_common_labels}, and labels differ from client to client; use data whose labels "
            "agree (data.permute_labels=false), or another method."
        )
    if share_head and not labels_agree:
        raise ConfigError(
            "model.share_head=true: heads cannot be shared where labels differ from client to client; "
            "set it to false or leave it out."
        )
    if unknown := [role for role in shares if role not in get_args(Role)]:
        raise ConfigError(
            f"{method}.shares: {unknown[0]!r} is not a role; it must be a set of some of {', '.join(get_args(Role))}."
        )
