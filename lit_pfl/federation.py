"""A federation is a LightningModule: a round is an epoch, a client is a batch."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lit_pfl.checkpoint import AtomicCheckpointIO, MemoryCheckpointIO
from lit_pfl.client import Client, Task, evaluating
from lit_pfl.coordinator import Coordinator, Ledger
from lit_pfl.data import ClientData, FederatedDataModule
from lit_pfl.errors import ConfigError
from lit_pfl.lean import make_lean
from lit_pfl.links import LocalHub, undisturbed
from lit_pfl.module import NoProfiler, QuickModule
from lit_pfl.server import ClientInfo
from lit_pfl_callbacks import FederatedLoop

#: what a client's own Trainer needs of a checkpoint to go on
TRAINER_STATE = ("state_dict", "loops", "optimizer_states", "lr_schedulers", "callbacks")


class Row(NamedTuple):
    """One client's score, a line of ``clients.csv``."""

    client: int
    round: int
    split: str
    model: str
    n: int
    acc: float
    loss: float


class Federation(QuickModule):
    """Runs a method on all clients of a data module, under a stock Trainer.

    One epoch of that Trainer is a communication round, one batch a set of clients to train; ``max_epochs`` is the
    number of rounds. Loggers, checkpoints, resuming, early stopping and profilers are the Trainer's. Every client has
    a Trainer of its own, asleep inside :class:`~lit_pfl_callbacks.FederatedLoop` between its rounds.

    Logged at the end of every round: ``round``, ``train/loss``, ``val/acc``, ``val/acc_std``, ``val/acc_worst10``
    (mean of the worst tenth of clients), ``val/loss``, ``comm/up_bytes`` and ``comm/down_bytes`` of the round, and the
    cumulative ``comm/total_bytes``; after the last round ``test/acc`` and its like, of the model of the last round.

    Args:
        client: the method, as a pattern for all clients.
        local_epochs: epochs that a client trains in a round; by default as few as the method can do with
            (``Client.fewest_epochs``: one, but FedRep needs one for the head and one for the body).
        participation: who trains in a round: a share of the clients (0.1; 1 is all of them, and there is always at
            least one) or, above 1, their number (10). Drawn anew every round, from the seed and the round's number
            alone.
        evaluate: which state of the personalized models is evaluated: ``before`` aggregation, as trained, or
            ``after``, as the clients would start the next round.
        quorum: the share of a round's uploads that must be usable; a smaller round raises an UploadError.
        seed: seed of everything random: initial weights, participation, batches, augmentation. By default the one
            given to ``lightning.seed_everything``.
        threads: CPU threads to use for training and evaluation. By default one for small models, where more would wait
            for each other, and up to PyTorch's own number for larger ones.
        client_trainer: further options of every client's own Trainer, for example ``{"gradient_clip_val": 10}``.
        if_not_saved: what to do when a checkpoint cannot be written, as on a full disk: ``stop``, or ``continue`` with
            a warning. The former checkpoint is whole either way.

    Attributes:
        clients: the clients by id, once set up.
        coordinator: the server's side.
        rows: the scores of the latest evaluation.

    Raises:
        ConfigError: for options that do not fit the data or the Trainer.

    Example::

        trainer = L.Trainer(max_epochs=100)
        trainer.fit(Federation(SimFed(), local_epochs=1), datamodule=CIFAR10(num_clients=20, permute_labels=True))
    """

    pattern: Client
    clients: dict[int, Client]

    def __init__(
        self,
        client: Client,
        local_epochs: PositiveInt | None = None,
        participation: float = 1.0,
        evaluate: Literal["before", "after"] = "before",
        quorum: float = 0.5,
        seed: NonNegativeInt | None = None,
        threads: PositiveInt | None = None,
        client_trainer: dict[str, Any] | None = None,
        if_not_saved: Literal["stop", "continue"] = "stop",
    ) -> None:
        super().__init__()
        if participation <= 0 or (participation > 1 and participation != int(participation)):
            raise ConfigError(
                f"federation.participation={participation}: give a share above 0 and up to 1, "
                "or a whole number of clients."
            )
        if not 0 <= quorum <= 1:
            raise ConfigError(f"federation.quorum={quorum}: give a share from 0 to 1.")
        self.automatic_optimization = False
        # Not a submodule: a LightningModule hands its own Trainer down to those.
        self.__dict__["pattern"] = client
        self.local_epochs = local_epochs or client.fewest_epochs
        self.participation = participation
        self.evaluate = evaluate
        self.quorum = quorum
        self.seed = seed
        self.threads = threads
        self.client_trainer = client_trainer or {}
        self.if_not_saved = if_not_saved
        self.clients = {}
        self.rows: list[Row] = []
        self._restored: dict[int, dict[str, Any]] = {}  # states of clients' Trainers that are yet to be restarted
        self._uploads: dict[int, Any] = {}
        self._train_loss = (0.0, 0)  # sum over samples, number of samples
        self._validated: dict[str, float] = {}
        self._named: set[str] = set()
        self._given_seed = seed
        self._asked_to_stop = False

    # ------------------------------------------------------------------------------------------------------ setting up

    @property
    def data(self) -> FederatedDataModule:
        """The data module that the Trainer was given."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):
            raise ConfigError(
                "A Federation needs a federated data module: "
                "trainer.fit(federation, datamodule=CIFAR10(num_clients=20))."
            )
        return data

    def setup(self, stage: str) -> None:
        """Build the clients and the server, once."""
        if self.trainer.world_size > 1:
            raise ConfigError(
                f"The Trainer spans {self.trainer.world_size} processes; a federation in one process needs "
                "trainer.devices=1."
            )
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = AtomicCheckpointIO(self.if_not_saved)
        data, device = self.data, self.trainer.strategy.root_device
        data.move_to(device)
        if not self.clients:
            if self.participation > len(data.clients):
                raise ConfigError(
                    f"federation.participation={self.participation:g} is more than the {len(data.clients)} clients."
                )
            if self.seed is None:
                self.seed = torch.initial_seed()
            self.clients = {client: self._build(client) for client in data.clients}
            self.hub = LocalHub(self.seed)
            self.coordinator = Coordinator(self._make_server(), self.quorum)
            self.coordinator.start({k: ClientInfo(self._num_samples(k), c.upload()) for k, c in self.clients.items()})
            if self.threads is None:
                self.threads = self._choose_threads()
        for client in self.clients.values():
            client.settle(device)

    def _build(self, client: int) -> Client:
        data = self.data.client(client)
        task = Task(client, data.channels, data.image_size, data.num_classes, data.labels_agree, self.local_epochs)
        with self._drawing("weights"):  # the same stream for all: common initial weights
            module = self.pattern.build(task)
        module.data = data
        return module

    def _make_server(self) -> Any:
        with self._drawing("server"):
            return next(iter(self.clients.values())).configure_server()

    @contextmanager
    def _drawing(self, what: str) -> Iterator[None]:
        """Draw from PyTorch's default generator as seeded for one purpose, then put it back."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self._generator(what).integers(2**63)))
            yield

    def _generator(self, *purpose: str | int) -> np.random.Generator:
        words = [w if isinstance(w, int) else int.from_bytes(w.encode(), "big") for w in purpose]
        return np.random.default_rng([self.seed or 0, *words])

    def _num_samples(self, client: int) -> int:
        return len(self.clients[client].data.train.dataset)

    def _choose_threads(self) -> int:
        """Count one batch's work: a further thread for every 20 million operations of a forward pass."""
        client = next(iter(self.clients.values()))
        images = torch.zeros(self.data.batch_size, client.task.channels, client.task.image_size, client.task.image_size)
        with FlopCounterMode(display=False) as counter, evaluating(client), torch.no_grad():
            client(images)
        return max(1, min(torch.get_num_threads(), round(counter.get_total_flops() / 2e7)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the server's step as an optimizer, so that a Trainer counts rounds as it counts steps."""
        return _ServerStep()

    # ---------------------------------------------------------------------------------------------------------- rounds

    def participants(self, completed: int) -> list[int]:
        """Return the ids of the clients that train in the round after ``completed`` rounds."""
        ids = list(self.clients)
        count = round(self.participation * len(ids)) if self.participation <= 1 else int(self.participation)
        if count >= len(ids):
            return ids
        chosen = self._generator("participation", completed).choice(len(ids), max(1, count), replace=False)
        return [ids[i] for i in sorted(chosen)]

    def on_train_epoch_start(self) -> None:
        """Begin a round."""
        self._uploads = {}
        self._train_loss = (0.0, 0)
        self._validated = {}
        self.coordinator.begin_round()

    def training_step(self, batch: list[int], batch_idx: int) -> None:
        """Train a set of clients; after the last one of the round, let the server do its step."""
        # Clients choose their own precision. The cache would survive their optimizer steps, so it is off.
        with self._computing(), torch.autocast(self.device.type, enabled=False, cache_enabled=False):
            try:
                for client in batch:
                    self._train(client)
                if self.trainer.is_last_batch:
                    optimizer = self.optimizers()
                    assert not isinstance(optimizer, list)
                    optimizer.step(closure=lambda: self.coordinator.collect(self._uploads))
            except BaseException:
                self.hub.abort()
                raise

    def _train(self, client: int) -> None:
        if client not in self.hub:
            self._add_fit(client)
            self.hub.start(client)
        self._uploads[client] = self.hub.resume(client, self.coordinator.reply(client))
        module = self.clients[client]
        for parameter in module.parameters():
            parameter.grad = None  # a sleeping client keeps no gradients
        loss, n = module.pop_train_loss()
        self._train_loss = (self._train_loss[0] + loss, self._train_loss[1] + n)

    def _add_fit(self, client: int) -> None:
        module = self.clients[client]
        loop = FederatedLoop(self.hub.link, every_n_epochs=self.local_epochs, num_samples=self._num_samples(client))
        memory = MemoryCheckpointIO()
        try:
            with undisturbed():
                trainer = L.Trainer(**self._client_trainer_options(loop, memory))
        except TypeError as error:
            raise ConfigError(f"federation.client_trainer: {error}") from None
        make_lean(trainer, module, loop)
        restored = self._restored.pop(client, None)
        if restored is not None:
            memory.checkpoint = restored
        path, batches = None if restored is None else "memory", module.training_data()
        self.hub.add(client, lambda: trainer.fit(module, batches, ckpt_path=path, weights_only=False))

    def _client_trainer_options(self, loop: FederatedLoop, memory: MemoryCheckpointIO) -> dict[str, Any]:
        device = self.trainer.strategy.root_device
        options: dict[str, Any] = {
            "accelerator": {"cuda": "gpu"}.get(device.type, device.type),
            "devices": [device.index] if device.type == "cuda" else 1,
            "precision": self.trainer.precision,
            "deterministic": torch.are_deterministic_algorithms_enabled() or None,
            "max_epochs": -1,
            "profiler": NoProfiler(),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **self.client_trainer,
        }
        options["callbacks"] = [*options.get("callbacks", []), loop]
        options["plugins"] = [*options.get("plugins", []), memory]
        return options

    @contextmanager
    def _computing(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def on_train_batch_end(self, outputs: Any, batch: list[int], batch_idx: int) -> None:
        """Put a stop off until the round is over: half a round is nothing that could be kept, scored or resumed."""
        if self.trainer.should_stop and not self.trainer.is_last_batch:
            self.trainer.should_stop, self._asked_to_stop = False, True

    def on_train_epoch_end(self) -> None:
        """Log the round."""
        if self._asked_to_stop:
            self.trainer.should_stop, self._asked_to_stop = True, False
        traffic = self.traffic
        loss, n = self._train_loss
        metrics: dict[str, float] = {"train/loss": loss / n if n else math.nan}
        metrics |= self._validated
        metrics |= {"comm/up_bytes": traffic.up, "comm/down_bytes": traffic.down, "comm/total_bytes": traffic.total}
        self._log(metrics)
        self._write(metrics)

    def _log(self, metrics: dict[str, float], write: bool = False) -> None:
        """Tell the Trainer and its callbacks; the loggers only if asked to."""
        self._name_x_axis(metrics)
        metrics = {"round": self.coordinator.round, **metrics}
        # as tensors, since byte counts do not fit the 32 bits that Lightning gives to plain numbers
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        self.log_dict(values, logger=None if write else False, batch_size=1)

    def _write(self, metrics: dict[str, float]) -> None:
        """Write to the loggers at once: what a checkpoint holds must have been logged before."""
        self._name_x_axis(metrics)
        for logger in self.trainer.loggers:
            logger.log_metrics({"round": self.coordinator.round, **metrics}, step=self.coordinator.round)

    def _name_x_axis(self, metrics: dict[str, float]) -> None:
        """Tell W&B to draw over rounds; name by name, since it resolves overlapping patterns at random."""
        new = metrics.keys() - self._named
        self._named |= new
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbLogger):
                for name in sorted(new):
                    logger.experiment.define_metric(name, step_metric="round")

    def on_fit_end(self) -> None:
        """Test the models of the last round, and end the clients' fits."""
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._test_last_round()
        self._restored |= {client: self._client_state(client) for client in self.clients if client in self.hub}
        self.hub.stop()
        for client in self.clients.values():
            client.to(self.device)

    # ------------------------------------------------------------------------------------------------------ evaluation

    def on_validation_epoch_start(self) -> None:
        """Begin an evaluation."""
        self.rows = []

    def validation_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their validation data."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Log means over clients; to the loggers they go with the rest of the round."""
        if not self.trainer.sanity_checking:
            self._validated = summary(self.rows, "val")
            self._log(self._validated, write=self.trainer.state.fn != "fit")  # in a fit, with the rest of the round

    def on_test_epoch_start(self) -> None:
        """Begin an evaluation."""
        self.rows = []

    def test_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their test data."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """Log means over clients."""
        self._log(summary(self.rows, "test"), write=True)

    def predict_step(self, batch: list[int], batch_idx: int) -> dict[int, Tensor]:
        """Return the logits (n, classes) of every client of the set on its test data, by client id."""
        logits: dict[int, Tensor] = {}
        for client in batch:
            with self._as_evaluated(client) as module, evaluating(module), torch.no_grad():
                batches = [module.predict(images) for images, _ in self.data.client(client).test]
            if batches:  # a client may have no test samples
                logits[client] = torch.cat(batches)
        return logits

    @property
    def traffic(self) -> Ledger:
        """Bytes sent so far: ``total``, and ``clients``, by id up and down."""
        return self.coordinator.ledger

    def _evaluate(self, clients: list[int], split: Literal["val", "test"]) -> None:
        with self._computing():
            for client in clients:
                with self._as_evaluated(client) as module:
                    score = module.score(getattr(self.data.client(client), split))
                self.rows.append(
                    Row(client, self.coordinator.round, split, self.evaluated_model, *vars(score).values())
                )

    @property
    def evaluated_model(self) -> str:
        """What is evaluated, for ``clients.csv``."""
        return f"personalized:{self.evaluate}"

    @contextmanager
    def _as_evaluated(self, client: int) -> Iterator[Client]:
        """Show a client as it is to be evaluated; leave it as it was."""
        module = self.clients[client]
        if self.evaluate == "before":
            yield module
            return
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.download(self.coordinator.server.reply(client))
        try:
            yield module
        finally:
            module.load_state_dict(before)

    def _test_last_round(self) -> None:
        self.rows = []
        with torch.no_grad():
            self._evaluate(list(self.clients), "test")
        metrics = summary(self.rows, "test")
        self._write(metrics)
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the whole federation: clients with optimizers, schedulers and random streams, server, byte counts."""
        checkpoint["federation"] = {
            **self._identity(),
            "coordinator": self.coordinator.state_dict(),
            "clients": {client: self._client_state(client) for client in self.clients},
            "streams": {client: stream.state_dict() for client, stream in self.hub.streams.items()},
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree in, first of all: what made the run, and whose data is whose."""
        return {
            "method": type(self.pattern).__name__,
            "local_epochs": self.local_epochs,
            "participation": self.participation,
            "seed": self.seed,
            "data": self._fingerprints,
        }

    @cached_property
    def _fingerprints(self) -> dict[int, str]:
        return {client: fingerprint(module.data) for client, module in self.clients.items()}

    def _client_state(self, client: int) -> dict[str, Any]:
        module = self.clients[client]
        if client in self.hub:
            module.trainer.save_checkpoint("memory", weights_only=False)
            memory = module.trainer.strategy.checkpoint_io
            assert isinstance(memory, MemoryCheckpointIO)
            return memory.checkpoint
        return self._restored.get(client, {"state_dict": module.state_dict()})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the whole federation.

        Raises:
            ConfigError: when the checkpoint is of another run, or not whole. It names the first thing that differs.
        """
        try:
            state = checkpoint["federation"]
            self._refuse_another_run(state)
            self._take_over(state)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ConfigError(f"The checkpoint is no federation's, or not whole: {error!r}.") from error

    def _refuse_another_run(self, state: dict[str, Any]) -> None:
        own = self._identity()
        names = ["method"]
        if self.trainer.state.fn == "fit":  # the rest makes no difference to a model that is only scored
            names += ["local_epochs", "participation"] + ([] if self._given_seed is None else ["seed"])
        for name in names:
            if state[name] != own[name]:
                option = "model" if name == "method" else f"federation.{name}"
                raise ConfigError(f"{option}: the checkpoint is of a run with {state[name]}, not {own[name]}.")
        if state["clients"].keys() != self.clients.keys():
            raise ConfigError(
                f"data: the checkpoint holds {len(state['clients'])} clients and the data has {len(self.clients)}; "
                "give the options of the run that wrote it."
            )
        for client, module in self.clients.items():
            if state["data"][client] != own["data"][client]:
                raise ConfigError(
                    f"data: client {client} had other samples, or other labels, in the run that wrote the checkpoint; "
                    "give its data.seed, data.partition and so on."
                )
            shapes, saved = ({k: tuple(t.shape) for k, t in tensors.items()} for tensors in (
                module.state_dict(), state["clients"][client]["state_dict"]))  # fmt: skip
            for name in [*shapes, *saved]:
                if shapes.get(name) != saved.get(name):
                    raise ConfigError(
                        f"model: the checkpoint is of another network: client {client}'s tensor {name!r} is "
                        f"{saved.get(name, 'not there')}, where this model's is {shapes.get(name, 'not there')}."
                    )

    def _take_over(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self.hub.seed = self.seed
        self.coordinator.load_state_dict(state["coordinator"])
        for client, own in state["clients"].items():
            self.clients[client].load_state_dict(own["state_dict"])
            if len(own) > 1:  # it has trained
                self._restored[client] = {name: own[name] for name in (*TRAINER_STATE, *own)}
                self.hub.stream(client).load_state_dict(state["streams"][client])


def fingerprint(data: ClientData) -> str:
    """Return a hash of which samples a client trains on and is scored on, under which labels, and of their shape."""
    digest = hashlib.sha256(repr((data.channels, data.image_size, data.num_classes, data.labels_agree)).encode())
    for batches in (data.train, data.val, data.test):
        for tensor in (batches.dataset, batches.labels):
            digest.update(len(tensor).to_bytes(8, "big") + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


class _ServerStep(torch.optim.Optimizer):
    """Runs the closure it is given."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


def summary(rows: list[Row], split: str) -> dict[str, float]:
    """Summarise scores over clients, each client counting once; clients without samples do not count.

    Returns:
        ``{split}/acc``, its standard deviation ``acc_std`` over clients, ``acc_worst10``, the mean over the worst
        tenth of clients (at least one), and ``{split}/loss``.
    """
    scored = [row for row in rows if row.split == split and row.n]
    if not scored:
        return {}
    acc = sorted(row.acc for row in scored)
    return {
        f"{split}/acc": fmean(acc),
        f"{split}/acc_std": pstdev(acc),
        f"{split}/acc_worst10": fmean(acc[: math.ceil(len(acc) / 10)]),
        f"{split}/loss": fmean(row.loss for row in scored),
    }
