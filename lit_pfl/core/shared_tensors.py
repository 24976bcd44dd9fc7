"""The tensors that are sent and received, of a learner and of what a method trains next to it."""

from collections.abc import Callable, Collection, Iterable, Mapping

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_pfl.core.encoding import DTYPES
from lit_pfl.core.sharing import NORM_STATISTICS, Role, names_found
from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.frozen import frozen_weights, hold_apart

#: what names of tensors begin with that are of further modules, not of the learner
EXTRA = "extra."


class Received(dict[str, Tensor]):
    """What a round began with, by name."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"received has no {name!r}: in a round it holds the shared weights, where the method has remembers = True."
        )


class SharedTensors:
    """The tensors of a learner that are sent and received, and those that never train and so are not.

    Args:
        learner: the learner.
        roles: the role of every entry of its ``state_dict()``.
        is_shared: says of a name and its role whether the method shares it.
        local: which are never shared, see :class:`~lit_pfl.Client`.
        only: which are shared at most, like its ``shares``.
        kept_by: name of a method that keeps something for every weight that is sent, so that none may be added.

    Attributes:
        frozen: the weights that never train, by name.
        thawed: the names of those that once were among them.
        names: the names of what is sent, and of what would be if it were not frozen.

    Raises:
        ConfigError: when nothing is left of what the method shares.
    """

    def __init__(
        self,
        learner: L.LightningModule,
        roles: Mapping[str, Role],
        is_shared: Callable[[str, Role], bool],
        local: str | None = None,
        only: str | None = None,
        kept_by: str | None = None,
    ) -> None:
        self._learner, self._kept_by = learner, kept_by
        self._known: frozenset[str] | None = frozenset(learner.state_dict())
        self.thawed: list[str] = []
        self.frozen = {name: weight for name, weight in frozen_weights(learner).items() if name in roles}
        shared = [name for name, role in roles.items() if is_shared(name, role)]
        kept = frozenset() if local is None else names_found(learner, local, "local", roles)
        if only is not None:
            kept = kept | (roles.keys() - names_found(learner, only, "shares", roles))
        self.names = frozenset(shared) - kept - infinite_buffers(learner, frozenset(shared) - kept)
        #: by name, the module that each tensor belongs to and what it is called there: it may be put in another's place
        self._owners = [self._owner(n) for n in shared if n in self.names and n not in self.frozen]
        if shared and not self._owners:
            if self.names:
                raise ConfigError(
                    "model.learner: no tensor is left to share, since all weights that would be sent are frozen "
                    "(requires_grad=False); unfreeze some."
                )
            option = f"model.local={local!r}" if only is None else f"model.shares={only!r}"
            raise ConfigError(f"{option}: no tensor is left to share.")

    def _owner(self, name: str) -> tuple[str, nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        try:
            owner = self._learner.get_submodule(path)
            getattr(owner, leaf)
        except AttributeError:
            raise ConfigError(
                f"model.learner: the state_dict() of {type(self._learner).__name__} has a tensor {name!r}, which the "
                "module itself has under another name; it has to leave names as they are."
            ) from None
        return name, owner, leaf

    def tensors(self) -> dict[str, Tensor]:
        """Return what is sent by name: the learner's own memory, without gradients.

        Raises:
            ConfigError: when one of them is no parameter or buffer any more, so that nothing could be loaded into it.
        """
        for name, owner, leaf in self._owners:
            if leaf not in owner._parameters and leaf not in owner._buffers:
                raise ConfigError(
                    f"model.learner: {name!r} is made of other tensors since training began, as by pruning or weight "
                    "normalization; let __init__ or configure_model do that, so that those are sent."
                )
        return {name: getattr(owner, leaf).detach() for name, owner, leaf in self._owners}

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters among what is sent, by name."""
        found = ((name, getattr(owner, leaf)) for name, owner, leaf in self._owners)
        return {name: weight for name, weight in found if isinstance(weight, nn.Parameter)}

    def unfrozen(self) -> list[str]:
        """Return the names of those frozen weights that somebody has unfrozen."""
        return [name for name, weight in self.frozen.items() if weight.requires_grad]

    def thaw(self, names: Iterable[str], learners: Mapping[str, L.LightningModule]) -> None:
        """Let frozen weights of some learners train from now on, and be sent if the method shares them.

        Raises:
            ConfigError: for a method that has something for every weight that is sent.
        """
        for name in names:
            if self._kept_by is not None:
                raise ConfigError(
                    f"model.learner: {name!r} is unfrozen in training, and {self._kept_by} keeps something for "
                    "every weight that it sends; unfreeze it before the fit."
                )
            hold_apart(learner.get_parameter(name) for learner in learners.values())
            del self.frozen[name]
            self.thawed.append(name)
            if name in self.names:
                self._owners.append(self._owner(name))

    def refuse_new(self) -> None:
        """Refuse what the learner has made in its ``setup``, once: it would be kept local without a word."""
        made = self._learner.state_dict().keys() - self._known if self._known else ()
        if made:
            remedy = "make its layers in __init__ or configure_model."
            if "_orig_mod" in min(made):  # torch.compile has renamed it
                remedy = "compile in place, as by self.net.compile(), which keeps names."
            raise ConfigError(
                f"model.learner: {type(self._learner).__name__} makes {min(made)!r} in setup(), after the shared "
                f"tensors are chosen; {remedy}"
            )
        self._known = None


def infinite_buffers(learner: nn.Module, shared: Collection[str]) -> frozenset[str]:
    """Return which shared buffers hold infinity, as causal masks and bounds do: constants, which no upload may hold."""
    buffers = {name: x for name, x in learner.named_buffers(remove_duplicate=False) if name in shared}
    # of others, such as lazy or fake tensors and numbers of 8 bits, nobody can ask it
    known = {name: x for name, x in buffers.items() if type(x) is Tensor and not x.is_meta and x.dtype in DTYPES}
    found = frozenset(name for name, x in known.items() if x.isinf().any() and not x.isnan().any())
    if found:
        rank_zero_warn(f"{type(learner).__name__}: infinity cannot be averaged; not sent: {', '.join(sorted(found))}.")
    return found


def extra_tensors(extra: nn.ModuleDict, names: Iterable[str], statistics: bool) -> dict[str, Tensor]:
    """Return what is sent of some of a client's further modules, by name in the client: their own memory."""
    return {
        f"{EXTRA}{name}.{leaf}": tensor.detach()
        for name in sorted(names)
        for leaf, tensor in extra[name].state_dict().items()
        if statistics or leaf.rpartition(".")[2] not in NORM_STATISTICS
    }
