"""FedEM: every client's model is its own mixture of several common ones."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.server_optimizer import ServerOptimizer
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import in_order
from lit_pfl.errors import ConfigError
from lit_pfl.learners import (
    SkipBatch,
    add_parameters,
    at_head,
    find_head,
    forward_changed,
    network_of,
    recorded,
    silenced,
    single_optimizer,
    training_loss,
    unchanged,
)
from lit_pfl.learners.scoring import transferred
from lit_pfl.learners.trying import try_step
from lit_pfl.lightning_internals import own_copy
from lit_pfl.methods.similarity.ifca import by_number, draw_anew
from lit_pfl_callbacks.tensors import evaluating, load_tensors, tensors_of


class FedEM(Classifying):
    """Clients train M global models together; each weighs them by how well they explain its data.

    Client i takes its data to come from a mixture of M distributions with weights pi_i. At the start of a round it
    takes, under the received models theta_m and in evaluation mode, ``q_sm = softmax_m(log pi_im - l(theta_m; s))`` of
    every training sample s, and ``pi_im`` as the mean of q_sm over s. Every model then trains on the mean over a batch
    of ``q_sm l(theta_m; s)``, where l is the cross entropy of the head's logits. All M models are averaged by numbers
    of samples. What is evaluated is ``sum_m pi_im softmax(z_m)``; its logarithm takes the place of what the learner's
    ``forward`` returns. A client that has not trained yet, as a new one, is evaluated with the pi_i that it would train
    with. With ``components=1`` this is FedAvg, bit for bit. In the authors' code clients that do not take part in a
    round count in the mean with the models of before.

    q of a batch is found from that batch as it is trained on, augmented where training data are. The first model is
    the first client's; the others have its layers' weights resampled, as by :class:`~lit_pfl.methods.IFCA`.

    Args:
        components: number of models, M.
        kwargs: see :class:`~lit_pfl.Client`. Gradient clipping, if it is asked for, is of all models together.

    Raises:
        ConfigError: when the learner has no head module, or no ``forward`` that its steps call for logits, the data
            has no class labels, or weights are factorized.

    Source:
        Marfoq et al. 2021, Algorithm 1.
    """

    needs_automatic = "trains several models on one loss"
    needs_dense = "averages several models of dense weights"
    needs_labels = "weighs samples by their cross entropies"
    may_unfreeze = False

    shares = EVERYTHING

    mixture: Tensor
    further: nn.ModuleList

    def __init__(self, components: PositiveInt = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.components = components
        self._received: list[dict[str, Tensor]] = []
        self._prior = torch.empty(0)

    def configure_state(self) -> None:
        self.register_buffer("mixture", torch.full((self.components,), 1 / self.components))
        self.further = nn.ModuleList(own_copy(self.learner) for _ in range(self.components - 1))
        for component in self.further:
            draw_anew(component)

    @property
    def learners(self) -> dict[str, L.LightningModule]:
        further: dict[str, Any] = {f"further.{m}": component for m, component in enumerate(self.further)}
        return {"learner": self.learner, **further}

    @Classifying.trainer.setter  # type: ignore[attr-defined]
    def trainer(self, trainer: L.Trainer | None) -> None:
        """Let the further learners know it too: Lightning does not look into lists of modules."""
        L.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        for component in getattr(self, "further", ()):
            component.trainer = trainer

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        if len(self.further):
            add_parameters(single_optimizer(configured), self.further.parameters())
        return configured

    def configure_server(self) -> "FedEMServer":
        return FedEMServer(self.components)

    # ------------------------------------------------------------------------------------------------- what is sent

    def upload(self) -> Payload:
        """Return the tensors of all models, each named ``<model>/<tensor>``."""
        names = self.shared_parameters()
        tensors = [component.state_dict() for component in self.learners.values()]
        return Payload({f"{m}/{name}": own[name] for m, own in enumerate(tensors) for name in names})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        for component, model in zip(self.learners.values(), by_number(reply).values(), strict=False):
            load_tensors(component, model)

    def initial(self) -> Payload:
        """Return what is sent on joining, if the learner's steps call ``forward`` for logits."""
        initial = super().initial()
        if self.components > 1 and self.data is not None and self.spec.example is not None:
            with self._mixed(self.mixture) as called:
                try_step(self.learner, self.data.to_try())
            if not called:
                raise ConfigError(
                    f"model.learner: FedEM mixes what forward returns, and training_step of "
                    f"{type(self.learner).__name__} does not call it, self(...), for (B, C) logits."
                )
        return initial

    # --------------------------------------------------------------------------------------------------- in training

    def begin_round(self) -> None:
        """Note the received models, and weigh them by the training data."""
        if self.components == 1:
            return
        self._prior = self.mixture.clone()
        self._received = [{name: x.clone() for name, x in model.items()} for model in self._models()]
        self.mixture.copy_(self._explained())

    def _models(self) -> list[dict[str, Tensor]]:
        return [
            {name: x.detach() for name, x in tensors_of(component).items() if name not in self.frozen}
            for component in self.learners.values()
        ]

    def _explained(self) -> Tensor:
        """Return the mean of q over the training data, (M,)."""
        total, n = torch.zeros_like(self.mixture), 0
        with unchanged(self.learner), recorded(self.learner):
            for index, batch in enumerate(in_order(self.training_data())):
                batch = transferred(self.learner, batch)
                try:
                    q = self._responsibilities(batch, index)
                except SkipBatch:
                    continue
                total, n = total + q.sum(0), n + len(q)
        return total / n

    def _responsibilities(self, batch: Any, batch_idx: int) -> Tensor:
        """Return q, (B, M), of a batch under the received models."""
        labels = self.targets(batch)
        logits = [self.call_frozen(model, batch, batch_idx).logits for model in self._received]
        return responsibilities(torch.stack(logits, 2), labels, self._prior)

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        if self.components == 1:
            return super().objective(batch, batch_idx)
        q, labels, losses = self._responsibilities(batch, batch_idx), self.targets(batch), []
        for m, component in enumerate(self.learners.values()):
            with at_head(self._head_of(component)) as seen:
                if m == 0:
                    self.loss(component, batch, batch_idx)
                else:
                    with silenced(component):
                        training_loss(component, batch, batch_idx)
            each = nn.functional.cross_entropy(seen.logits, labels, reduction="none")
            losses.append((q[:, m] * each).mean())
        return torch.stack(losses).sum()

    def _head_of(self, component: L.LightningModule) -> nn.Module:
        return find_head(component, self.head_names, self.head is not None, "FedEM")

    def release_round_state(self) -> tuple[float, int]:
        self._received = []
        return super().release_round_state()

    # ------------------------------------------------------------------------------------------------- what is scored

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Let the learner's ``forward`` return the logarithm of the mixture's probabilities."""
        if self.components == 1:
            yield self.learner
            return
        with self._mixed(self._learned_mixture()):
            yield self.learner

    def _learned_mixture(self) -> Tensor:
        """Return pi; that of a client that has not trained, as a new one, is found from the models it has received."""
        if self.data is None or not torch.equal(self.mixture, self.mixture[:1].expand_as(self.mixture)):
            return self.mixture
        self._prior, self._received = self.mixture, self._models()
        mixture = self._explained()
        self._received = []
        return mixture

    @contextmanager
    def _mixed(self, mixture: Tensor) -> Iterator[list[bool]]:
        """Mix what ``forward`` returns; what is yielded says of every call that it was for logits."""
        called: list[bool] = []

        def mixed(output: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(output, Tensor) or output.dim() != 2:
                return output
            called.append(True)
            return log_mixture([output, *(component(*args, **kwargs) for component in self.further)], mixture)

        with evaluating(self.further), forward_changed(self.learner, mixed):
            yield called

    def standalone(self) -> nn.Module:
        if self.components == 1:
            return super().standalone()
        return Ensemble([network_of(component) for component in self.learners.values()], self._learned_mixture())


class FedEMServer(Server):
    """Averages every model.

    Args:
        components: how many there are.
    """

    one_model = False

    def __init__(self, components: int) -> None:
        self.components = components

    def step_by(self, optimizer: ServerOptimizer, weights: Iterable[str]) -> None:
        names = list(weights)
        super().step_by(optimizer, [f"{m}/{name}" for m in range(self.components) for name in names])


class Ensemble(nn.Module):
    """Networks on the same input; what comes out is the logarithm of the mixture of their probabilities.

    Args:
        networks: M of them.
        mixture: (M,) their weights, of sum 1.
    """

    mixture: Tensor

    def __init__(self, networks: list[nn.Module], mixture: Tensor) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("mixture", mixture.detach().clone())
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return (B, C) log-probabilities."""
        return log_mixture([network(*inputs) for network in self.networks], self.mixture)


def responsibilities(logits: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Return the probability of each of M models given a sample, (B, M).

    Args:
        logits: (B, C, M) of each model.
        labels: (B,).
        prior: (M,) weights of the models, of sum 1.
    """
    losses = -logits.float().log_softmax(1).gather(1, labels[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]
    return (prior.log() - losses).softmax(1)


def log_mixture(logits: list[Tensor], mixture: Tensor) -> Tensor:
    """Return ``log(sum_m pi_m softmax(z_m))``, (B, C).

    Args:
        logits: (B, C) of each of M models.
        mixture: (M,) weights of the models, of sum 1.
    """
    each = torch.stack([z.log_softmax(1) for z in logits], 2)
    return (each + mixture.log().to(each.dtype)).logsumexp(2)
