"""The client's side of a method: a learner under a method."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lit_pfl.data import ClientData
from lit_pfl.errors import ConfigError
from lit_pfl.evaluation import mean_loss
from lit_pfl.factorization import Factorization
from lit_pfl.learners import (
    BackboneCallable,
    ImageClassifier,
    OptimizerCallable,
    SchedulerCallable,
    SkipBatch,
    call_step,
    check_learner,
    hand_on,
    set_schedules_to,
    single_optimizer,
    size_of,
    training_loss,
)
from lit_pfl.lightning_internals import QuickModule, hand_down_trainer, name_metrics, own_copy
from lit_pfl.models import ResNet9
from lit_pfl.payload import Payload
from lit_pfl.server import Server
from lit_pfl.sharing import Role, encoder_of, names_of_head, owners, roles_of, travelling
from lit_pfl_callbacks.federated_loop import load_tensors


@dataclass(frozen=True)
class ClientSpec:
    """What a client is to learn.

    Args:
        client_id: the client's id.
        example: a batch of its data, with the shapes and types of all others; None where it is not known.
        num_classes: number of classes it tells apart; None where that is not its task, or not known.
        labels_agree: whether label c means the same at every client.
        local_epochs: epochs that the client trains in a round; None where it is not known yet.
    """

    client_id: int = 0
    example: Any = None
    num_classes: int | None = None
    labels_agree: bool = True
    local_epochs: int | None = None


class Client(QuickModule, ABC):
    """One client of a federation: a learner under a method. A method is a subclass that says what travels, what is
    minimised and which server it needs.

    The learner is any LightningModule with automatic optimization; without one, the client makes an image classifier
    from ``backbone``, ``optimizer`` and ``scheduler``. A client given to a :class:`~lit_pfl.Federation` is a prototype;
    :meth:`build` makes the real ones. Given to a Trainer by itself, with a
    :class:`~lit_pfl_callbacks.FederatedLoop` among its callbacks, it is one site of a federation.

    Args:
        backbone: makes the classifier's network from the number of image channels and of classes. By default a ResNet-9
            with which a first try is quick, narrower than the papers'.
        optimizer: makes the classifier's optimizer from the parameters. A learner has its own, like its schedule.
        scheduler: makes the classifier's learning rate scheduler.
        scheduler_counts: what schedules of epochs count: the ``epochs`` that the client has trained, or the ``rounds``
            of the federation, whoever took part in them.
        factorization: factorize every convolution and linear layer of the learner; None leaves the weights dense.
        norm_stats: ``local``: running statistics of normalisation layers never travel; ``averaged``: they travel with
            the layer's affine parameters.
        reset_optimizer: whether the optimizer forgets its momentum at the start of every round.
        share_head: whether the head travels where the method shares it. By default it does if labels mean the same at
            every client; where they do not, it never does, for any method.
        channels_last: memory lay-out of the classifier, see :class:`~lit_pfl.learners.ImageClassifier`.
        learner: what is trained in place of an image classifier.
        head: which parameters are the learner's head: a regular expression searched in their names. By default those of
            its attribute ``head``.
        encoder: which part of the learner embeds its input (``net.encoder``). By default its attribute ``body`` or
            ``encoder``.

    Raises:
        ConfigError: when the learner is none, or the head is to be shared although labels differ.
    """

    #: whether training changes the shapes of the learner's tensors
    resizes = False
    #: names of the models that are scored, see :meth:`shown`; the first is the client's own
    evaluated: ClassVar[tuple[str, ...]] = ("personalized",)

    learner: L.LightningModule
    data: ClientData | None
    _shared: list[tuple[str, nn.Module, str]]

    def __init__(
        self,
        backbone: BackboneCallable | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=1e-4),
        scheduler: SchedulerCallable | None = None,
        scheduler_counts: Literal["epochs", "rounds"] = "epochs",
        factorization: Factorization | None = None,
        norm_stats: Literal["local", "averaged"] = "local",
        reset_optimizer: bool = False,
        share_head: bool | None = None,
        channels_last: bool | None = None,
        learner: L.LightningModule | None = None,
        head: str | None = None,
        encoder: str | None = None,
    ) -> None:
        super().__init__()
        self.make_backbone = backbone
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.scheduler_counts = scheduler_counts
        self.factorization = factorization
        self.norm_stats = norm_stats
        self.reset_optimizer = reset_optimizer
        self.share_head = share_head
        self.channels_last = channels_last
        self.learner = learner  # type: ignore[assignment]  # configure() makes one where there is none
        self.head = head
        self.encoder = encoder
        self.data = None
        self.completed_rounds = 0  # of the federation, which keeps it up to date
        self.epoch_ended = False
        self._losses: list[tuple[Tensor, int]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if configure_server := cls.__dict__.get("configure_server"):
            cls.configure_server = _once_configured(configure_server)  # type: ignore[method-assign]

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

    def build(self, spec: ClientSpec) -> "Client":
        """Return a client of this kind, with a learner of its own.

        A classifier's fresh weights are drawn from PyTorch's default generator; a learner that was given is copied.
        """
        client = own_copy(self)
        client.configure(spec)
        return client

    def configure(self, spec: ClientSpec, alone: bool = False) -> None:
        """Make this client ready to train and to share.

        Args:
            spec: what it is to learn.
            alone: whether a Trainer is given this client by itself, and asks it for loaders and evaluation.
        """
        if self.share_head and not spec.labels_agree:
            raise ConfigError(
                "model.share_head=true: heads cannot be shared where labels differ from client to client; "
                "set it to false or leave it out."
            )
        self.spec = spec
        if self.learner is None:
            options = {name: getattr(self, f"make_{name}") for name in ("optimizer", "scheduler")}
            self.learner = ImageClassifier.for_data(
                self.make_backbone or quick_backbone,
                spec.example,
                spec.num_classes,
                channels_last=self.channels_last,
                **options,
            )
        if isinstance(self.learner, Client):
            raise ConfigError(
                f"model.learner: {type(self.learner).__name__} is a method itself; give the LightningModule that it "
                "should train."
            )
        check_learner(self.learner)
        self.configure_learner()
        if self.shares and not spec.labels_agree and not self.head_names:
            raise ConfigError(
                f"model.head: labels differ from client to client, so heads stay at home; say which parameters of "
                f"{type(self.learner).__name__} are its head by a regular expression, such as --model.head '^out'."
            )
        self._shared = owners(self.learner, [name for name, role in self.roles().items() if self.travels(name, role)])
        self.configure_state()
        hand_down_trainer(self)
        for name, learner in self.learners.items():
            name_metrics(learner, f"{name}.")
        hand_on(self, list(self.learners.values()), self.scored, Client, alone)
        if alone:
            for step in ("validation_step", "test_step", "predict_step"):
                if is_overridden(step, self.scored):
                    self.__dict__[step] = self._evaluating_step(step)

    def place_on(self, device: torch.device) -> None:
        """Move to a device, and take the memory lay-out that suits it."""
        self.to(device)
        for learner in self.learners.values():
            if isinstance(learner, ImageClassifier):
                learner.lay_out()

    def configure_learner(self) -> None:
        """Change ``self.learner`` before it is known what travels; by default factorize it if that is asked for."""
        if self.factorization is not None:
            self.factorization.factorize(self.learner)

    def configure_state(self) -> None:
        """Make what the client keeps from round to round beside its learner; what travels is known."""

    def configure_server(self) -> Server:
        """Return the server that goes with this kind of client."""
        return Server()

    def configure_callbacks(self) -> Any:
        """Get ready for a Trainer, of all hooks in the one before Lightning looks which steps there are."""
        self.configure_model()
        return self.learner.configure_callbacks()

    def configure_model(self) -> None:
        """Get ready for a Trainer that is given this client by itself."""
        if not self.is_configured:
            self.configure(ClientSpec(example=getattr(self.learner, "example_input_array", None)), alone=True)

    @property
    def is_configured(self) -> bool:
        """Whether :meth:`configure` has been called."""
        return hasattr(self, "_shared")

    def configure_optimizers(self) -> Any:
        """Return what the learner's own returns."""
        configured = self.learner.configure_optimizers()
        optimizer = single_optimizer(configured)
        if self.factorization is not None:
            self.factorization.shrink_after_steps(optimizer, self)
        return configured

    @property
    def learners(self) -> dict[str, L.LightningModule]:
        """The client's learners by name: ``learner``, whose tensors may travel, and others that a method adds."""
        return {"learner": self.learner}

    @property
    def backbone(self) -> nn.Module:
        """The image classifier's network."""
        return self.learner.backbone  # type: ignore[return-value]

    # ------------------------------------------------------------------------------------------------------- training

    def training_data(self) -> Any:
        """Return the batches to train on; a method may hold some of its training data back."""
        return self.trainer.train_dataloader if self.data is None else self.data.train

    def start_epoch(self, epoch: int, local_epochs: int) -> None:
        """Call :meth:`begin_round` at the first of a round's local epochs, and :meth:`begin_epoch` at each.

        :class:`~lit_pfl_callbacks.FederatedLoop` calls this, which knows where rounds begin.
        """
        self.epoch_ended = False
        if epoch == 0:
            if self.reset_optimizer:
                for optimizer in self.trainer.optimizers:
                    optimizer.state.clear()
            if self.scheduler_counts == "rounds":
                set_schedules_to(self.completed_rounds, local_epochs, self.trainer)
            self.begin_round()
        self.begin_epoch(epoch, local_epochs)

    def end_epoch(self, epoch: int, local_epochs: int) -> None:
        """Call the learner's ``on_train_epoch_end``, and :meth:`end_round` at the last of a round's local epochs.

        A Trainer calls that hook after those of its callbacks, and so after the upload. But what is uploaded, and what
        is scored and saved while the client sleeps, has to be of an epoch that is over.
        """
        self.on_train_epoch_end()
        self.epoch_ended = True
        if epoch == local_epochs - 1:
            self.end_round()

    def begin_round(self) -> None:
        """Prepare for a round's training; the reply is loaded."""

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        """Prepare for a local epoch, counted from 0 in every round of ``local_epochs``."""

    def end_round(self) -> None:
        """Finish a round's training; :meth:`upload` comes next."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the learner."""
        return self.scored(*args, **kwargs)

    def loss(self, learner: L.LightningModule, batch: Any, batch_idx: int) -> Tensor:
        """Return what a learner minimises by itself: its own training loss, and ``l1 * sum |mu|`` if it is factorized.

        Raises:
            SkipBatch: when its ``training_step`` returns None.
        """
        return self.penalized(training_loss(learner, batch, batch_idx), learner)

    def penalized(self, loss: Tensor, learner: nn.Module) -> Tensor:
        """Return a loss with the L1 norm of a learner's masks, if it is factorized."""
        f = self.factorization
        return loss + f.penalty(learner) if f is not None and f.penalizes else loss

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what is minimised on a batch; a method adds to it."""
        return self.loss(self.learner, batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Return the objective of a batch, or None where the learner skips it."""
        try:
            loss = self.objective(batch, batch_idx)
        except SkipBatch:
            return None
        # Kept here, on the device: one self.log costs as much as a small network's step.
        self._losses.append((loss.detach(), size_of(batch)))
        return loss

    def fall_asleep(self) -> tuple[float, int]:
        """Drop what the next round does not need; the upload is handed over.

        Returns:
            The sum of the training loss over the samples of this round, and their number.
        """
        for parameter in self.parameters():
            parameter.grad = None
        if not self._losses:
            return 0.0, 0
        losses = torch.stack([loss for loss, _ in self._losses]).tolist()
        sizes = [size for _, size in self._losses]
        self._losses.clear()
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)), sum(sizes)

    # ------------------------------------------------------------------------------------------------------ exchanging

    @property
    def head_names(self) -> frozenset[str]:
        """Names of the head's entries in the learner's ``state_dict()``."""
        return names_of_head(self.learner, self.head)

    @property
    def encoder_module(self) -> nn.Module | None:
        """The part of the learner that embeds its input, if it is known."""
        return encoder_of(self.learner, self.encoder)

    def roles(self) -> dict[str, Role]:
        """Return the role of every entry of the learner's ``state_dict()``, see :func:`~lit_pfl.sharing.roles_of`."""
        return roles_of(self.learner, self.head_names)

    def travels(self, name: str, role: Role) -> bool:
        """Say whether an entry of the learner's ``state_dict()`` is sent and received."""
        if role == "norm_stats":
            return self.norm_stats == "averaged" and "norm" in self.shares
        if role == "head":
            return "head" in self.shares and (self.spec.labels_agree if self.share_head is None else self.share_head)
        return role in self.shares

    def shared_parameters(self) -> dict[str, Tensor]:
        """Return what travels, by name in the learner: the client's own memory, not copies."""
        return travelling(self._shared)

    def shared_weights(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters among what travels, by name."""
        return {
            name: weight
            for name, owner, leaf in self._shared
            if isinstance(weight := getattr(owner, leaf), nn.Parameter)
        }

    def initial(self) -> Payload:
        """Return what is sent once, on joining: by default what an upload would hold."""
        self.configure_model()
        return self.upload()

    def upload(self) -> Payload:
        """Return what is sent at the end of a round: the client's own memory, which changes when it trains on."""
        shared, f = self.shared_parameters(), self.factorization
        return Payload(shared) if f is None else Payload(f.sent(self.learner, shared), f.masks(self.learner, shared))

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load a reply of the server, and add to it what this client has of every mu in it and did not send."""
        f = self.factorization
        unsent = {} if f is None else f.unsent(self.learner, reply)
        load_tensors(self.learner, reply)
        for name, rest in unsent.items():
            self.learner.get_parameter(name).add_(rest)

    def load_global(self, model: Mapping[str, Tensor]) -> None:
        """Become the one model of all, see :meth:`~lit_pfl.Server.global_model`."""
        load_tensors(self.learner, model)

    # ------------------------------------------------------------------------------------------------------ evaluating

    @property
    def scored(self) -> L.LightningModule:
        """The learner that is the personalized model, inside of :meth:`personalized`."""
        return self.learner

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Make ``scored`` the personalized model; put it back afterwards. By default it is at any time."""
        yield self.scored

    def shown(self, model: str) -> AbstractContextManager[L.LightningModule]:
        """Make a learner one of the models in ``evaluated``; put it back afterwards."""
        return self.personalized()

    def sizes(self, model: str) -> Mapping[str, float]:
        """Return what else is told of one of the models beside its scores; by default nothing."""
        return {}

    def mean_loss(self, batches: Any) -> float:
        """Return the learner's mean training loss on batches, in evaluation mode, as it is now."""
        return mean_loss(self.learner, batches)[1]

    def _evaluating_step(self, name: str) -> Any:
        def step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            with self.personalized() as learner:
                return call_step(learner, name, batch, batch_idx, dataloader_idx)

        return step


def quick_backbone(channels: int, classes: int) -> ResNet9:
    """Return a ResNet-9 with which a first try is quick: an eighth of the papers' width."""
    # Not the default of an argument: on the command line, another class in its place would get its width.
    return ResNet9(channels, classes, width=8)


def _once_configured(configure_server: Any) -> Any:
    """Let a method's ``configure_server`` find a client that is ready, also before any Trainer has seen it."""

    def configured(self: Client) -> Server:
        self.configure_model()
        return configure_server(self)

    configured.__doc__ = configure_server.__doc__
    return configured
