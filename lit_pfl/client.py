"""The client's side of a method: a LightningModule around a backbone."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_stat_scores

from lit_pfl.data import BatchLoader, ClientData
from lit_pfl.errors import ConfigError
from lit_pfl.models import Backbone, ResNet9
from lit_pfl.module import QuickModule
from lit_pfl.nn import FactorizedConv2d, Form, HadamardConv2d, Pi, factorize, factorized_layers, l1_norm_of_masks
from lit_pfl.ops import soft_threshold
from lit_pfl.payload import Payload
from lit_pfl.server import Server
from lit_pfl_callbacks.federated_loop import load_tensors

BackboneCallable = Callable[[int, int], Backbone]
OptimizerCallable = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerCallable = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

Role = Literal["body", "head", "u", "v", "mu", "norm", "norm_stats"]
NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Task:
    """What a client is to learn.

    Args:
        client: the client's id.
        channels: channels of an image.
        image_size: height and width of an image in pixels.
        num_classes: number of classes.
        labels_agree: whether label c means the same at every client.
        local_epochs: epochs that the client trains in a round.
    """

    client: int = 0
    channels: int = 3
    image_size: int = 32
    num_classes: int = 10
    labels_agree: bool = True
    local_epochs: int = 1


@dataclass(frozen=True)
class Factorization:
    """Weights ``pi(u v^T + mu)`` in place of dense ones.

    Args:
        form: shape of a convolution's factors, ``IFxOF`` (SimFed) or ``FFxIO`` (Factorized-FL).
        rank: number of columns of u and v.
        mask: whether there is a mu.
        l1: weight of the L1 norm of mu in the objective, lambda.
        l1_mode: how the norm is minimised. ``subgradient``: as part of the loss; mu gets small, never exactly zero.
            ``proximal``: every optimizer step is followed by soft thresholding at lambda times the learning rate.
            ``inert``: not at all, as in Factorized-FL's released code, whose penalty has no gradient.
        threshold: entries of mu below it in size count as zero wherever the model is used or sent.
        pi: how the matrices of form ``FFxIO`` become weights, see :class:`~lit_pfl.nn.FactorizedConv2d`.
    """

    form: Form = "IFxOF"
    rank: PositiveInt = 1
    mask: bool = True
    l1: NonNegativeFloat = 1e-4
    l1_mode: Literal["subgradient", "proximal", "inert"] = "subgradient"
    threshold: NonNegativeFloat = 0.0
    pi: Pi = "spatial"


@dataclass(frozen=True)
class Score:
    """How well a model does on some samples.

    Args:
        n: number of samples.
        acc: share of them classified rightly, NaN without samples.
        loss: mean cross entropy, NaN without samples.
    """

    n: int
    acc: float
    loss: float


class Client(QuickModule, ABC):
    """One client of a federation. A method is a subclass that says what travels and which server it needs.

    The client given to a :class:`~lit_pfl.Federation` is a pattern without weights; :meth:`build` makes the real ones.

    Args:
        backbone: makes the network from the number of image channels and of classes.
        optimizer: makes the optimizer from the parameters.
        scheduler: makes a learning rate scheduler, stepped after every local epoch.
        factorization: factorize every layer; None leaves the weights dense.
        norm_stats: ``local``: running statistics of normalisation layers never travel; ``averaged``: they travel with
            the layer's affine parameters.
        reset_optimizer: whether the optimizer forgets its momentum at the start of every round.
        share_head: whether the classifier head travels where the method shares it. By default it does if labels mean
            the same at every client; where they do not, it never does, for any method.
        channels_last: whether images and weights are laid out channels last. By default where it pays: on CPU, for
            networks with a convolution of 64 or more channels (1.4 to 2.5 times faster here; narrow ones lose).

    Raises:
        ConfigError: when the head is to be shared although labels differ.
    """

    backbone: Backbone
    data: ClientData
    _shared: list[tuple[str, nn.Module, str]]

    def __init__(
        self,
        backbone: BackboneCallable = lambda channels, classes: ResNet9(channels, classes),
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=1e-4),
        scheduler: SchedulerCallable | None = None,
        factorization: Factorization | None = None,
        norm_stats: Literal["local", "averaged"] = "local",
        reset_optimizer: bool = False,
        share_head: bool | None = None,
        channels_last: bool | None = None,
    ) -> None:
        super().__init__()
        self.make_backbone = backbone
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.factorization = factorization
        self.norm_stats = norm_stats
        self.reset_optimizer = reset_optimizer
        self.share_head = share_head
        self.channels_last = channels_last
        self.task = Task()
        self._losses: list[tuple[Tensor, int]] = []

    # Abstract also because the command line takes a base class that can be made itself for the default, and then does
    # not see what a method puts in place of a default of None.
    @property
    @abstractmethod
    def shares(self) -> frozenset[Role]:
        """Which parameters travel; a method sets it to the roles it shares."""

    @property
    def fewest_epochs(self) -> int:
        """The fewest local epochs that a round of this method has room for; the federation's default."""
        return 1

    # ------------------------------------------------------------------------------------------------ making a client

    def build(self, task: Task) -> "Client":
        """Return a client of this kind with fresh weights for a task, drawn from PyTorch's default generator."""
        if self.share_head and not task.labels_agree:
            raise ConfigError(
                "model.share_head=true: heads cannot be shared where labels differ from client to client; "
                "set it to false or leave it out."
            )
        client = copy.copy(self)
        # Not a deep copy: factories given on the command line hold on to all of its parser. Module's tables must be
        # own.
        client.__dict__ = {k: v.copy() if isinstance(v, dict | list) else v for k, v in self.__dict__.items()}
        client.task = task
        client.configure_backbone()
        client._shared = [
            (name, client.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, role in client.roles().items()
            if client.travels(name, role)
        ]
        client.configure_memory()
        return client

    def settle(self, device: torch.device) -> None:
        """Move to a device, and take the memory lay-out that suits it."""
        self.to(device)
        if self.channels_last is None:
            dense = [m.out_channels for m in self.modules() if isinstance(m, nn.Conv2d)]
            made = [m.weight_shape[0] for m in self.modules() if isinstance(m, FactorizedConv2d | HadamardConv2d)]
            self.channels_last = device.type == "cpu" and max([0, *dense, *made]) >= 64
        if self.channels_last:
            for network in self.children():
                network.to(memory_format=torch.channels_last)

    def configure_backbone(self) -> None:
        """Make ``self.backbone`` for ``self.task``."""
        self.backbone = self.make_backbone(self.task.channels, self.task.num_classes)
        self.backbone.eval()
        # Anew, so that what is drawn from here on is the same for clients with other numbers of classes.
        torch.manual_seed(torch.initial_seed() + 1)
        with torch.no_grad():  # gives lazy layers their shapes
            self.backbone(self._blank_image())
        self.backbone.train()
        if self.factorization is not None:
            f = self.factorization
            factorize(self.backbone, f.form, f.rank, f.mask, f.pi, f.threshold)

    def configure_memory(self) -> None:
        """Make what the client remembers from round to round besides its network; the network is there."""

    def _blank_image(self) -> Tensor:
        return torch.zeros(1, self.task.channels, self.task.image_size, self.task.image_size)

    def configure_server(self) -> Server:
        """Return the server that goes with this kind of client."""
        return Server()

    def configure_optimizers(self) -> Any:
        """Make the optimizer and the scheduler."""
        optimizer = self.make_optimizer(self.trained_parameters())
        if self._l1 and self._l1_mode == "proximal":
            masks = {id(layer.mu) for _, layer in factorized_layers(self)}
            optimizer.register_step_post_hook(lambda optimizer, *_: _shrink(optimizer, masks, self._l1))
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """Return what the optimizer gets."""
        return self.backbone.parameters()

    def training_data(self) -> BatchLoader:
        """Return the batches to train on; a method may hold some of its training data back."""
        return self.data.train

    @property
    def _l1(self) -> float:
        f = self.factorization
        return f.l1 if f is not None and f.mask else 0.0

    @property
    def _l1_mode(self) -> str:
        return self.factorization.l1_mode if self.factorization is not None else "inert"

    # ------------------------------------------------------------------------------------------------------- training

    def on_train_epoch_start(self) -> None:
        """Call :meth:`begin_round` at the first of a round's local epochs, and :meth:`begin_epoch` at each."""
        epoch = self.trainer.current_epoch % self.task.local_epochs
        if epoch == 0:
            if self.reset_optimizer:
                for optimizer in self.trainer.optimizers:
                    optimizer.state.clear()
            self.begin_round()
        self.begin_epoch(epoch)

    def begin_round(self) -> None:
        """Prepare for a round's training; the reply is loaded."""

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for a local epoch, counted from 0 in every round."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) images to (B, classes) logits."""
        return self.backbone(images)

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return what is minimised on a batch: cross entropy, and ``l1 * sum |mu|`` of a factorized backbone."""
        loss = nn.functional.cross_entropy(self(images), labels)
        if self._l1 and self._l1_mode == "subgradient":
            loss = loss + self._l1 * l1_norm_of_masks(self.backbone)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        loss = self.objective(images, labels)
        # Kept here, on the device: one self.log costs as much as a small network's step.
        self._losses.append((loss.detach(), len(labels)))
        return loss

    def pop_train_loss(self) -> tuple[float, int]:
        """Return the sum of the training loss over samples since the last call, and the number of samples."""
        if not self._losses:
            return 0.0, 0
        losses = torch.stack([loss for loss, _ in self._losses]).tolist()
        sizes = [size for _, size in self._losses]
        self._losses.clear()
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)), sum(sizes)

    # ------------------------------------------------------------------------------------------------------ exchanging

    def roles(self) -> dict[str, Role]:
        """Return the role of every entry of ``state_dict()``.

        ``head`` is all of the classifier, however its weight is made. Of the body, ``u``, ``v`` and ``mu`` are the
        factors of factorized weights, ``norm`` the affine parameters and ``norm_stats`` the running statistics of
        normalisation layers, and ``body`` is all the rest.
        """
        factors = {name for name, _ in factorized_layers(self)}
        norms = {
            name for name, m in self.named_modules() if isinstance(m, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
        }
        norms |= {name for name, m in self.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm))}

        def role(name: str) -> Role:
            owner, _, leaf = name.rpartition(".")
            if leaf in NORM_STATISTICS:
                return "norm_stats"
            if name.startswith("backbone.head."):
                return "head"
            if owner in factors and leaf in ("u", "v", "mu"):
                return leaf  # type: ignore[return-value]
            return "norm" if owner in norms else "body"

        return {name: role(name) for name in self.state_dict() if name.startswith("backbone.")}

    def travels(self, name: str, role: Role) -> bool:
        """Say whether an entry of ``state_dict()`` is sent and received."""
        if role == "norm_stats":
            return self.norm_stats == "averaged" and "norm" in self.shares
        if role == "head":
            return "head" in self.shares and (self.task.labels_agree if self.share_head is None else self.share_head)
        return role in self.shares

    def shared_parameters(self) -> dict[str, Tensor]:
        """Return what travels, by name: the client's own memory, not copies."""
        return {name: getattr(owner, leaf).detach() for name, owner, leaf in self._shared}

    def shared_weights(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters among what travels, by name."""
        return {
            name: weight
            for name, owner, leaf in self._shared
            if isinstance(weight := getattr(owner, leaf), nn.Parameter)
        }

    def upload(self) -> Payload:
        """Return what is sent at the end of a round: the client's own memory, which changes when it trains on."""
        shared = self.shared_parameters()
        masks = {f"{name}.mu": layer for name, layer in factorized_layers(self) if f"{name}.mu" in shared}
        if self.factorization is not None and self.factorization.threshold:
            with torch.no_grad():
                shared |= {name: mu for name, layer in masks.items() if (mu := layer.sparse_mu) is not None}
        return Payload(shared, sparse=masks)

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load a reply of the server."""
        load_tensors(self, reply)

    # ------------------------------------------------------------------------------------------------------ evaluating

    @torch.no_grad()
    def score(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
        """Score this client's personalized model, as it is now, on batches of images and labels."""
        n, correct, loss = 0, 0, 0.0
        with evaluating(self):
            for images, labels in batches:
                logits = self.predict(images)
                true_positives = multiclass_stat_scores(logits, labels, logits.shape[1], "micro", validate_args=False)[
                    0
                ]
                correct += int(true_positives)
                loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
                n += len(labels)
        return Score(n, correct / n, loss / n) if n else Score(0, float("nan"), float("nan"))

    def predict(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) images to the (B, classes) logits of the personalized model."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self(images)


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, masks: set[int], l1: float) -> None:
    """Take the proximal step of ``l1 * sum |mu|`` after a gradient step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in masks and parameter.grad is not None:  # a frozen one took no step
                parameter.copy_(soft_threshold(parameter, l1 * group["lr"]))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and back."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
