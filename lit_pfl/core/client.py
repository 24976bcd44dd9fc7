"""The client's side of a method: a learner under a method."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, wraps
from itertools import chain
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.core.learner_module import LearnerModule, one_process
from lit_pfl.core.payload import Payload, as_payload
from lit_pfl.core.robust import RobustMean
from lit_pfl.core.server import Server, Weighting
from lit_pfl.core.server_optimizer import ServerOptimizer
from lit_pfl.core.shared_tensors import EXTRA, Received, SharedTensors, extra_tensors
from lit_pfl.core.sharing import Role, check_sharing, encoder_of, names_of_head, refuse_reserved, roles_of
from lit_pfl.core.spec import ClientSpec
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.learners import (
    BackboneCallable,
    ImageClassifier,
    OptimizerCallable,
    SchedulerCallable,
    add_parameters,
    check_copies,
    check_learner,
    configured_by,
    network_of,
    quick_backbone,
    set_schedules_to,
    single_optimizer,
)
from lit_pfl.lightning_internals import as_trained, optimizers_in, own_copy
from lit_pfl.nn import factorized_parts
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.frozen import FROZEN, table_of
from lit_pfl_callbacks.protocols import WeightParts
from lit_pfl_callbacks.sparsity import dense_parts
from lit_pfl_callbacks.tensors import load_tensors


def _made_ready(make: Callable[["Client"], Server]) -> Callable[["Client"], Server]:
    """Let a method's ``configure_server`` find a client that is ready; give its server what the client was given."""

    @wraps(make)
    def configure_server(self: "Client") -> Server:
        self.configure_model()  # also before any Trainer has seen it
        server = make(self)
        if not isinstance(server, Server):
            what = f"the class {server.__name__}" if isinstance(server, type) else f"a {type(server).__name__}"
            raise ConfigError(f"{type(self).__name__}.configure_server returns {what}; it must return a Server.")
        if self.weighting == "uniform":
            server.weighting = "uniform"
        if self.server_optimizer is not None:
            weights = [name for name, _ in self.learner.named_parameters(remove_duplicate=False)]
            server.step_by(copy.deepcopy(self.server_optimizer), weights)
        if self.mean is not None:
            server.average_by(self.mean)
        return server

    return configure_server


# Abstract also because the command line takes a base class that can be made itself for the default, and then does not
# see what a method puts in place of a default of None.
class Client(LearnerModule):
    """Base class of all methods: a LightningModule, the learner, as one client of a federation.

    A method is a subclass that defines what is shared, what is minimized and which server it needs.

    The learner is any LightningModule with automatic optimization; without one, the client makes an image classifier
    from ``backbone``, ``optimizer`` and ``scheduler``. A client given to a :class:`~lit_pfl.Federation` is a prototype;
    :meth:`build` makes the real ones. Given to a Trainer alone, with a
    :class:`~lit_pfl_callbacks.FederatedLoop` among its callbacks, it is one site of a federation.

    Args:
        backbone: makes the classifier's network from the number of image channels and of classes. By default a ResNet-9
            with which a first try is quick, narrower than the papers'.
        optimizer: makes the classifier's optimizer from the parameters. A learner has its own, like its schedule.
        scheduler: makes the classifier's learning rate scheduler.
        scheduler_counts: what schedules of epochs count: the ``epochs`` that the client has trained, or the ``rounds``
            of the federation, whoever took part in them; at a site with a Trainer of its own, its own rounds.
        factorization: factorize every convolution and linear layer of the learner; None leaves the weights dense.
        norm_stats: ``local``: running statistics of normalization layers are never sent; ``averaged``: they are sent
            with the layer's affine parameters.
        reset_optimizer: whether the optimizer forgets its momentum at the start of every round, as in many authors'
            codes, which make a new one.
        share_head: whether the head is sent where the method shares it. By default it does if labels mean the same at
            every client; where they do not, it never does, for any method.
        local: which tensors are never sent, whatever the method shares: a regular expression searched in the names of
            parameters and buffers, or a role. ``FedAvg(local="norm")`` is FedBN (Li et al. 2021).
        channels_last: memory layout of the classifier, see :class:`~lit_pfl.learners.ImageClassifier`.
        learner: what is trained instead of an image classifier.
        head: which parameters are the learner's head: a regular expression searched in their names. By default those of
            its attribute ``head``.
        encoder: which part of the learner embeds its input (``net.encoder``). By default its attribute ``body`` or
            ``encoder``.
        shares: which tensors are sent at most, of those that the method shares: a regular expression searched in the
            names of parameters and buffers, or a role. ``FedAvg(shares="adapter")`` averages the adapters of a network
            that ``peft`` has given some.
        server_optimizer: how a server that averages steps from its model towards the mean of a round; by default to the
            mean itself. ``FedProx(server_optimizer=ServerAdam(lr=0.01))`` is FedProx with the server of FedAdam.
        mean: robust mean that the server takes instead of the weighted mean of the uploads (``CoordinateMedian``,
            ``TrimmedMean``, ``GeometricMedian``, ``Krum``, ``MultiKrum``, ``NormClipping``, ``FLTrust``), for methods
            whose server averages. Default: the weighted mean.

    Raises:
        ConfigError: when the learner is none, the head is to be shared although labels differ, nothing is left to
            be sent, or a server optimizer is to step along factorized weights.
    """

    #: whether training changes the shapes of the learner's tensors
    resizes: ClassVar[bool] = False
    #: names of the models that are scored, see :meth:`as_evaluated`; the first is the client's own
    evaluated: ClassVar[tuple[str, ...]] = ("personalized",)
    #: why a learner that steps its optimizers itself (manual optimization) cannot be trained so; empty: it can
    needs_automatic: ClassVar[str] = ""
    #: why a site's Trainer cannot train it by several processes (``strategy="ddp"``), although it does not ask for
    #: :meth:`training_data`; empty: it can
    needs_one_process: ClassVar[str] = ""
    #: why its uploads must count in full (asynchronous servers may count them less); empty: they need not
    needs_full_steps: str = ""
    #: why its weights cannot be factorized; empty: they can
    needs_dense: ClassVar[str] = ""
    #: whether weights that are unfrozen during a fit may begin to travel then
    may_unfreeze: ClassVar[bool] = True
    #: the fewest local epochs that a round of this method has room for; the federation's default
    min_local_epochs: int = 1
    #: whether :attr:`received` holds what a round began with
    remembers: ClassVar[bool] = False
    #: how clients count where the server averages: by their numbers of ``samples``, or all the same (``uniform``)
    weighting: Weighting = "samples"

    #: what is shared that only makes sense where label c means the same at every client; empty: nothing
    needs_common_labels: ClassVar[str] = ""
    #: names under which it sends something next to the learner's tensors; one that ends with a dot is how they begin,
    #: and one that begins with a dot is how they end
    reserved: ClassVar[tuple[str, ...]] = (EXTRA,)
    #: names of those of the modules in :attr:`extra` that are sent and averaged; the others never are
    shared_extras: frozenset[str] = frozenset()

    #: further modules that train with the learner, by name; a method makes them in :meth:`configure_state`
    extra: nn.ModuleDict
    spec: ClientSpec
    #: copies of the shared weights as they were when this round began, by name; for as long as it is trained
    received: dict[str, Tensor]

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
        server_optimizer: ServerOptimizer | None = None,
        mean: RobustMean | None = None,
    ) -> None:
        super().__init__()
        if factorization is not None and self.needs_dense:
            raise ConfigError(f"model.factorization: {type(self).__name__} {self.needs_dense}; leave it out.")
        self.make_backbone, self.make_optimizer, self.make_scheduler = backbone, optimizer, scheduler
        self.scheduler_counts, self.reset_optimizer = scheduler_counts, reset_optimizer
        self.factorization, self.channels_last = factorization, channels_last
        self.norm_stats, self.share_head, self.local, self.only = norm_stats, share_head, local, shares
        self.learner = learner  # type: ignore[assignment]  # configure() makes one where there is none
        self.head, self.encoder, self.server_optimizer, self.mean = head, encoder, server_optimizer, mean
        self.completed_rounds = 0  # of the federation, which keeps it up to date
        self.epoch_ended = False
        self.received = Received()

    # --------------------------------------------------- what a method may override, in the order in which it is asked
    # (and in LearnerModule: learners, training_data, objective, scored, personalized)

    @property
    @abstractmethod
    def shares(self) -> frozenset[Role]:
        """Which parameters are sent; a method sets it to the roles it shares."""

    def configure_learner(self) -> None:
        """Change ``self.learner`` before it is known what is sent; by default factorize it if that is asked for."""
        if self.factorization is not None:
            self.factorization.factorize(self.learner)

    def is_shared(self, name: str, role: Role) -> bool:
        """Say whether an entry of the learner's ``state_dict()`` is sent and received."""
        if role == "norm_stats":
            return self.norm_stats == "averaged" and "norm" in self.shares
        if role == "head":
            return "head" in self.shares and (self.spec.labels_agree if self.share_head is None else self.share_head)
        return role in self.shares

    def configure_state(self) -> None:
        """Make what the client keeps from round to round next to its learner; what is sent is known."""

    @_made_ready
    def configure_server(self) -> Server:
        """Return the server that goes with this kind of client; by default it averages as :attr:`weighting` says."""
        return Server()

    def initial(self) -> Payload:
        """Return what is sent once, on joining: by default what an upload would hold."""
        self.configure_model()
        return self.upload()

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load a reply of the server, and add to it what this client has of every mu in it and did not send."""
        f = self.factorization
        self.thaw(reply)  # what has been unfrozen elsewhere
        unsent = {} if f is None else f.unsent(self.learner, reply)
        self._load(reply)
        for name, rest in unsent.items():
            self.learner.get_parameter(name).add_(rest)

    def begin_round(self) -> None:
        """Prepare for a round's training; the reply is loaded."""

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        """Prepare for a local epoch, counted from 0 in every round of ``local_epochs``."""

    def penalized(self, loss: Tensor, learner: nn.Module) -> Tensor:
        """Return a loss with the L1 norm of a learner's masks, ``l1 * sum |mu|``, if it is factorized."""
        f = self.factorization
        return loss + f.penalty(learner) if f is not None and f.penalizes else loss

    def end_round(self) -> None:
        """Finish a round's training; :meth:`upload` comes next."""

    def upload(self) -> Payload:
        """Return what is sent at the end of a round: the client's own memory, which changes when it trains on."""
        shared, f = self.shared_parameters(), self.factorization
        sent = Payload(shared) if f is None else Payload(f.sent(self.learner, shared), f.masks(self.learner, shared))
        if self.shared_extras:
            sent = sent.with_(extra_tensors(self.extra, self.shared_extras, self.norm_stats == "averaged"))
        return sent

    def release_round_state(self) -> tuple[float, int]:
        """Drop what the next round does not need; the upload is handed over.

        Returns:
            The sum of the training loss over the samples of this round, and their number.
        """
        self.received = Received()
        for parameter in self.parameters():
            parameter.grad = None
        return self.loss_tally.total()

    def as_evaluated(self, model: str) -> AbstractContextManager[L.LightningModule]:
        """Make a learner one of the models in ``evaluated``; put it back afterwards."""
        return self.personalized()

    def sizes(self, model: str) -> Mapping[str, float]:
        """Return what else is reported of one of the models besides its scores; by default nothing."""
        return {}

    def standalone(self) -> nn.Module:
        """Return a copy of the personalized model as a network on its own, see :func:`~lit_pfl.learners.network_of`."""
        with self.personalized() as learner:
            return network_of(learner)

    def weight_parts(self) -> dict[str, WeightParts]:
        """Return what the learner's weights are made of, by the layer's name."""
        return factorized_parts(self.learner) or dense_parts(self.learner)

    def load_global(self, model: Mapping[str, Tensor]) -> None:
        """Become the global model, see :meth:`~lit_pfl.Server.global_model`; what else is in it is left out."""
        own = self.roles()
        self._load({name: tensor for name, tensor in model.items() if name in own or name.startswith(EXTRA)})

    @property
    def method_name(self) -> str:
        """Name of the method of this package that it is or builds on; otherwise of its class."""
        classes = type(self).__mro__
        return next((c.__name__ for c in classes if c.__module__.startswith("lit_pfl.methods.")), classes[0].__name__)

    # ------------------------------------------------------------------------------------------------ making a client

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if make := cls.__dict__.get("configure_server"):
            cls.configure_server = _made_ready(make)  # type: ignore[method-assign]

    def build(self, spec: ClientSpec) -> "Client":
        """Return a client of this kind, with a learner of its own.

        A classifier's fresh weights are drawn from PyTorch's default generator; a learner that was given is copied.
        """
        if self.learner is not None:
            check_copies(self.learner)
        client = own_copy(self)
        client.configure(spec)
        return client

    def configure(self, spec: ClientSpec, alone: bool = False) -> None:
        """Make this client ready to train and to share.

        Args:
            spec: what it is to learn.
            alone: whether a Trainer is given this client on its own, and asks it for loaders and evaluation.
        """
        check_options_of(self, "model")
        check_options_of(self.factorization, "model.factorization")
        check_options_of(self.server_optimizer, "model.server_optimizer")
        if self.server_optimizer is not None and self.factorization is not None:
            raise ConfigError(
                "model.server_optimizer needs dense weights, whose zeros are sent too; leave out model.factorization."
            )
        for step in ("validation_step", "test_step", "predict_step"):
            if getattr(type(self), step) is not getattr(L.LightningModule, step):
                raise ConfigError(
                    f"{type(self).__name__}.{step} would never be called, as learners are scored by their own; change "
                    "what is scored in personalized()."
                )
        check_sharing(self.shares, self.share_head, spec.labels_agree, type(self).__name__, self.needs_common_labels)
        self.spec, self.alone = spec, alone
        self._make_learner()
        self.configure_learner()
        self._settle_shared_tensors()
        self.configure_state()
        self.wire_hooks()

    def _make_learner(self) -> None:
        if self.learner is None:
            self.learner = ImageClassifier.for_data(
                self.make_backbone or quick_backbone,
                self.spec.example,
                self.spec.num_classes,
                channels_last=self.channels_last,
                optimizer=self.make_optimizer,
                scheduler=self.make_scheduler,
            )
        if isinstance(self.learner, Client):
            raise ConfigError(
                f"model.learner: {type(self.learner).__name__} is a method itself; give the LightningModule that it "
                "should train."
            )
        check_learner(self.learner, self._why_automatic())
        self.automatic_optimization = self.learner.automatic_optimization

    def _why_automatic(self) -> str:
        """Return why a learner cannot step its optimizers itself under this method; nothing if it can."""
        if self.needs_automatic:
            return f"{type(self).__name__} {self.needs_automatic}"
        if any(getattr(type(self), name) is not getattr(Client, name) for name in ("objective", "loss", "penalized")):
            return f"{type(self).__name__} minimizes more than the learner's loss"
        if self.factorization is not None and self.factorization.penalizes:
            return "model.factorization adds the L1 norm of mu to the loss (model.factorization.l1_mode=subgradient)"
        return ""

    def _settle_shared_tensors(self) -> None:
        if self.shares and not self.spec.labels_agree and not self.head_names:
            raise ConfigError(
                f"model.head: labels differ from client to client, so heads are kept local; say which parameters of "
                f"{type(self.learner).__name__} are its head by a regular expression, such as --model.head '^out'."
            )
        kept_by = None if self.may_unfreeze else type(self).__name__
        self._shared = SharedTensors(self.learner, self.roles(), self.is_shared, self.local, self.only, kept_by)
        names = self._shared.names if self.may_unfreeze else self._shared.names - self._shared.frozen.keys()
        refuse_reserved(names, self.all_reserved(), type(self).__name__)

    # -------------------------------------------------------------------------------------------------- what is shared

    @classmethod
    def all_reserved(cls) -> frozenset[str]:
        """Return what this method and those that it builds on have :attr:`reserved`."""
        given = [vars(kind).get("reserved", ()) for kind in cls.__mro__]
        return frozenset(chain.from_iterable((names,) if isinstance(names, str) else names for names in given))

    @property
    def head_names(self) -> frozenset[str]:
        """Names of the head's entries in the learner's ``state_dict()``."""
        return names_of_head(self.learner, self.head)

    @property
    def encoder_module(self) -> nn.Module | None:
        """The part of the learner that embeds its input, if it is known."""
        return encoder_of(self.learner, self.encoder)

    @property
    def backbone(self) -> nn.Module:
        """The image classifier's network."""
        return self.learner.backbone  # type: ignore[return-value]

    def roles(self) -> dict[str, Role]:
        """Return the role of every entry of the learner's ``state_dict()``, see :func:`roles_of`."""
        return roles_of(self.learner, self.head_names)

    def shared_parameters(self) -> dict[str, Tensor]:
        """Return what is sent, by name in the learner: the client's own memory, not copies."""
        return self._shared.tensors()

    def shared_weights(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters among what is sent, by name."""
        return self._shared.weights()

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """The weights that never train, and so are not sent, by name in the learner."""
        return self._shared.frozen

    @property
    def thawed(self) -> list[str]:
        """The names of weights that were frozen when the client was made, and are trained or sent now."""
        return self._shared.thawed

    def thaw(self, names: Iterable[str]) -> None:
        """Count those frozen weights that are among some names no longer as frozen."""
        self._shared.thaw([name for name in names if name in self.frozen], self.learners)

    def joining(self) -> Payload:
        """Return what is sent once, on joining: the initial tensors, and what the frozen ones are, which stay here."""
        initial = as_payload(self.initial())
        return initial.with_({FROZEN: self.frozen_table}) if self.frozen else initial

    @cached_property
    def frozen_table(self) -> Tensor:
        """Names, types, shapes and fingerprints of the weights that never train, as bytes."""
        return table_of(self.frozen)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        load_tensors(self.learner, {name: x for name, x in tensors.items() if not name.startswith(EXTRA)})
        if self.shared_extras:
            load_tensors(self.extra, {k.removeprefix(EXTRA): x for k, x in tensors.items() if k.startswith(EXTRA)})

    # --------------------------------------------------------------------------------------------------------- training

    def start_epoch(self, epoch: int, local_epochs: int) -> None:
        """Call :meth:`begin_round` at the first of a round's local epochs, and :meth:`begin_epoch` at each.

        :class:`~lit_pfl_callbacks.FederatedLoop` calls this, which knows where rounds begin.
        """
        self.epoch_ended = False
        if epoch == 0:
            if self.alone:  # nobody tells a site how many rounds there were besides its own
                self.completed_rounds = self.trainer.current_epoch // local_epochs
            self._shared.refuse_new()
            if self.reset_optimizer:
                for optimizer in self.trainer.optimizers:
                    optimizer.state.clear()
            if self.scheduler_counts == "rounds":
                set_schedules_to(self.completed_rounds, local_epochs, self.trainer)
            if self.remembers:
                weights = self.shared_weights().items()
                self.received = Received((name, weight.detach().clone()) for name, weight in weights)
            self.begin_round()
        self.begin_epoch(epoch, local_epochs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Let what has just been unfrozen travel, and train on a batch."""
        if unfrozen := self._shared.unfrozen():
            self.thaw(unfrozen)
        return super().training_step(batch, batch_idx)

    def end_epoch(self, epoch: int, local_epochs: int) -> None:
        """Call the learner's ``on_train_epoch_end``, and :meth:`end_round` at the last of a round's local epochs.

        A Trainer of one's own calls that hook after those of its callbacks, and so after the upload. But what is
        uploaded, and what is scored and saved while the client sleeps, has to be of an epoch that is over.
        """
        self.on_train_epoch_end()
        self.epoch_ended = True
        if epoch == local_epochs - 1:
            self.end_round()

    # ------------------------------------------------------------------------------------------------- under a Trainer

    def setup(self, stage: str) -> None:
        """See that a Trainer that fits this client takes part in a federation.

        Raises:
            ConfigError: when it has no :class:`~lit_pfl_callbacks.FederatedLoop`, an optimizer that the method does not
                know, or several processes that the method cannot do with.
        """
        name = type(self).__name__
        if stage == "fit" and "configure_optimizers" in vars(self):
            raise ConfigError(
                f"{name}.configure_optimizers was replaced, as LightningCLI does for --optimizer, and the method would "
                "not train as it says; make the optimizer in the module's own configure_optimizers."
            )
        if stage == "fit" and not any(isinstance(callback, FederatedLoop) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigError(
                f"{name} is a method and trains in rounds: give this Trainer callbacks=[FederatedLoop(link)], or fit "
                f"Federation({name}(...)) with all clients' data."
            )
        if stage == "fit" and self.needs_one_process and self.trainer.world_size > 1:
            raise ConfigError(one_process(self, self.needs_one_process))
        super().setup(stage)

    def configure_model(self) -> None:
        """Get ready for a Trainer that is given this client on its own, unless :meth:`configure` has been called."""
        if not hasattr(self, "_shared"):
            self.configure(ClientSpec(example=getattr(self.learner, "example_input_array", None)), alone=True)

    def configure_optimizers(self) -> Any:
        """Return what the learner's own returns."""
        with as_trained(self.learner):
            configured = configured_by(self.learner)
        optimizers = optimizers_in(configured) if self.learner.automatic_optimization is False else []
        for optimizer in optimizers or [single_optimizer(configured)]:
            if self.factorization is not None:
                self.factorization.shrink_after_steps(optimizer, self)
        if hasattr(self, "extra"):
            add_parameters(single_optimizer(configured), self.extra.parameters())
        return configured
