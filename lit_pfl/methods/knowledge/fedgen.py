"""FedGen: the server learns to generate features, which clients train their heads and bodies with."""

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.core.trained_server import TrainedServer
from lit_pfl.data.loaders import batch_size_of, num_samples
from lit_pfl.errors import ConfigError
from lit_pfl.learners import call_with
from lit_pfl.methods.knowledge.fedproto import COUNTS
from lit_pfl.methods.knowledge.fml import divergence
from lit_pfl_callbacks.tensors import load_tensors

GENERATOR, ROUNDS = "generator.", "completed_rounds"


class FedGen(Classifying):
    """Federated averaging of clients that also train on features from a generator, which the server trains.

    The generator G makes features of a class y from uniform noise. After every round the server trains it with the
    uploaded heads H_i: for classes y that some participant has, it minimizes ``sum_i w_iy CE(H_i(G(y)), y)``, with w_iy
    the share of participant i of the samples of class y, plus ``eta`` times ``exp(-mean |G - G'|_1 |e - e'|^2)`` over
    pairs with noise e and e', which keeps features of different noise apart. In the authors' code every feature of a
    batch has the batch's mean of w_iy.

    From the federation's second round on, a client minimizes its loss plus ``gen_batch_size / B * a_t CE(H(G(y')),
    y')``, for classes y' drawn among those that anybody has, plus ``b_t KL(softmax H(G(y)) || p(x))`` for its own batch
    of B samples, in which the former is a constant. Also for a last batch of fewer samples the weight has the B of all
    others; the authors' code leaves such batches out. ``a_t = max(1e-4, alpha * decay^t)`` after t rounds, and so b_t.
    G is frozen and in evaluation mode. Counts of classes are of a client's data; in the authors' code they are of the
    samples drawn, plus 1, and the terms end after 20 local epochs of a round.

    Args:
        alpha: where the weight of the generated samples starts; 0 leaves them out.
        beta: where the weight of the distillation starts; 0 leaves it out.
        decay: of both, every round, and of the generator's learning rate.
        noise_dim: size of the noise.
        hidden_dim: width of the generator.
        gen_batch_size: how many features are generated for a batch, at a client and at the server.
        generator_steps: the server's steps a round.
        generator_lr: its learning rate, of Adam.
        eta: strength of the diversity.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module with a linear layer or
            the head has batch norm, the head is not shared, or the data has no class labels.

    Source:
        Zhu et al. 2021, with the losses of the authors' code.
    """

    needs_automatic = "adds terms to the loss"
    needs_labels = "generates features of classes"
    needs_common_labels = "averages heads and generates features of classes"
    trains_head_on = "generated features"

    shares = EVERYTHING
    reserved = (COUNTS, ROUNDS, GENERATOR)

    occurring: Tensor
    completed: Tensor  # rounds of the federation

    def __init__(
        self,
        alpha: NonNegativeFloat = 10.0,
        beta: NonNegativeFloat = 10.0,
        decay: ClosedUnitInterval = 0.98,
        noise_dim: PositiveInt = 32,
        hidden_dim: PositiveInt = 256,
        gen_batch_size: PositiveInt = 32,
        generator_steps: NonNegativeInt = 50,
        generator_lr: PositiveFloat = 3e-4,
        eta: NonNegativeFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if gen_batch_size == 1 and generator_steps:
            raise ConfigError("model.gen_batch_size=1: FedGen's generator has batch norm, which needs 2 or more.")
        self.alpha, self.beta, self.decay = alpha, beta, decay
        self.noise_dim, self.hidden_dim, self.gen_batch_size = noise_dim, hidden_dim, gen_batch_size
        self.generator_steps, self.generator_lr, self.eta = generator_steps, generator_lr, eta

    def configure_state(self) -> None:
        sizes = self.noise_dim, self.num_logits, self.hidden_dim, self.num_features
        self.generator = Generator(*sizes).requires_grad_(False)
        self.register_buffer("occurring", torch.ones(self.num_logits, dtype=torch.int64))
        self.register_buffer("completed", torch.zeros((), dtype=torch.int64))

    def configure_server(self) -> "FedGenServer":
        return FedGenServer(self, seed=int(torch.randint(2**31, ())))

    def upload(self) -> Payload:
        """Return the weights and the class counts."""
        return super().upload().with_({COUNTS: self.class_counts.to(self.device)})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        own = {name.removeprefix(GENERATOR): x for name, x in reply.items() if name.startswith(GENERATOR)}
        load_tensors(self.generator, own)
        self.occurring.copy_(reply[COUNTS])
        self.completed.copy_(reply[ROUNDS])
        known = (COUNTS, ROUNDS)
        super().download({k: x for k, x in reply.items() if k not in known and not k.startswith(GENERATOR)})

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        if not int(self.completed):
            return loss
        labels, head = self.targets(batch), self.head_module
        self.generator.eval()  # also where the whole client is put into training mode
        if self.beta:
            teacher = head(self._generated(labels))
            loss = loss + self.scale(self.beta) * divergence(teacher, seen.logits)
        if self.alpha:
            there = self.occurring.nonzero()[:, 0]
            drawn = there[torch.randint(len(there), (self.gen_batch_size,)).to(self.device)]  # the same on any device
            weight = self.scale(self.alpha) * self.gen_batch_size / (self.batch_size or len(labels))
            loss = loss + weight * nn.functional.cross_entropy(head(self._generated(drawn)), drawn)
        return loss

    @cached_property
    def batch_size(self) -> int | None:
        """The number of samples of all batches but a last one with fewer; None where it is not fixed."""
        data = self.training_data()
        try:
            return min(batch_size_of(data), num_samples(data))
        except ConfigError:
            return None

    def scale(self, first: float) -> float:
        """Return what a weight has come to in this round."""
        return max(1e-4, first * self.decay ** int(self.completed))

    def _generated(self, labels: Tensor) -> Tensor:
        noise = torch.rand(len(labels), self.noise_dim).to(self.device)
        return self.generator(labels, noise).to(self.head_dtype)


class Generator(nn.Module):
    """Makes features of classes from noise.

    Args:
        noise_dim: size of the noise.
        classes: C.
        hidden_dim: width.
        features: d.
    """

    def __init__(self, noise_dim: int, classes: int, hidden_dim: int, features: int) -> None:
        super().__init__()
        self.classes = classes
        self.net = nn.Sequential(
            nn.Linear(noise_dim + classes, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, features),
        )

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Return (B, d) features of (B,) labels, from (B, noise_dim) noise."""
        return self.net(torch.cat([noise, nn.functional.one_hot(labels, self.classes).to(noise)], 1))


class FedGenServer(TrainedServer):
    """Averages weights and trains the generator.

    Args:
        method: the prototype, of whose head it holds a copy.
        seed: of the generator's first weights and of the noise.
    """

    count_tensors = (COUNTS,)
    kept = ("completed",)

    def __init__(self, method: FedGen, seed: int = 0) -> None:
        super().__init__(seed)
        self.head = copy.deepcopy(method.head_module).cpu().eval().requires_grad_(False)
        self.leaves = method.shared_head_leaves("uses the clients' heads")
        self.sizes = method.noise_dim, method.num_logits, method.hidden_dim, method.num_features
        self.lr, self.decay, self.eta = method.generator_lr, method.decay, method.eta
        self.steps, self.batch_size = method.generator_steps, method.gen_batch_size

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.completed = 0
        self.occurring = torch.stack([info.initial[COUNTS] for info in clients.values()]).sum(0)

    def make(self, clients: Mapping[int, ClientInfo]) -> tuple[nn.Module, torch.optim.Optimizer]:
        module: nn.Module = Generator(*self.sizes)
        return module, torch.optim.Adam(module.parameters(), lr=self.lr, weight_decay=1e-2)

    def is_averaged(self, name: str) -> bool:
        return name != COUNTS

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        super().aggregate(round, uploads)
        self.completed = round
        leaves = self.leaves.items()
        heads = [{leaf: upload[n].cpu() for n, leaf in leaves if n in upload} for upload in uploads.values()]
        counts = torch.stack([upload[COUNTS] for upload in uploads.values()]).cpu()
        there = (counts > 0).any(0).nonzero()[:, 0]
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.decay ** (round - 1)
        with self.training(round):
            self.module.train()
            for _ in range(self.steps):
                labels = there[torch.randint(len(there), (self.batch_size,))]
                noise = torch.rand(self.batch_size, self.sizes[0])
                self.optimizer.zero_grad()
                features = self.module(labels, noise)
                loss = teacher_loss(self._logits(heads, features), labels, counts)
                (loss + self.eta * diversity(features, noise)).backward()
                self.optimizer.step()

    def _logits(self, heads: list[dict[str, Tensor]], features: Tensor) -> Iterator[Tensor]:
        features = features.to(next(self.head.parameters()))
        return (call_with(head, self.head, features) for head in heads)

    def reply(self, client: int) -> Payload:
        generator = {GENERATOR + name: x for name, x in self.module.state_dict().items()}
        told = {COUNTS: self.occurring, ROUNDS: torch.tensor(self.completed)}
        return self.model.with_({**told, **generator})


def teacher_loss(logits: Iterator[Tensor], labels: Tensor, counts: Tensor) -> Tensor:
    """Return the cross entropies of several heads, weighted by shares of the class, the mean over the batch.

    Args:
        logits: (B, C) of each of K heads.
        labels: (B,).
        counts: (K, C) samples of every class.
    """
    shares = (counts / counts.sum(0).clamp_min(1))[:, labels]
    losses = [
        (share * nn.functional.cross_entropy(z, labels, reduction="none")).mean()
        for z, share in zip(logits, shares, strict=True)
    ]
    return torch.stack(losses).sum()


def diversity(features: Tensor, noise: Tensor) -> Tensor:
    """Return ``exp(-mean(d_features * d_noise))`` over all pairs: mean absolute and mean squared differences."""
    apart = (features[:, None] - features[None]).abs().mean(2)
    return (-apart * (noise[:, None] - noise[None]).square().mean(2)).mean().exp()
