"""A federation is a LightningModule: a round is an epoch, a client is a batch."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lit_pfl.core import Client, ClientSpec
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.ledger import Ledger
from lit_pfl.core.participation import Participation, check_participation, participants, sampling_of
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.scores import mean_over_samples
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.frozen import share_frozen
from lit_pfl.engines.local import LocalEngine
from lit_pfl.engines.ranks import Ranks
from lit_pfl.engines.stacked import StackedEngine
from lit_pfl.engines.strategy import FederatedStrategy, ranks_of
from lit_pfl.engines.threads import choose_threads, computing, keep_freed_memory
from lit_pfl.engines.trainers import check_client_options, check_outer, client_trainer, planned_rounds
from lit_pfl.errors import ConfigError
from lit_pfl.federation.checkpointing import Checkpointing
from lit_pfl.federation.global_model import GlobalModel
from lit_pfl.federation.privacy import end_of_privacy
from lit_pfl.federation.scoring import Scoring
from lit_pfl.federation.server_step import ServerStep
from lit_pfl.federation.summary import summarize
from lit_pfl.lightning_internals import AtomicCheckpointIO, MemoryCheckpointIO, lent_trainer
from lit_pfl.randomness import Draws, check_share
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.protocols import Refusal
from lit_pfl_callbacks.tensors import tensors_of


class Federation(Scoring, Checkpointing):
    """Runs a method on all clients of a data module, under a stock Trainer.

    One epoch of that Trainer is a communication round, one batch a set of clients to train; ``max_epochs`` is the
    number of rounds. Loggers, checkpoints, resuming, early stopping and profilers are the Trainer's. Every client has
    a Trainer of its own, asleep inside :class:`~lit_pfl_callbacks.FederatedLoop` between its rounds.

    Logged at the end of every round: ``round``, ``train/loss``, ``val/acc``, ``val/acc_std``, ``val/acc_worst10``
    (mean of the worst tenth of clients), ``val/loss``, ``comm/up_bytes`` and ``comm/down_bytes`` of the round, and the
    cumulative ``comm/total_bytes``; after the last round ``test/acc`` and its like, of the model of the last round.
    Where there are no validation data, test data are scored every round, as ``test/acc``.

    Args:
        client: the method, as a prototype of all clients.
        local_epochs: epochs that a client trains in a round; by default as few as the method can do with
            (``Client.min_local_epochs``: one, but FedRep needs one for the head and one for the body).
        participation: who trains in a round: a share of the clients (0.1; 1 is all of them, and there is always at
            least one) or, above 1, their number (10). Drawn anew every round, from the seed and the round's number
            alone. Or an object that chooses: ``Bernoulli``, ``BySize``, ``Trace`` (a file), ``Share``, each also with
            clients that join late or leave for good.
        evaluate_clients: who is validated during a fit: a share of the clients or a number, the same ones every time,
            drawn from the seed. Tests are always of all clients.
        evaluate: which state of the personalized models is evaluated: ``before`` aggregation, as trained, or
            ``after``, as the clients would start the next round. A client that has never trained is evaluated as it
            would join now. Or ``global``: the one model of all, for methods that have one, on everybody's data at once;
            its scores stand under client -1.
        quorum: the share of a round's uploads that must be usable; a smaller round raises an UploadError.
        seed: seed of everything random: initial weights, participation, batches, augmentation. By default the one
            given to ``lightning.seed_everything``.
        threads: CPU threads to use for training and evaluation. By default one for small models, where more would wait
            for each other, and up to PyTorch's own number for larger ones.
        client_trainer: further options of every client's own Trainer, for example ``{"gradient_clip_val": 10}``;
            not those that the federation decides, such as ``max_epochs``. Every client gets copies of callbacks.
        if_not_saved: what to do when a checkpoint cannot be written, as on a full disk: ``stop``, or ``continue`` with
            a warning. The former checkpoint is whole either way.
        higher_is_better: whether higher values of a metric are better, by its name in a learner's ``log``, for metrics
            that do not say so themselves, as torchmetrics do. Without it their worst tenth is not known.
        engine: how clients train: ``local``, one after another, or ``stacked``, many in one step, which is faster where
            a device is not busy with one small network: for methods that minimise the loss of an image classifier, and
            networks without random layers. The numbers are the same but for rounding.
        stack_size: how many clients the stacked engine trains at once.
        max_update_norm: largest Euclidean norm of an update, over all its floating-point tensors; a longer one is
            refused. To shorten long updates instead, see :class:`~lit_pfl.core.robust.NormClipping`. Default: any.
        privacy: differential privacy of clients, see :class:`~lit_pfl.core.privacy.ClientPrivacy`. Default: none.

    Attributes:
        clients: the clients by id, once set up; in a run of several processes those of this one.
        coordinator: the server's side.
        rows: the scores of the latest evaluation.

    Raises:
        ConfigError: for options that do not fit the data or the Trainer.

    Example::

        trainer = L.Trainer(max_epochs=100)
        trainer.fit(Federation(SimFed(), local_epochs=1), datamodule=CIFAR10(num_clients=20, permute_labels=True))
    """

    def __init__(
        self,
        client: Client,
        local_epochs: PositiveInt | None = None,
        participation: float | Participation = 1.0,
        evaluate: Literal["before", "after", "global"] = "before",
        quorum: float = 0.5,
        seed: NonNegativeInt | None = None,
        threads: PositiveInt | None = None,
        client_trainer: dict[str, Any] | None = None,
        if_not_saved: Literal["stop", "continue"] = "stop",
        evaluate_clients: float = 1.0,
        higher_is_better: dict[str, bool] | None = None,
        engine: Literal["local", "stacked"] = "local",
        stack_size: PositiveInt = 32,
        max_update_norm: PositiveFloat | None = None,
        privacy: ClientPrivacy | None = None,
    ) -> None:
        super().__init__(higher_is_better or {})
        if not isinstance(client, Client):
            name = getattr(client, "__name__", type(client).__name__)
            raise ConfigError(f"{name} is no method; give one around it: Federation(FedAvg(learner={name}())).")
        check_participation(participation)
        check_share("federation.evaluate_clients", evaluate_clients)
        check_client_options(client_trainer or {})
        if not 0 <= quorum <= 1:
            raise ConfigError(f"federation.quorum={quorum}: give a share from 0 to 1.")
        if stack_size < 1:
            raise ConfigError(f"federation.stack_size={stack_size}: give 1 or more.")
        if max_update_norm is not None and not max_update_norm > 0:
            raise ConfigError(f"federation.max_update_norm={max_update_norm}: give a number above 0.")
        for name, given, choices in (
            ("evaluate", evaluate, ("before", "after", "global")),
            ("if_not_saved", if_not_saved, ("stop", "continue")),
            ("engine", engine, ("local", "stacked")),
        ):
            if given not in choices:
                raise ConfigError(f"federation.{name}={given}: choose {', '.join(choices)}.")
        self.automatic_optimization = False
        # Not a submodule: a LightningModule hands its own Trainer down to those.
        self.__dict__["prototype"] = client
        # plain numbers, since a checkpoint has no others: the command line gives numbers of types of its own
        self.local_epochs = int(local_epochs or client.min_local_epochs)
        self.participation = participation
        self.evaluate_clients = evaluate_clients
        self.evaluate = evaluate
        self.quorum, self.max_update_norm, self.privacy = quorum, max_update_norm, privacy
        self.seed = None if seed is None else int(seed)
        self.threads = threads
        self.client_trainer = client_trainer or {}
        self.if_not_saved = if_not_saved
        self.clients = {}
        self.stacked, self.stack_size = engine == "stacked", int(stack_size)
        self._given_seed = self.seed
        self._asked_to_stop = False

    # ------------------------------------------------------------------------------------------------------ setting up

    def configure_callbacks(self) -> list[L.Callback]:
        """See that the Trainer's options suit a federation; of all hooks the one before Lightning's own checks."""
        check_outer(self.trainer)
        return []

    def setup(self, stage: str) -> None:
        """Build the clients and the server, once."""
        if not isinstance(self.trainer.strategy, FederatedStrategy | SingleDeviceStrategy):
            raise ConfigError(
                f"trainer.strategy: {type(self.trainer.strategy).__name__} trains copies of one model, one in each "
                "process; give strategy=federated, which gives each some of the clients, or leave it out."
            )
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = AtomicCheckpointIO(self.if_not_saved)
        data, device = self.data, self.trainer.strategy.root_device
        self._meet(ranks_of(self.trainer))
        if self.clients and data is not self._made_with:
            self._refuse_other_data(data)
        data.participants, data.validated = self.participants, self.validated
        data.as_many_each_round = not isinstance(self.participation, Participation)
        data.all_at_once = self.ranks.size > 1 or self.stacked  # processes meet once a round, and stacks are to be full
        if not self.clients and self.ranks.size > 1 and device.type == "cpu":
            data.hold_in(self.ranks.one_copy)
        data.move_to(device)
        if not self.clients:
            check_participation(self.participation, data.clients)
            check_share("federation.evaluate_clients", self.evaluate_clients, len(data.clients))
            if self.seed is None:
                self.seed = self.ranks.of_first(torch.initial_seed())
            keep_freed_memory()
            self.draws = Draws(self.seed)
            self._start_alike()
            own = self.ranks.dealt({client: data.client(client).num_samples for client in data.clients})
            self._made_with = data
            for id in own:
                self.clients[id] = self._build(id)
                self._place_on(device, id)  # before the server takes its first tensors from them
            self.engine = self._make_engine()
            self.coordinator = Coordinator(self._make_server(), self.quorum, self.ranks, self.max_update_norm)
            self.coordinator.start({k: self._joined(k) for k in self.clients})
            self.coordinator.protect(self.privacy, sampling_of(self.participation, len(data.clients)), self.seed)
            self.ranks.settle([tensor for client in self.clients.values() for tensor in client.shared_tensors()])
            if self.evaluate == "global":
                self.__dict__["global_model"] = GlobalModel(self._fresh(data.clients[0]), self.coordinator)
            client = next(iter(self.clients.values()))
            batch_size = getattr(data, "batch_size", None)
            stacked = min(self.stack_size, len(self.clients)) if self.stacked else 1
            # whatever is given, since this is the first look whether the learner can do with the data
            threads = choose_threads(client.learner, client.spec.example, batch_size, stacked)
            self.threads = self.threads or self.ranks.of_first(threads)  # others may add up in another order
        self._place_on(device, *self.clients)
        if hasattr(self, "global_model"):
            self.global_model.client.place_on(device)
        summarize(self.trainer, self.clients, len(data.clients))

    def _meet(self, ranks: Ranks) -> None:
        """Take note of the processes of the run."""
        if self.clients and ranks.size != self.ranks.size:
            raise ConfigError(
                f"trainer.devices: this federation's clients are spread over {self.ranks.size} processes, and the "
                f"Trainer has {ranks.size}; give the same number, or a new Federation and ckpt_path."
            )
        self.ranks = ranks
        if self.clients:
            self.coordinator.ranks = ranks

    def _make_engine(self) -> LocalEngine:
        arguments: Any = self.clients, self.seed, self.local_epochs, self._make_trainer
        return StackedEngine(*arguments, size=self.stack_size) if self.stacked else LocalEngine(*arguments)

    def _place_on(self, device: torch.device, *clients: int) -> None:
        first = next(iter(self.clients.values()))
        for client in clients:
            self.clients[client].place_on(device)
            share_frozen(self.clients[client], first)

    def _joined(self, client: int) -> ClientInfo:
        with lent_trainer(self.clients[client], self.trainer):  # a learner may ask for one in its steps
            return ClientInfo(self.data.client(client).num_samples, self.clients[client].joining())

    def _build(self, client: int) -> Client:
        module = self._fresh(client)
        module.data = self.data.client(client)
        return module

    def _fresh(self, client: int) -> Client:
        spec = ClientSpec.of(client, self.data.client(client), self.local_epochs)
        with self.draws.torch("weights"):  # the same stream for all: common initial weights
            return self.prototype.build(spec)

    def _make_server(self) -> Any:
        first = self.data.clients[0]
        client = self.clients[first] if first in self.clients else self._build(first)
        client.place_on(self.trainer.strategy.root_device)
        with self.draws.torch("server"):
            return client.configure_server()

    def _start_alike(self) -> None:
        """Take process 0's weights for a learner that was given: a script need not have drawn the same ones again."""
        learner = self.prototype.learner
        if self.ranks.size > 1 and learner is not None:
            lazy = UninitializedParameter | UninitializedBuffer
            tensors = [tensor for tensor in tensors_of(learner).values() if not isinstance(tensor, lazy)]
            first = self.ranks.exchange(tensors=tensors)[0].tensors
            with torch.no_grad():
                for tensor, value in zip(tensors, first, strict=True):
                    tensor.copy_(value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the server's step as an optimizer, so that a Trainer counts rounds as it counts steps."""
        return ServerStep()

    # ---------------------------------------------------------------------------------------------------------- rounds

    def participants(self, completed: int) -> list[int]:
        """Return the ids of the clients that train in the round after ``completed`` rounds."""
        return participants(self.participation, completed, self._samples, self.draws)

    @cached_property
    def _samples(self) -> dict[int, int]:
        """Numbers of training samples of all clients, by id."""
        return {client: self.data.client(client).num_samples for client in self.data.clients}

    def validated(self) -> list[int]:
        """Return the ids of the clients that are evaluated on validation data: in a fit those of a sample."""
        share = self.evaluate_clients if self.trainer.state.fn == "fit" else 1.0
        return self.draws.choose(self.data.clients, share, "evaluation")

    def on_train_epoch_start(self) -> None:
        """Begin a round."""
        end_of_privacy(self.trainer, self.coordinator, begins=True)
        self.engine.losses.clear()
        self._validated = {}
        self.coordinator.begin_round()

    def training_step(self, batch: list[int], batch_idx: int) -> None:
        """Train a set of clients; after the last one of the round, let the server do its step."""
        # Clients choose their own precision. The cache would survive their optimizer steps, so it is off.
        with computing(self.threads), torch.autocast(self.device.type, enabled=False, cache_enabled=False):
            try:
                self.coordinator.train(self.engine, [client for client in batch if self._trains(client)])
                if self.trainer.is_last_batch:
                    optimizer = self.optimizers()
                    assert not isinstance(optimizer, list)
                    optimizer.step(closure=self.coordinator.end_round)
            except BaseException:
                self.engine.abort()
                raise

    def _trains(self, client: int) -> bool:
        return client in self.clients and client not in self.engine.left

    def _make_trainer(self, client: Client, loop: FederatedLoop, memory: MemoryCheckpointIO) -> L.Trainer:
        assert self.seed is not None
        planned = planned_rounds(self.trainer)
        return client_trainer(client, self.trainer, self.client_trainer, loop, memory, planned, self.seed)

    def on_train_batch_end(self, outputs: Any, batch: list[int], batch_idx: int) -> None:
        """Put a stop off until the round is over: half a round is nothing that could be kept, scored or resumed."""
        if self.trainer.should_stop and not self.trainer.is_last_batch:
            self.trainer.should_stop, self._asked_to_stop = False, True

    def on_train_epoch_end(self) -> None:
        """Log the round."""
        if self._asked_to_stop:
            self.trainer.should_stop, self._asked_to_stop = True, False
        if self.clients.keys() == self.engine.left:
            rank_zero_info("All clients have ended their training; the federation ends.")
            self.trainer.should_stop = True
        spent = end_of_privacy(self.trainer, self.coordinator)
        # A callback may have stopped one of several processes only; they end together.
        self.trainer.should_stop = any(told.words for told in self.ranks.exchange(self.trainer.should_stop))
        losses = self.ranks.merged(self.engine.losses).values()
        metrics = {"train/loss": mean_over_samples(losses), **self._validated, **self.traffic.of_round(), **spent}
        self._log(metrics)
        self.round_log.write(self.trainer.loggers, self.coordinator.round, metrics)

    @property
    def traffic(self) -> Ledger:
        """Bytes sent so far: ``total``, and ``clients``, by id up and down."""
        return self.coordinator.ledger

    @property
    def refused(self) -> list[Refusal]:
        """The uploads of the latest round that were refused, and why."""
        return self.coordinator.refusals

    @property
    def seconds(self) -> Mapping[str, float]:
        """What this process has spent on the server's side so far: ``aggregate`` and ``link``."""
        return self.coordinator.seconds

    def mixing(self) -> tuple[list[int], torch.Tensor] | None:
        """Whose tensors are in whose next reply, see :meth:`~lit_pfl.Server.mixing`."""
        return self.coordinator.server.mixing()

    def on_fit_end(self) -> None:
        """Test the models of the last round, and end the clients' fits."""
        if not self.trainer.fast_dev_run and self.trainer.limit_test_batches:  # type: ignore[attr-defined]
            self._test_last_round()
        self.engine.stop()
        self._place_on(self.device, *self.clients)
