"""A federation is a LightningModule: a round is an epoch, a client is a batch."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import methodcaller
from typing import Any, Literal, TypeVar

import lightning as L
import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_pfl.core import Client
from lit_pfl.core.asynchronous import Asynchronous, InTraining
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.deadline import Deadline
from lit_pfl.core.ledger import Ledger
from lit_pfl.core.participation import Participation, check_participation, sampling_of
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.scores import Row, mean_over_samples
from lit_pfl.data import FederatedDataModule, PerClient, has_batches, labels_of, samples_of, targets_of
from lit_pfl.data.loaders import goes_on
from lit_pfl.engines import Engine, Local, Work
from lit_pfl.engines.questions import predicted
from lit_pfl.engines.threads import ReportsBusyCores, choose_threads, computing, keep_freed_memory
from lit_pfl.engines.trainers import check_client_options
from lit_pfl.engines.validation import monitors
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.federation.checkpoint import (
    OPTIONAL,
    Fingerprints,
    options_of,
    refuse_other_data,
    resume,
    save_whole,
    saved,
    sends_of,
    trained_in,
)
from lit_pfl.federation.options import check_options, check_together
from lit_pfl.federation.scoring import Scores
from lit_pfl.federation.timetable import Timetable
from lit_pfl.federation.trainer import (
    EndsFits,
    OneAtATime,
    RequeuesBetweenRounds,
    ServerStep,
    check_outer,
    described,
    end_of_privacy,
    leave_to_clients,
    refuse_misspelt,
    refuse_processes,
    summarize,
)
from lit_pfl.lightning_internals import QuickModule
from lit_pfl.randomness import Draws, check_share
from lit_pfl_callbacks.dashboard import RoundLog
from lit_pfl_callbacks.protocols import Refusal
from lit_pfl_callbacks.rank_zero import be_rank_zero

T = TypeVar("T")


class Federation(QuickModule):
    """Runs a method on all clients of a data module, under a stock Trainer.

    One epoch of that Trainer is a communication round, one batch a set of clients to train; ``max_epochs`` is the
    number of rounds. Loggers, checkpoints, resuming, early stopping and profilers are the Trainer's. Every client has
    a Trainer of its own, paused inside :class:`~lit_pfl_callbacks.FederatedLoop` between its rounds.

    Logged at the end of every round: ``round``, ``train/loss``, ``val/acc``, ``val/acc_std``, ``val/acc_worst10``
    (mean of the worst 10 % of clients), ``val/loss``, ``comm/up_bytes`` and ``comm/down_bytes`` of the round, and the
    cumulative ``comm/total_bytes``; after the last round ``test/acc`` and its like, of the model of the last round.
    Where there are no validation data, test data are scored every round, as ``test/acc``.

    Args:
        client: the method, as a prototype of all clients.
        local_epochs: epochs that a client trains in a round; by default as few as the method can do with
            (``Client.min_local_epochs``: one, but FedRep needs one for the head and one for the body).
        participation: who trains in a round: a share of the clients (0.1; 1 is all of them, and there is always at
            least one) or, above 1, their number (10). Resampled every round, from the seed and the round's number
            alone. Or an object that chooses: ``Bernoulli``, ``BySize``, ``Trace`` (a file), ``Share``, each also with
            clients that join late or leave for good.
        evaluate_clients: who is validated during a fit: a share of the clients or a number, the same ones every time,
            drawn from the seed. Tests are always of all clients.
        evaluate: which state of the personalized models is evaluated: ``before`` aggregation, as trained, or
            ``after``, as the clients would start the next round. A client that has never trained is evaluated as it
            would join now. Or ``global``: the global model, for methods that have one, on everybody's data at once;
            its scores stand under client -1.
        keep_trained: whether models are kept, and tested, as their clients have trained them. False: they are scored
            after aggregation only, and files of clients that are on disk (``engine.awake``) are without what the
            server's next reply replaces: of FedAvg all weights. ``evaluate`` must be ``after`` or ``global``.
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
            that do not say so themselves, as torchmetrics do. Without it their worst 10 % is not known.
        engine: where clients train: ``Local``, one after another in this process; ``Stacked``, many in one step, which
            is faster where a device is not busy with one small network: for methods that minimize the loss of an image
            classifier, and networks without random layers; the numbers are the same except for rounding; ``Ray``, in
            worker processes, on one machine or a cluster. By default ``Local``.
        max_update_norm: largest Euclidean norm of an update, over all its floating-point tensors; a longer one is
            refused. To shorten long updates instead, see :class:`~lit_pfl.core.robust.NormClipping`. Default: any.
        privacy: differential privacy of clients, see :class:`~lit_pfl.core.privacy.ClientPrivacy`. Default: none.
        deadline: simulated time after which a round ends without the clients that are too slow, see
            :class:`~lit_pfl.core.deadline.Deadline`; ``simulated_seconds`` is then logged. Default: rounds wait for
            all.
        asynchronous: take the server's step whenever some uploads have come, in simulated time:
            :class:`~lit_pfl.core.asynchronous.FedBuff` or :class:`~lit_pfl.core.asynchronous.FedAsync`. A round is then
            such a step, and ``participation`` how many clients train at the same time. Default: rounds wait.

    Clients that the data hold out of training (``data.new_clients``) are scored in a test, on their own test data: as
    they would join now, from what the server would send them (``new/aggregated/acc``), and after a round of training
    of their own (``new/trained/acc``). In ``clients.csv`` their split is ``new``.

    Attributes:
        coordinator: the server's side.
        engine: a copy of the engine that was given, with the clients once set up.

    Raises:
        ConfigError: for options that do not fit the data or the Trainer.

    Example::

        trainer = L.Trainer(max_epochs=100)
        trainer.fit(Federation(SimFed(), local_epochs=1), datamodule=CIFAR10(num_clients=20, permute_labels=True))
    """

    prototype: Client
    coordinator: Coordinator

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
        engine: Engine | None = None,
        max_update_norm: PositiveFloat | None = None,
        privacy: ClientPrivacy | None = None,
        deadline: Deadline | None = None,
        asynchronous: Asynchronous | None = None,
        keep_trained: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(client, Client):
            if isinstance(client, type) and issubclass(client, Client):
                raise ConfigError(
                    f"{client.__name__} is a class; make a method of it: Federation({client.__name__}(...))."
                )
            name = getattr(client, "__name__", type(client).__name__)
            raise ConfigError(f"{name} is not a method; pass one around it: Federation(FedAvg(learner={name}())).")
        check_client_options(client_trainer or {})
        self.automatic_optimization = False
        # Not a submodule: a LightningModule hands its own Trainer down to those.
        self.__dict__["prototype"] = client
        self.local_epochs = client.min_local_epochs if local_epochs is None else local_epochs
        self.participation = participation
        self.evaluate_clients = evaluate_clients
        self.evaluate, self.keep_trained = evaluate, keep_trained
        self.quorum, self.max_update_norm = quorum, max_update_norm
        self.deadline, self.asynchronous = deadline, asynchronous
        self.seed, self.threads = seed, threads
        self.client_trainer = client_trainer or {}
        self.if_not_saved = if_not_saved
        # what was given is as good for another run
        self.privacy = copy.deepcopy(privacy)
        check_options_of(self, "federation")
        check_options(participation, evaluate_clients, evaluate, keep_trained, quorum, engine, threads)
        check_together(privacy, deadline, asynchronous)
        # plain numbers, since a checkpoint has no others: the command line gives numbers of types of its own
        self.local_epochs = int(self.local_epochs)
        self.seed = None if seed is None else int(seed)
        self._given_engine = engine or Local()
        self.engine = copy.deepcopy(self._given_engine)
        self._directions = higher_is_better or {}
        self.round_log = RoundLog()
        self._work: Work | None = None
        self._losses: list[tuple[float, int]] = []
        self._validated: dict[str, float] = {}
        self._given_seed = self.seed
        self._asked_to_stop = False
        self._begun_rounds = self._earlier_rounds = 0  # of all fits, and of those by other Trainers

    def __getstate__(self) -> dict[str, Any]:
        if self._work is not None:
            raise TypeError(
                "A Federation that has clients cannot be copied or pickled, since their fits are running; save a "
                "checkpoint, and make another Federation that continues from it."
            )
        return super().__getstate__()

    # ------------------------------------------------------------------------------------------------------ setting up

    def configure_callbacks(self) -> list[L.Callback]:
        """See that the Trainer's options suit a federation; of all hooks the one before Lightning's own checks."""
        check_outer(self.trainer)
        refuse_processes(self.trainer)
        be_rank_zero()  # of the tasks that srun has started, each may run a federation
        own = [OneAtATime(), EndsFits(self.engine), ReportsBusyCores()]
        # those of a former fit leave before Lightning tells that it replaces them
        left = [callback for callback in self.trainer.callbacks if type(callback) not in map(type, own)]  # type: ignore[attr-defined]
        self.trainer.callbacks = left  # type: ignore[attr-defined]
        return own

    @property
    def data(self) -> FederatedDataModule:
        """The data module that the Trainer was given."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):
            raise ConfigError(
                "A Federation needs a federated data module: "
                "trainer.fit(federation, datamodule=CIFAR10(num_clients=20)); give PerClient (of lit_pfl.data) a data "
                "module for every client, or FromDataset any data set."
            )
        return data

    def setup(self, stage: str) -> None:
        """Let the engine make the clients, and make the server, once."""
        data = self.data
        if self._work is not None and data is not self._work.data:
            refuse_other_data(data, self._fingerprints)
        data.participants, data.validated = self.participants, self.validated
        data.as_many_each_round = not isinstance(self.participation, Participation)
        data.all_at_once = self.engine.all_at_once
        data.move_to(self.trainer.strategy.root_device)
        leave_to_clients(self.trainer)
        if self._work is None:
            try:
                self._begin(data)
            except BaseException:
                self.engine = copy.deepcopy(self._given_engine)  # this one may have made clients
                raise
        else:
            self._work.goes_on(self.trainer)
            self.engine.setup(self._work)
        if self.trainer.state.fn == "fit":
            self._earlier_rounds = self._begun_rounds - self.trainer.current_epoch
        save_whole(self.trainer, self.if_not_saved, self.engine.files)
        summarize(self.trainer, self._described)

    def _begin(self, data: FederatedDataModule) -> None:
        check_participation(self.participation, data.clients)
        check_share("federation.evaluate_clients", self.evaluate_clients, len(data.clients))
        if self.seed is None:
            self.seed = torch.initial_seed()
        keep_freed_memory()
        self.draws = Draws(self.seed)
        work = Work(
            self.prototype, data, self.seed, self.local_epochs, self.client_trainer, self.trainer,
            keep_trained=self.keep_trained,
        )  # fmt: skip
        self.timetable = Timetable(work, self.draws, self.participation, self.deadline, self.asynchronous)
        # a client that never trains: it makes the server, and stands for all where something is asked of any
        with self.draws.default_generators("loaders"):  # torchdata's draw the seed of their order when they are made
            own = data.client(data.clients[0])
        example = work.made(data.clients[0], own)
        with self.draws.default_generators("server"):  # before the client is on its device, which draws other numbers
            server = example.configure_server()
        if isinstance(self.participation, Participation) and self.participation.counts_sizes(len(data.clients)):
            server.weighting = "uniform"
        example.place_on(self.trainer.strategy.root_device)
        batch_size, stacked = getattr(data, "batch_size", None), self.engine.stacked(len(data.clients))
        work.joined(example)
        with work.visitors.lent(example, joins=True):
            # whatever is given, since this is the first look whether the learner can do with the data
            threads = choose_threads(example.learner, own.to_try(), batch_size, stacked, self.engine.cores)
        self.threads = work.threads = self.threads or threads
        self.engine.setup(work)
        self.coordinator = Coordinator(server, self.quorum, self.max_update_norm)
        self.coordinator.start(self.engine.joined())
        if self.asynchronous is not None:
            self.asynchronous.check(example, server, data.clients, self.participation)
            self.coordinator.in_training = InTraining(self.asynchronous)
        self.coordinator.protect(self.privacy, sampling_of(self.participation, len(data.clients)), self.seed)
        self.scores = Scores(self.evaluate, self._directions, work, self.engine, self.coordinator, self.draws)
        self.scores.check_new(data)
        self._described = described(example, len(data.clients))
        self._work = work
        several = data.clients if isinstance(data, PerClient) else data.clients[:1]  # of others, all are of a kind
        if any(goes_on(data.client(client).train) for client in several):
            _ = self._fingerprints  # they take a batch of such a stream: before the training, not with a checkpoint

    @property
    def clients(self) -> dict[int, Client]:
        """The clients' modules by id that live in this process: all, with an engine that keeps them here.

        For looking at; what is to work with any engine goes by :meth:`ask`.
        """
        return self.engine.clients

    @property
    def client_ids(self) -> list[int]:
        """Ids of all clients, once set up."""
        return [] if self._work is None else self._work.data.clients

    def ask(
        self, question: Callable[[Any], T], clients: Iterable[int] | None = None, as_scored: bool = False
    ) -> dict[int, T]:
        """Put a question to clients where they live; return their answers by id.

        Args:
            question: a function of a module, or a ``functools.partial`` of one: it may run in another process. It is
                given a client, whose random draws are then its own, and leaves it as it is.
            clients: ids of the clients to ask; by default all.
            as_scored: whether they are asked in the state in which they are scored, as always with
                ``keep_trained=False``; otherwise as they are.

        Raises:
            ConfigError: when there is no such client.
        """
        there = self.client_ids
        clients = there if clients is None else list(clients)
        for client in clients:
            if isinstance(client, str):
                raise ConfigError(f"There is no client {client!r}; ids are whole numbers.")
        if clients and not there:
            raise ConfigError(f"There is no client {clients[0]} yet; clients are there once this is fitted or tested.")
        if unknown := set(clients).difference(there):
            some = ", ".join(map(str, there[:10])) + (", ..." if len(there) > 10 else "")
            raise ConfigError(f"There is no client {min(unknown)}; there are {some}.")
        replies = self.scores.replies(clients) if as_scored or not self.keep_trained else dict.fromkeys(clients)
        return self.engine.ask(question, replies)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the server's step as an optimizer, so that a Trainer counts rounds as it counts steps."""
        return ServerStep()

    # ---------------------------------------------------------------------------------------------------------- rounds

    def participants(self, completed: int) -> list[int]:
        """Return the ids of the clients that train in the round after ``completed`` rounds of this Trainer."""
        return self.timetable.participants(self._earlier_rounds + completed)

    def validated(self) -> list[int]:
        """Return the ids of the clients that are evaluated on validation data: in a fit those of a sample."""
        share = self.evaluate_clients if self.trainer.state.fn == "fit" else 1.0
        return self.draws.choose(self.data.clients, share, "evaluation")

    def on_train_start(self) -> None:
        """See that callbacks monitor what there will be: the metrics are known once a client has been scored."""
        self._job = RequeuesBetweenRounds(self.trainer)
        self._end_without_clients()
        if isinstance(self.participation, Participation) and (planned := self.timetable.work.planned) > 0:
            self.participants(planned - 1)  # a file of rounds may have fewer
        known = {"round", "train/loss", *self.traffic.of_round()}
        if monitors(self.trainer).keys() <= known or not self.trainer.limit_val_batches:
            return
        with torch.no_grad(), self.trainer.precision_plugin.val_step_context():
            on_test = self.scores.validated_on == "test"
            scored = (k for k in self.client_ids if on_test or has_batches(self.data.client(k).val))
            known |= self.scores.names(self.data, next(scored, self.client_ids[0]))
        refuse_misspelt(self.trainer, known)

    def on_train_epoch_start(self) -> None:
        """Begin a round."""
        end_of_privacy(self.trainer, self.coordinator, begins=True)
        self._losses, self._validated = [], {}
        completed = self._earlier_rounds + self.trainer.current_epoch
        self._plan = self.timetable.begin_round(self.coordinator, completed, self.engine.left)
        self._begun_rounds = completed + 1

    def training_step(self, batch: list[int], batch_idx: int) -> None:
        """Train a set of clients; after the last one of the round, let the server do its step."""
        # Clients choose their own precision. The cache would survive their optimizer steps, so it is off.
        with computing(self.threads), torch.autocast(self.device.type, enabled=False, cache_enabled=False):
            self._train([client for client in batch if client not in self.engine.left])
            if self.trainer.is_last_batch:
                optimizer = self.optimizers()
                assert not isinstance(optimizer, list)
                optimizer.step(closure=self.coordinator.end_round)
                # here for callbacks whose on_train_epoch_end is before this module's
                self._log(self._trained())

    def _train(self, clients: Sequence[int]) -> None:
        replies = {client: self.coordinator.reply(client) for client in clients}
        late = {client: self._plan.late[client] for client in clients if client in self._plan.late}
        replies = {client: reply for client, reply in replies.items() if client not in late}
        trained = self.engine.train(replies, self.coordinator.round, self._plan.batches)
        self.scores.trained.update(trained)
        self._losses += [(one.loss, one.samples) for one in trained.values()]
        self.coordinator.take_in({client: one.upload for client, one in trained.items()} | late)

    def on_train_batch_end(self, outputs: Any, batch: list[int], batch_idx: int) -> None:
        """Put a stop off until the round is over: half a round is nothing that could be kept, scored or resumed."""
        if self.trainer.should_stop and not self.trainer.is_last_batch:
            self.trainer.should_stop, self._asked_to_stop = False, True

    def on_train_epoch_end(self) -> None:
        """Log the round."""
        if self._asked_to_stop:
            self.trainer.should_stop, self._asked_to_stop = True, False
        self._end_without_clients()
        more = end_of_privacy(self.trainer, self.coordinator)
        if self.deadline is not None or self.asynchronous is not None:
            more["simulated_seconds"] = self.coordinator.clock
        self._log({**self._validated, **more})
        metrics = {**self._trained(), **self._validated, **more}
        self.round_log.write(self.trainer.loggers, self.coordinator.round, metrics)
        self._job.round_is_over()

    def _trained(self) -> dict[str, float]:
        return {"train/loss": mean_over_samples(self._losses), **self.traffic.of_round()}

    def _end_without_clients(self) -> None:
        if set(self.client_ids) == self.engine.left:
            rank_zero_info("All clients have ended their training; the federation ends.")
            self.trainer.should_stop = True

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
        """What has been spent on the server's side so far: ``aggregate`` and ``link``."""
        return self.coordinator.seconds

    def mixing(self) -> tuple[list[int], torch.Tensor] | None:
        """Whose tensors are in whose next reply, see :meth:`~lit_pfl.Server.mixing`."""
        return self.coordinator.server.mixing()

    def on_fit_end(self) -> None:
        """Test the models of the last round, and end the clients' fits."""
        if not self.trainer.fast_dev_run and self.trainer.limit_test_batches:  # type: ignore[attr-defined]
            self._test_last_round()
        self.engine.stop()

    # --------------------------------------------------------------------------------------------------------- scoring

    @property
    def rows(self) -> list[Row]:
        """The scores of the latest evaluation, in the state that ``evaluate`` names."""
        return self.scores.rows

    @property
    def other_rows(self) -> list[Row]:
        """If it was a test, the scores in the other states."""
        return self.scores.other_rows

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """By metric, whether higher values are better, of those of which it is known."""
        return self.scores.higher_is_better

    def on_validation_epoch_start(self) -> None:
        """Begin an evaluation."""
        self.scores.begin()

    def on_test_epoch_start(self) -> None:
        """Begin a test, in every state that there is."""
        self.scores.begin()
        self._tested = self.scores.states_of_a_test(self.data)

    def validation_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their validation data."""
        self.scores.evaluate(self.data, batch, self.scores.validated_on, [self.evaluate])

    def on_validation_epoch_end(self) -> None:
        """Log means over clients; to the loggers they go with the rest of the round."""
        if not self.trainer.sanity_checking:
            self._validated = self.scores.summary(self.scores.validated_on)
            self._log(self._validated, write=self.trainer.state.fn != "fit")  # in a fit, with the rest of the round

    def test_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their test data."""
        self.scores.evaluate(self.data, batch, "test", self._tested)

    def on_test_epoch_end(self) -> None:
        """Log means over clients."""
        self.scores.evaluate_new(self.data)
        self._log({**self.scores.summary("test"), **self.scores.summary_of_others()}, write=True)

    def predict_step(self, batch: list[int], batch_idx: int) -> dict[int, Any]:
        """Return what every client of the set predicts on its test data, by client id: (n, classes) logits, if tensors.

        Predictions that are not tensors of one width come as a list of batches.
        """
        return {
            client: torch.cat(batches) if _fit_together(batches) else batches
            for client, batches in self.ask(predicted, batch, as_scored=True).items()
            if batches  # a client may have no test samples
        }

    def test_samples(self, client: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the (n,) places in the data set of a client's test samples, and their (n,) targets or None."""
        data = self.data.client(client)
        return samples_of(data.test), labels_of(data.test) if data.num_classes is not None else targets_of(data.test)

    def standalone(self, client: int) -> nn.Module:
        """Return a copy of a client's personalized model as a network on its own, in the state in which it is
        scored."""
        return self.ask(methodcaller("standalone"), [client], as_scored=True)[client]

    def _test_last_round(self) -> None:
        with torch.no_grad(), self.trainer.precision_plugin.test_step_context():  # as in a test by the Trainer
            metrics = self.scores.complete_test(self.data, self.client_ids)
        self.round_log.write(self.trainer.loggers, self.coordinator.round, metrics)
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def _log(self, metrics: Mapping[str, float], write: bool = False) -> None:
        """Tell the Trainer and its callbacks; the loggers only if asked to."""
        self.round_log.name_axes(self.trainer.loggers, metrics)
        metrics = {"round": self.coordinator.round, **metrics}
        if write:
            metrics["step"] = self.coordinator.round  # which Lightning takes for the loggers' step: in a fit it is this
        # as tensors, since byte counts do not fit the 32 bits that Lightning gives to plain numbers
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        self.log_dict(values, logger=None if write else False, batch_size=1, on_step=False, on_epoch=True)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the whole federation, see :func:`~lit_pfl.federation.checkpoint.saved`."""
        own = saved(self._identity(), self.coordinator, self.engine)
        checkpoint["federation"] = own | ({"earlier_rounds": n} if (n := self._earlier_rounds) else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the whole federation.

        Raises:
            ConfigError: when the checkpoint is of another run, or not whole. It names the first thing that differs.
        """
        names, identity = ["method"], self._identity()
        if self.trainer.state.fn == "fit":
            names += ["local_epochs", "participation", *OPTIONAL] + ([] if self._given_seed is None else ["seed"])
        else:
            identity["options"] = {}  # they make no difference to a model that is only scored
        state = resume(checkpoint, identity, names, self.coordinator, self.engine)
        self.seed = state["seed"]
        self._earlier_rounds = state.get("earlier_rounds", 0)
        self._begun_rounds = self.coordinator.round
        self.timetable.draw_again(self.seed)
        self.scores.trained = trained_in(state)

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree in, first of all: what made the run, and whose data is whose."""
        return {
            "method": type(self.prototype).__name__,
            "local_epochs": self.local_epochs,
            "participation": repr(p) if isinstance(p := self.participation, Participation) else p,
            "seed": self.seed,
            "data": self._fingerprints,
            "keep_trained": self.keep_trained,
            "sends": sends_of(self.prototype),
            "options": options_of(self.prototype),
            **{name: repr(given) for name in OPTIONAL if (given := getattr(self, name)) is not None},
        }

    @cached_property
    def _fingerprints(self) -> Fingerprints:
        assert self._work is not None
        return Fingerprints(self._work.data)


def _fit_together(batches: Sequence[Any]) -> bool:
    """Say whether batches are tensors with a row a sample, all rows of one shape."""
    return all(isinstance(x, torch.Tensor) and x.dim() and x.shape[1:] == batches[0].shape[1:] for x in batches)
