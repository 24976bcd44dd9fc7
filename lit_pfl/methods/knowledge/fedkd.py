"""FedKD: a small global model and a personal one teach each other; updates are sent in factors."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveInt
from torch import Tensor, nn

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, UniformServer
from lit_pfl.learners import add_parameters, single_optimizer
from lit_pfl.methods.knowledge.fml import Mutual, divergence
from lit_pfl.nn import Memory
from lit_pfl.ops.low_rank import LowRank, as_matrix

CHANGE, ROUNDS = "is_change", "completed_rounds"


class FedKD(Mutual):
    """Next to the averaged model w, the mentee, every client trains a model v of its own, the mentor.

    With losses f, probabilities p and features h, v minimizes ``f(v) + [KL(p_w || p_v) + MSE(h_v, M h_w)] / s`` and w
    ``f(w) + [KL(p_v || p_w) + MSE(h_v, M h_w)] / s``, where ``s = f(v) + f(w)`` and M, (d, d), is trained along and
    is kept local. Teachers and s are constants: what goes badly is distilled less. What is evaluated is v.

    What is sent is the change of w in the round, every matrix in factors: of its singular values as few as hold more
    than a share T of the squares' sum. The server averages the changes, does the same to the mean, and sends that to
    those who hold the former model, the whole model to others. T goes from ``energy_start`` to ``energy_end`` over the
    rounds. Convolutions are matrices by :func:`~lit_pfl.ops.low_rank.as_matrix`. In the authors' code a matrix that
    needs all of its singular values is not sent at all; here it is sent whole.

    v starts as a copy of w; in the paper it is a larger network, and BERT's hidden states and attention are compared.
    In the authors' and PFLlib's code gradients go through teachers and s too, and a divergence is divided by the number
    of classes. In the authors' code the term of the features counts twice, and T begins one round's step higher.

    Args:
        energy_start: T of the first round.
        energy_end: T of the last round.
        rounds: over how many rounds T changes; give the number that is run.
        kwargs: see :class:`~lit_pfl.Client`. A factorization is refused.

    Raises:
        ConfigError: when the learner has no head module with a linear layer, the data no class labels, or there is a
            factorization.

    Source:
        Wu et al. 2022; factors as in the authors' code.
    """

    needs_dense = "sends matrices in factors of its own"
    reserved = (CHANGE, ROUNDS)
    may_unfreeze = False

    before_round: Memory
    completed: Tensor  # rounds of the federation

    def __init__(
        self,
        energy_start: ClosedUnitInterval = 0.95,
        energy_end: ClosedUnitInterval = 0.98,
        rounds: PositiveInt = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.energy_start, self.energy_end, self.rounds = energy_start, energy_end, rounds

    def energy(self, completed: int) -> float:
        """Return T of the round after ``completed`` rounds."""
        share = min(1.0, completed / max(1, self.rounds - 1))
        return self.energy_start + (self.energy_end - self.energy_start) * share

    def configure_state(self) -> None:
        super().configure_state()
        self.matched = nn.Linear(self.num_features, self.num_features, bias=False).to(self.head_dtype)
        self.before_round = Memory(self.shared_parameters())
        self.register_buffer("completed", torch.zeros((), dtype=torch.int64))

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        add_parameters(single_optimizer(configured), self.matched.parameters())
        return configured

    def configure_server(self) -> "FedKDServer":
        return FedKDServer(self)

    def initial(self) -> Payload:
        """Return the whole mentee."""
        super().initial()
        return Payload(self.shared_parameters())

    def upload(self) -> Payload:
        """Return the change of the mentee, in factors."""
        own = self.shared_parameters()
        change = {name: own[name] - x for name, x in self.before_round.items()}
        return in_factors(change, self.energy(int(self.completed)))

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        if CHANGE not in reply:
            new = {name: reply[name] for name, _ in self.before_round.items()}
        elif int(reply[ROUNDS]) == int(self.completed):  # which is in it: of the round since then no upload was used
            new = dict(self.before_round.items())
        else:
            new = {name: x + reply[name].to(x) for name, x in self.before_round.items()}
        self.before_round.copy_(new)
        self.completed.copy_(reply[ROUNDS])
        super().download(new)

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of what both minimize."""
        common, w, personal, v = self.both(batch, batch_idx)
        distilled = divergence(w.logits, v.logits) + divergence(v.logits, w.logits)
        # One distance serves both: it gives each of them the gradient of its own term.
        hidden = nn.functional.mse_loss(self.matched(w.features), v.features)
        return common + personal + (distilled + hidden) / (common + personal).detach()


def in_factors(tensors: Mapping[str, Tensor], energy: float) -> Payload:
    """Return tensors with matrices in as few factors as hold more than a share ``energy`` of their squares' sum."""
    factors: dict[str, LowRank] = {}
    for name, tensor in tensors.items():
        # what is not finite is sent as it is, and refused
        if tensor.dim() > 1 and tensor.is_floating_point() and tensor.isfinite().all():
            left, values, right = torch.linalg.svd(as_matrix(tensor).double(), full_matrices=False)
            rank = needed_rank(values, energy)
            if rank is not None:
                u, v = (x.to(tensor.dtype).contiguous() for x in ((left * values)[:, :rank], right[:rank]))
                factors[name] = LowRank(u, v, tuple(tensor.shape))
    return Payload({name: x for name, x in tensors.items() if name not in factors}, low_rank=factors)


def needed_rank(values: Tensor, energy: float) -> int | None:
    """Return how many of the largest singular values hold more than a share of the squares' sum; None: all of them."""
    held = values.square().cumsum(0)
    if not float(held[-1]):
        return 1
    short = int((held <= energy * held[-1]).sum())
    return None if short >= len(values) - 1 and len(values) > 1 else short + 1


class FedKDServer(UniformServer):
    """Averages changes, and sends their mean in factors.

    Args:
        method: gives T by the number of rounds completed.

    Attributes:
        change: what was added to the model in the last round.
        participants: who took part in it.
    """

    averages = means_only = True
    kept = ("participants", "completed", "change")

    participants: list[int]

    def __init__(self, method: FedKD) -> None:
        self.energy = method.energy

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.change, self.participants, self.completed = Payload({}), [], 0

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        mean = self.average(uploads, self.averaging_weights(round, uploads), list(self.model))
        self.change = in_factors(mean, self.energy(round - 1))
        self.model = {name: x + self.change[name] for name, x in self.model.items()}
        self.participants, self.completed = sorted(uploads), round

    def center(self, client: int, upload: Payload) -> Payload:
        """Return nothing: uploads are changes."""
        return Payload({})

    def reply(self, client: int) -> Payload:
        if client not in self.participants:  # who has the model that the change was added to
            return self.evaluation_reply(client)
        told = {CHANGE: torch.ones((), dtype=torch.uint8), ROUNDS: torch.tensor(self.completed)}
        plain = {name: x for name, x in self.change.items() if name not in self.change.low_rank}
        return Payload({**plain, **told}, low_rank=self.change.low_rank)

    def evaluation_reply(self, client: int) -> Payload:
        """Return the whole model."""
        return Payload({**self.model, ROUNDS: torch.tensor(self.completed)})
