"""FedDPA: a shared adapter and a personal one, mixed for every input by how familiar it is."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt
from torch import Tensor, nn
from torch.func import functional_call

from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import needs_head
from lit_pfl.data.loaders import in_order, num_samples, part_of
from lit_pfl.errors import ConfigError
from lit_pfl.learners import SkipBatch, at_head, find_head, training_loss, without_trace
from lit_pfl.learners.scoring import transferred
from lit_pfl.learners.trying import try_step
from lit_pfl.methods.adapters.fedit import FedIT
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl.nn.adapters import adapted_layers
from lit_pfl.randomness import fixed_order
from lit_pfl_callbacks.random_state import torch_state_kept
from lit_pfl_callbacks.tensors import evaluating


class FedDPA(FedIT, TwoModels):
    """Next to FedIT's adapters every client trains personal ones; a layer's output is a mixture of both.

    With personal adapters v_i and common ones w, an adapted layer of client i returns ``W x + a v_i(x) + (1 - a)
    w(x)``. On every batch w takes :class:`~lit_pfl.methods.FedIT`'s step, and v_i one on the loss of the mixture with
    ``a = alpha`` and w as it was received. So w is FedIT's, bit for bit, whatever alpha. This is FedDPA-T; FedDPA-F,
    which trains v_i after the federation has ended, is not here.

    What is evaluated is a mixture with a weight for every input: ``a(x) = alpha * mean_s cos(h(x), h(x_s))`` over
    ``instances`` of the client's training samples x_s, with h(x) what goes into the head under the personal adapters
    alone. The samples are drawn once by the client's id; the authors' code draws new ones for each input, and takes
    the last token's hidden state for h. There v_i begins to train in round 2.

    Args:
        alpha: the weight of the personal adapters in training, and the largest in evaluation; 0 is FedIT.
        instances: the number of training samples that an input is compared with; with 0 the weight is alpha for all
            inputs, and no head is needed.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no adapted layer (prompts are in none), or no head that is given (B, d)
            features in one call of a part of the learner that holds all adapters, for ``instances``.

    Source:
        Yang et al. 2024, Algorithms 1 and 2, with the weights of the authors' code.
    """

    needs_automatic = "steps two adapters on one loss"
    remembers = True

    def __init__(self, alpha: ClosedUnitInterval = 0.5, instances: NonNegativeInt = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alpha, self.instances = alpha, instances

    def configure_learner(self) -> None:
        super().configure_learner()
        roles = self.roles()
        self._layers = [
            path
            for path in adapted_layers(self.learner)
            if any(role == "adapter" and name.startswith(f"{path}.") for name, role in roles.items())
        ]
        if not self._layers:
            raise ConfigError(
                f"model.learner: FedDPA mixes what adapted layers return, and {type(self.learner).__name__} has none; "
                "use adapters of layers, such as LoRA."
            )
        if self.instances:
            needs_head(self.learner, self.head_names, "FedDPA with model.instances above 0")
            head = find_head(self.learner, self.head_names, self.head is not None, "FedDPA")
            self._head = next(path for path, module in self.learner.named_modules() if module is head)

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the common adapters' loss, and of the mixture's, felt by the personal adapters alone."""
        with torch_state_kept(), self._mixed(Mixing(self.alpha), self.received):
            personal = self.personal_loss(batch, batch_idx)
        return super().objective(batch, batch_idx) + personal

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Let the adapted layers of the personal learner return the mixture."""
        with evaluating(self.learner), ExitStack() as stack:
            mixing = stack.enter_context(self._by_instance()) if self.instances else Mixing(self.alpha)
            stack.enter_context(self._mixed(mixing))
            yield self.personal

    def initial(self) -> Payload:
        """Return what is sent on joining, if each input of the learner can have a weight."""
        self.configure_model()
        if self.instances and self.data is not None and self.spec.example is not None:
            with self._by_instance() as mixing:
                try_step(self.personal, self.data.to_try())
            if mixing.weight is None:
                raise ConfigError(
                    f"model.instances={self.instances}: no part of {type(self.learner).__name__} that holds both head "
                    "and adapters is called in training_step; use self(...) there, or model.instances=0."
                )
        return super().initial()

    @contextmanager
    def _mixed(self, mixing: "Mixing", common: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Mix what adapted layers of the personal learner return with what the common ones do.

        Args:
            mixing: by which weights.
            common: tensors instead of the common learner's own, none of which get gradients; None: as they are.
        """
        with ExitStack() as stack:
            for path in self._layers:
                layer, tensors = self.learner.get_submodule(path), None
                if common is not None:
                    own = layer.named_parameters()
                    tensors = {name: common.get(f"{path}.{name}", weight).detach() for name, weight in own}
                hook = MixedLayer(layer, mixing, tensors)
                stack.callback(self.personal.get_submodule(path).register_forward_hook(hook, with_kwargs=True).remove)
            yield

    @contextmanager
    def _by_instance(self) -> Iterator["Mixing"]:
        """Give every input its own weight, once the learner or a part of it with head and adapters is called."""
        mixing, head = Mixing(None), self.personal.get_submodule(self._head)
        known = nn.functional.normalize(self._instances(head))
        first = WeighInputs(mixing, head, known, self.alpha)
        paths = ["", *(path for path, _ in self.personal.named_modules() if path)]
        inside = [*self._layers, self._head]
        with ExitStack() as stack:
            for path in paths:
                if path and not all(part.startswith(f"{path}.") for part in inside):
                    continue
                module = self.personal.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(first, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(mixing.finish, always_call=True).remove)
            yield mixing

    @torch.no_grad()
    def _instances(self, head: nn.Module) -> Tensor:
        """Return what goes into the head, (S, d), of some training samples under the personal adapters."""
        data, found = self.training_data(), []
        drawn = fixed_order(num_samples(data), self.spec.client_id)
        chosen = part_of(data, drawn[: self.instances].sort().values)
        with without_trace(self.personal):
            for index, batch in enumerate(in_order(chosen)):
                batch = transferred(self.personal, batch)
                with suppress(SkipBatch), at_head(head) as seen:
                    training_loss(self.personal, batch, index)
                    found.append(seen.features)
        return torch.cat(found)


class Mixing:
    """The weight of the personal adapters.

    Args:
        weight: one for all inputs, or (B,), of each; None: not known, and nothing is mixed.
    """

    def __init__(self, weight: float | Tensor | None) -> None:
        self.weight = weight
        self.caller: nn.Module | None = None

    def finish(self, module: nn.Module, *_: Any) -> None:
        """Let the next call of a module find its own weights."""
        if module is self.caller:
            self.caller = None


class MixedLayer:
    """Mixes what a layer returns with what another does, as a forward hook.

    Args:
        common: the other one.
        mixing: the weight of the layer that has the hook.
        tensors: instead of the other's own.
    """

    def __init__(self, common: nn.Module, mixing: Mixing, tensors: dict[str, Tensor] | None) -> None:
        self.common, self.mixing, self.tensors = common, mixing, tensors

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        """Return the mixture; None, which leaves the output as it is, where there is no weight."""
        weight = self.mixing.weight
        if weight is None:
            return None
        if self.tensors is None:
            common = self.common(*args, **kwargs)
        else:
            common = functional_call(self.common, self.tensors, args, kwargs)
        if isinstance(weight, Tensor):
            weight = weight.to(output.dtype).reshape(-1, *[1] * (output.dim() - 1))
        return common + weight * (output - common)


class WeighInputs:
    """Finds the weight of every input before a module is called, as a forward pre-hook of it.

    Args:
        mixing: takes the weights.
        head: the part of the module whose inputs are compared.
        known: (S, d) of samples that are known, of length 1.
        alpha: the weight of what equals all of them.
    """

    def __init__(self, mixing: Mixing, head: nn.Module, known: Tensor, alpha: float) -> None:
        self.mixing, self.head, self.known, self.alpha = mixing, head, known, alpha

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Find the weights of what a module is called with."""
        if self.mixing.caller is not None:  # a part of a module that has found them
            return
        self.mixing.caller, self.mixing.weight = module, None
        with at_head(self.head) as seen:
            module.forward(*args, **kwargs)
        alike = nn.functional.normalize(seen.features.to(self.known.dtype)) @ self.known.T
        self.mixing.weight = self.alpha * alike.mean(1)
