"""The client's side of a method: a learner under a method."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lit_pfl.core.exchange import Exchange
from lit_pfl.core.payload import Payload
from lit_pfl.core.robust import RobustMean, with_mean
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import Role, owners
from lit_pfl.core.spec import ClientSpec
from lit_pfl.core.telling import Telling
from lit_pfl.core.training import Training
from lit_pfl.data import ClientData
from lit_pfl.errors import ConfigError
from lit_pfl.learners import (
    BackboneCallable,
    ImageClassifier,
    OptimizerCallable,
    SchedulerCallable,
    call_step,
    check_learner,
    check_shapes,
    hand_on,
    place_checkpoints,
    quick_backbone,
    single_optimizer,
)
from lit_pfl.lightning_internals import (
    hand_down_trainer,
    hand_up_hparams,
    lend_data,
    name_metrics,
    optimizers_in,
    own_copy,
)
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks.frozen import FROZEN, hold_apart, table_of


class Client(Training, Exchange, Telling):
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
        local: which tensors never travel, whatever the method shares: a regular expression searched in the names of
            parameters and buffers, or a role. ``FedAvg(local="norm")`` is FedBN (Li et al. 2021).
        channels_last: memory lay-out of the classifier, see :class:`~lit_pfl.learners.ImageClassifier`.
        learner: what is trained in place of an image classifier.
        head: which parameters are the learner's head: a regular expression searched in their names. By default those of
            its attribute ``head``.
        encoder: which part of the learner embeds its input (``net.encoder``). By default its attribute ``body`` or
            ``encoder``.
        shares: which tensors travel at most, of those that the method shares: a regular expression searched in the
            names of parameters and buffers, or a role. ``FedAvg(shares="adapter")`` averages the adapters of a network
            that ``peft`` has given some.
        mean: robust mean that the server takes in place of the weighted mean of the uploads (``CoordinateMedian``,
            ``TrimmedMean``, ``GeometricMedian``, ``Krum``, ``MultiKrum``, ``NormClipping``, ``FLTrust``), for methods
            whose server averages. Default: the weighted mean.

    Raises:
        ConfigError: when the learner is none, the head is to be shared although labels differ, or nothing is left to
            travel.
    """

    #: whether training changes the shapes of the learner's tensors
    resizes = False
    #: names of the models that are scored, see :meth:`as_evaluated`; the first is the client's own
    evaluated: ClassVar[tuple[str, ...]] = ("personalized",)

    #: why a learner that steps its optimizers itself (manual optimization) cannot be trained so; empty: it can
    needs_automatic: ClassVar[str] = ""
    #: whether weights that are unfrozen during a fit may begin to travel then
    may_unfreeze: ClassVar[bool] = True

    learner: L.LightningModule
    data: ClientData | None

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
        local: str | None = None,
        channels_last: bool | None = None,
        learner: L.LightningModule | None = None,
        head: str | None = None,
        encoder: str | None = None,
        shares: str | None = None,
        mean: RobustMean | None = None,
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
        self.local = local
        self.channels_last = channels_last
        self.learner = learner  # type: ignore[assignment]  # configure() makes one where there is none
        self.head = head
        self.encoder = encoder
        self.only = shares
        self.mean = mean
        self.data = None
        self.checkpoint_folder: Callable[[], Path] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if configure_server := cls.__dict__.get("configure_server"):
            cls.configure_server = _once_configured(configure_server)  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------------------------ making a client

    def build(self, spec: ClientSpec) -> "Client":
        """Return a client of this kind, with a learner of its own.

        A classifier's fresh weights are drawn from PyTorch's default generator; a learner that was given is copied.
        """
        if self.learner is not None:
            check_shapes(self.learner)
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
        unknown = [role for role in self.shares if role not in get_args(Role)]
        if unknown:
            raise ConfigError(
                f"{type(self).__name__}.shares: {unknown[0]!r} is no role; it must be a set of some of "
                f"{', '.join(get_args(Role))}."
            )
        self.spec, self.alone = spec, alone
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
        check_learner(self.learner, self.why_automatic())
        self.automatic_optimization = self.learner.automatic_optimization
        self.configure_learner()
        if self.shares and not spec.labels_agree and not self.head_names:
            raise ConfigError(
                f"model.head: labels differ from client to client, so heads stay at home; say which parameters of "
                f"{type(self.learner).__name__} are its head by a regular expression, such as --model.head '^out'."
            )
        self._known = frozenset(self.learner.state_dict())
        self.settle_what_travels(self.local, self.only)
        self.configure_state()
        hand_down_trainer(self)
        for name, learner in self.learners.items():
            name_metrics(learner, f"{name}.")
        hand_on(self, self.learners, self.scored, Client, alone)
        if alone:
            hand_up_hparams(self.learner, self)
            for step in ("validation_step", "test_step", "predict_step"):
                if is_overridden(step, self.scored):
                    self.__dict__[step] = self._evaluating_step(step)

    def why_automatic(self) -> str:
        """Return why a learner cannot step its optimizers itself under this method; nothing if it can."""
        if self.needs_automatic:
            return f"{type(self).__name__} {self.needs_automatic}"
        if any(getattr(type(self), name) is not getattr(Training, name) for name in ("objective", "loss", "penalized")):
            return f"{type(self).__name__} minimizes more than the learner's loss"
        if self.factorization is not None and self.factorization.penalizes:
            return "model.factorization adds the L1 norm of mu to the loss (model.factorization.l1_mode=subgradient)"
        return ""

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
        return with_mean(Server(), self.mean)

    def configure_callbacks(self) -> Any:
        """Get ready for a Trainer, of all hooks in the one before Lightning looks which steps there are."""
        self.configure_model()
        callbacks = self.learner.configure_callbacks()
        if self.checkpoint_folder is not None:
            place_checkpoints(callbacks if isinstance(callbacks, Sequence) else [callbacks], self.checkpoint_folder)
        return callbacks

    def setup(self, stage: str) -> None:
        """Let the learner find the client's own data module where it has one: ``self.trainer.datamodule``."""
        # Not before: a Trainer that is given one prepares it and sets it up, as has been done.
        if self.data is not None and self.data.module is not None:
            lend_data(self.trainer, self.data.module)

    def on_fit_end(self) -> None:
        """Take the data module away from the Trainer, which would tear it down."""
        if self.data is not None and self.data.module is not None:
            lend_data(self.trainer, None)

    def teardown(self, stage: str) -> None:
        """Let the learner find the client's own data module again: it may be scored further."""
        self.setup(stage)

    def configure_model(self) -> None:
        """Get ready for a Trainer that is given this client by itself."""
        if not self.is_configured:
            self.configure(ClientSpec(example=getattr(self.learner, "example_input_array", None)), alone=True)

    def initial(self) -> Payload:
        """Return what is sent once, on joining: by default what an upload would hold, with every mu as it starts."""
        self.configure_model()
        upload, f = self.upload(), self.factorization
        whole = {} if f is None else f.first(self.learner, upload)
        return Payload({**upload, **whole}, upload.sparse) if whole else upload

    # -------------------------------------------------------------------------------------------------- frozen weights

    def joining(self) -> Payload:
        """Return what is sent once, on joining: the initial tensors, and what the frozen ones are, which stay here."""
        initial = self.initial()
        return Payload({**initial, FROZEN: self.frozen_table}, initial.sparse) if self.frozen else initial

    @cached_property
    def frozen_table(self) -> Tensor:
        """Names, types, shapes and fingerprints of the weights that never train, as bytes."""
        return table_of(self.frozen)

    def thaw(self, names: Iterable[str]) -> None:
        """Let frozen weights train and travel from now on.

        Raises:
            ConfigError: for a method that has something for every weight that travels.
        """
        for name in names:
            if not self.may_unfreeze:
                raise ConfigError(
                    f"model.learner: {name!r} is unfrozen in training, and {type(self).__name__} keeps something for "
                    "every weight that it sends; unfreeze it before the fit."
                )
            del self.frozen[name]
            hold_apart(learner.get_parameter(name) for learner in self.learners.values())
            if name in self._may_travel:
                self._shared += owners(self.learner, [name])

    def notice_unfrozen(self) -> None:
        """Let those frozen weights travel from now on that somebody has unfrozen."""
        if unfrozen := [name for name, weight in self.frozen.items() if weight.requires_grad]:
            self.thaw(unfrozen)

    def constant(self) -> frozenset[str]:
        """Return the names in ``state_dict()`` of tensors that stay as they are: frozen in all learners."""
        return frozenset(f"{part}.{name}" for part in self.learners for name in self.frozen)

    @property
    def is_configured(self) -> bool:
        """Whether :meth:`configure` has been called."""
        return hasattr(self, "_shared")

    def configure_optimizers(self) -> Any:
        """Return what the learner's own returns."""
        configured = self.learner.configure_optimizers()
        optimizers = optimizers_in(configured) if self.learner.automatic_optimization is False else []
        for optimizer in optimizers or [single_optimizer(configured)]:
            if self.factorization is not None:
                self.factorization.shrink_after_steps(optimizer, self)
        return configured

    @property
    def learners(self) -> dict[str, L.LightningModule]:
        """The client's learners by name: ``learner``, whose tensors may travel, and others that a method adds."""
        return {"learner": self.learner}

    @L.LightningModule.strict_loading.getter  # type: ignore[attr-defined]
    def strict_loading(self) -> bool:
        """Whether a checkpoint has to hold every tensor, and no other; the learner may say that it need not."""
        return super().strict_loading and (self.learner is None or self.learner.strict_loading)

    @property
    def backbone(self) -> nn.Module:
        """The image classifier's network."""
        return self.learner.backbone  # type: ignore[return-value]

    # ------------------------------------------------------------------------------------------------------ evaluating

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the learner."""
        return self.scored(*args, **kwargs)

    def as_evaluated(self, model: str) -> AbstractContextManager[L.LightningModule]:
        """Make a learner one of the models in ``evaluated``; put it back afterwards."""
        return self.personalized()

    def sizes(self, model: str) -> Mapping[str, float]:
        """Return what else is told of one of the models beside its scores; by default nothing."""
        return {}

    def _evaluating_step(self, name: str) -> Any:
        def step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            with self.personalized() as learner:
                return call_step(learner, name, batch, batch_idx, dataloader_idx)

        return step


def _once_configured(configure_server: Any) -> Any:
    """Let a method's ``configure_server`` find a client that is ready, also before any Trainer has seen it."""

    def configured(self: Client) -> Server:
        self.configure_model()
        return with_mean(configure_server(self), self.mean)

    configured.__doc__ = configure_server.__doc__
    return configured
