"""SCAFFOLD: control variates that take the clients' drift out of federated averaging."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, UniformServer
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.learners import single_optimizer
from lit_pfl.nn import Memory

CONTROL = "control."
PLAIN = (
    "model.optimizer: Scaffold computes a client's mean gradient from its weight change, which is valid for plain SGD "
    "only; use torch.optim.SGD without momentum, with one learning rate for all parameters, also later."
)


class Scaffold(Client):
    """Clients step along ``gradient - c_i + c``: their own mean gradient c_i is replaced by that of all clients, c.

    A client that trained from w_t to w_i reads its new c_i off the way that it went (option II): ``c_i - c + (w_t -
    w_i) / s``, where s is the sum of the learning rates of all steps it took, whatever the schedule. It sends w_i and
    the change of c_i, and is sent w and c: twice the traffic of FedAvg. The server takes the plain mean of the
    participants' models and adds their changes to c, each divided by the number of all clients.

    Weight decay counts as a part of the gradient; with gradient clipping c_i is the mean of what was stepped along.

    Args:
        server_lr: how far the server goes from w to the mean of the participants' models.
        by_samples: let clients count by their numbers of samples n, as the code of FedDyn's authors does: with
            ``nu_i = n_i / mean(n)``, client i is sent ``c / nu_i``, and its change counts ``nu_i`` times. That code
            takes the new c_i from c itself, and from the first learning rate and all clients' mean number of steps.
        kwargs: see :class:`~lit_pfl.Client`. The optimizer must be plain SGD.

    Raises:
        ConfigError: for an optimizer that is not SGD, or SGD with momentum, where w_t - w_i does not yield c_i.

    Source:
        Karimireddy et al. 2020, Algorithm 1, option II.
    """

    needs_automatic = "adds control variates to the gradients of one loss"
    may_unfreeze = False
    remembers = True

    shares = EVERYTHING
    reserved = (CONTROL,)

    control: Memory

    def __init__(self, server_lr: PositiveFloat = 1.0, by_samples: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.server_lr, self.by_samples = server_lr, by_samples
        self._of_all: dict[str, Tensor] = {}  # c
        self._correction: dict[str, Tensor] = {}  # c - c_i
        self._change: dict[str, Tensor] = {}  # of c_i, until it is uploaded and the next round begins
        self._sum_of_lr = 0.0

    def configure_state(self) -> None:
        self.control = Memory(self.shared_weights()).zero_()

    def configure_server(self) -> "ScaffoldServer":
        return ScaffoldServer(self.server_lr, self.by_samples)

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer = single_optimizer(configured)
        plain = type(optimizer) is torch.optim.SGD and all(
            not group["momentum"] and not group["maximize"] for group in optimizer.param_groups
        )
        if not plain:
            raise ConfigError(PLAIN)
        _one_rate(optimizer)
        optimizer.register_step_post_hook(self._note_step)
        return configured

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        group = _one_rate(optimizer)  # a callback may have added another
        if any(weight.grad is not None for weight in group["params"]):  # else the learner has skipped the batch
            self._sum_of_lr += float(group["lr"])

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self._of_all = {name: reply[CONTROL + name] for name in self.control}
        super().download({name: tensor for name, tensor in reply.items() if not name.startswith(CONTROL)})

    def begin_round(self) -> None:
        self._correction = {name: self._of_all[name].to(own.device) - own for name, own in self.control.items()}
        self._sum_of_lr, self._change = 0.0, {}

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, with c - c_i added to its gradient."""
        # Zeros that have a gradient, so that the training loss that is reported stays the loss.
        zeros = [
            ((weight - weight.detach()) * self._correction[name]).sum()
            for name, weight in self.shared_weights().items()
        ]
        return super().objective(batch, batch_idx) + torch.stack(zeros).sum()

    def end_round(self) -> None:
        self._change = self._renew_control()
        self._of_all, self._correction = {}, {}  # a sleeping client keeps neither

    def upload(self) -> Payload:
        """Return the weights and the change of c_i in this round, zero on joining."""
        change = self._change or {name: torch.zeros_like(own) for name, own in self.control.items()}
        return super().upload().with_({CONTROL + name: tensor for name, tensor in change.items()})

    def release_round_state(self) -> tuple[float, int]:
        self._change = {}
        return super().release_round_state()

    @torch.no_grad()
    def _renew_control(self) -> dict[str, Tensor]:
        if not self._sum_of_lr:  # no step at all: nothing to read off
            return {}
        change = {
            name: (self.received[name] - weight) / self._sum_of_lr - self._of_all[name].to(weight.device)
            for name, weight in self.shared_weights().items()
        }
        # A client whose training ran away is refused by the server, which then knows of no change; nor may the client.
        if all(tensor.isfinite().all() for tensor in change.values()):
            for name, own in self.control.items():
                own += change[name]
        return change


def _one_rate(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group, *others = optimizer.param_groups
    if others:
        raise ConfigError(PLAIN)
    return group


class ScaffoldServer(UniformServer):
    """Averages models, and keeps the mean of all clients' control variates.

    Args:
        server_lr: see :class:`Scaffold`.
        by_samples: see :class:`Scaffold`.

    Attributes:
        control: c, by the names of the weights it belongs to.
    """

    kept = ("control",)
    averages = True

    control: dict[str, Tensor]

    def __init__(self, server_lr: float = 1.0, by_samples: bool = False) -> None:
        self.server_lr, self.by_samples = server_lr, by_samples

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        first = clients[min(clients)].initial
        self.control = {name: torch.zeros_like(self.model[name]) for name in self.model if CONTROL + name in first}

    def is_averaged(self, name: str) -> bool:
        return not name.startswith(CONTROL)

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        before = self.model
        names, weights = self._averaged(uploads), self.averaging_weights(round, uploads)
        controls = [CONTROL + name for name in self.control]
        counts = [self._size(client) / len(self.num_samples) for client in uploads]
        if self.robust is None:
            mean, changes = self.average(uploads, weights, names), self.average(uploads, counts, controls)
        else:  # which looks at all tensors of an upload together
            mean = self.average(uploads, weights, [*names, *controls])
            changes = Payload({name: mean[name] * sum(counts) for name in controls})
        self.model = Payload({name: mean[name] for name in names}, mean.sparse.intersection(names))
        if self.server_lr != 1:
            moved = {
                name: torch.lerp(before[name], mean, self.server_lr)
                for name, mean in self.model.items()
                if name in self.control
            }
            self.model = self.model.with_(moved)
        self.control = {name: control + changes[CONTROL + name] for name, control in self.control.items()}

    def center(self, client: int, upload: Payload) -> Mapping[str, Tensor]:
        """Return the model; changes of control variates are updates as they are."""
        return self.model

    def _size(self, client: int) -> float:
        """Return nu_i."""
        if not self.by_samples:
            return 1.0
        return self.num_samples[client] * len(self.num_samples) / sum(self.num_samples.values())

    def reply(self, client: int) -> Payload:
        size = self._size(client)
        return self.model.with_({CONTROL + name: c if size == 1 else c / size for name, c in self.control.items()})
