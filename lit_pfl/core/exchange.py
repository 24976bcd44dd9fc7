"""What a client sends, and what it does with a reply."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import Role, encoder_of, names_found, names_of_head, owners, roles_of
from lit_pfl.core.spec import ClientSpec
from lit_pfl.errors import ConfigError
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks.frozen import frozen_weights
from lit_pfl_callbacks.tensors import load_tensors


class Exchange(ABC):
    """The part of a client that shares: a method says what travels, by role."""

    learner: L.LightningModule
    spec: ClientSpec
    factorization: Factorization | None
    norm_stats: str
    share_head: bool | None
    head: str | None
    encoder: str | None
    thaw: Callable[[Iterable[str]], None]
    frozen: dict[str, nn.Parameter]
    _shared: list[tuple[str, nn.Module, str]]
    _may_travel: frozenset[str]

    # Abstract also because the command line takes a base class that can be made itself for the default, and then does
    # not see what a method puts in place of a default of None.
    @property
    @abstractmethod
    def shares(self) -> frozenset[Role]:
        """Which parameters travel; a method sets it to the roles it shares."""

    @property
    def head_names(self) -> frozenset[str]:
        """Names of the head's entries in the learner's ``state_dict()``."""
        return names_of_head(self.learner, self.head)

    @property
    def encoder_module(self) -> nn.Module | None:
        """The part of the learner that embeds its input, if it is known."""
        return encoder_of(self.learner, self.encoder)

    def roles(self) -> dict[str, Role]:
        """Return the role of every entry of the learner's ``state_dict()``, see :func:`roles_of`."""
        return roles_of(self.learner, self.head_names)

    def is_shared(self, name: str, role: Role) -> bool:
        """Say whether an entry of the learner's ``state_dict()`` is sent and received."""
        if role == "norm_stats":
            return self.norm_stats == "averaged" and "norm" in self.shares
        if role == "head":
            return "head" in self.shares and (self.spec.labels_agree if self.share_head is None else self.share_head)
        return role in self.shares

    def settle_what_travels(self, local: str | None, only: str | None) -> None:
        """Settle which tensors are sent and received, and which never train and so are not.

        Args:
            local: which never travel, see :class:`~lit_pfl.Client`.
            only: which travel at most.

        Raises:
            ConfigError: when nothing is left of what a method shares.
        """
        roles = self.roles()
        self.frozen = {name: weight for name, weight in frozen_weights(self.learner).items() if name in roles}
        shared = [name for name, role in roles.items() if self.is_shared(name, role)]
        kept = frozenset() if local is None else names_found(self.learner, local, "local", roles)
        if only is not None:
            kept = kept | (roles.keys() - names_found(self.learner, only, "shares", roles))
        self._may_travel = frozenset(shared) - kept
        self._shared = owners(self.learner, [n for n in shared if n in self._may_travel and n not in self.frozen])
        if shared and not self._shared:
            if self._may_travel:
                raise ConfigError(
                    "model.learner: nothing is left that travels, since all weights that would be sent are frozen "
                    "(requires_grad=False); unfreeze some."
                )
            option = f"model.local={local!r}" if only is None else f"model.shares={only!r}"
            raise ConfigError(f"{option}: nothing is left that travels.")

    def shared_parameters(self) -> dict[str, Tensor]:
        """Return what travels, by name in the learner: the client's own memory, not copies."""
        return {name: getattr(owner, leaf).detach() for name, owner, leaf in self._shared}

    def shared_weights(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters among what travels, by name."""
        return {
            name: weight
            for name, owner, leaf in self._shared
            if isinstance(weight := getattr(owner, leaf), nn.Parameter)
        }

    def shared_tensors(self) -> list[Tensor]:
        """Return what travels as the learner itself holds it: parameters and buffers."""
        return [getattr(owner, leaf) for _, owner, leaf in self._shared]

    def upload(self) -> Payload:
        """Return what is sent at the end of a round: the client's own memory, which changes when it trains on."""
        shared, f = self.shared_parameters(), self.factorization
        return Payload(shared) if f is None else Payload(f.sent(self.learner, shared), f.masks(self.learner, shared))

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load a reply of the server, and add to it what this client has of every mu in it and did not send."""
        f = self.factorization
        self.thaw([name for name in self.frozen if name in reply])  # somebody has unfrozen it elsewhere
        unsent = {} if f is None else f.unsent(self.learner, reply)
        load_tensors(self.learner, reply)
        for name, rest in unsent.items():
            self.learner.get_parameter(name).add_(rest)

    def overwritten(self, reply: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what :meth:`download` makes equal to the reply whatever it was, by name in ``state_dict()``."""
        if type(self).download is not Exchange.download or self.factorization is not None:
            return {}
        return {f"learner.{name}": tensor for name, tensor in reply.items()}

    def load_global(self, model: Mapping[str, Tensor]) -> None:
        """Become the one model of all, see :meth:`~lit_pfl.Server.global_model`."""
        load_tensors(self.learner, model)
