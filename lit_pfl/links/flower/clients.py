"""The clients of a SuperNode."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client
from lit_pfl.core.payload import FROM_FACTORS, Payload, as_payload
from lit_pfl.data import ClientData
from lit_pfl.engines import Local, Work
from lit_pfl.engines.questions import scored
from lit_pfl.engines.threads import choose_threads, computing
from lit_pfl.engines.trainers import check_client_options
from lit_pfl.errors import UploadError
from lit_pfl.links.flower.messages import SIZE, clients_in, pack, unpack
from lit_pfl.links.flower.plan import Plan
from lit_pfl.links.flower.states import States
from lit_pfl.randomness import Draws

MakeMethod = Callable[[UserConfig], Client]
MakeData = Callable[[Context], Mapping[int, ClientData]]


def quiet_trainer() -> L.Trainer:
    """Return a Trainer for whatever device there is, in 32 bits."""
    return L.Trainer(
        devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False
    )


def client_app(
    method: MakeMethod,
    data: MakeData,
    trainer: Callable[[], L.Trainer] = quiet_trainer,
    client_options: Mapping[str, Any] | None = None,
) -> ClientApp:
    """Return a ClientApp: what a SuperNode does with the server's messages.

    A SuperNode starts a process for every message, and the clients' state waits in files meanwhile: network, optimizer,
    schedules, random stream. They lie in the folder that the node's configuration gives as ``folder``, by default
    ``lit-pfl-clients`` where the SuperNode was started, and never leave the machine.

    Args:
        method: makes the method, a prototype of all clients, from the run's configuration; the same as the server's.
        data: returns the data of this node's clients, by client id; ``context.node_config`` says which node it is.
        trainer: makes a Trainer on whose device, and in whose precision, clients train.
        client_options: further options of every client's own Trainer, as ``client_trainer`` of a
            :class:`~lit_pfl.Federation`.

    Example::

        def data(context):
            module = PerClient([HospitalData(context.node_config["data"])])
            module.setup()
            return {context.node_config["client"]: module.client(0)}

        app = client_app(lambda config: Ditto(learner=MyModule()), data)
    """
    options = dict(client_options or {})
    check_client_options(options)
    app = ClientApp()

    def node(context: Context) -> "Node":
        plan = Plan.of(context.run_config)
        prototype = same_everywhere(method, context.run_config, plan)
        return Node(prototype, data(context), plan, context, trainer(), options)

    @app.query()
    def join(message: Message, context: Context) -> Message:
        return Message(node(context).join(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(node(context).train(message.content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(node(context).evaluate(message.content), reply_to=message)

    return app


def described(prototype: Client, local_epochs: int) -> ConfigRecord:
    """Return how clients train. Server and nodes compare it."""
    return ConfigRecord({"name": prototype.method_name, "local_epochs": local_epochs})


def same_everywhere(method: MakeMethod, config: UserConfig, plan: Plan) -> Client:
    """Return the method; weights that are drawn while it is made are the same at every node, at every message."""
    with Draws(plan.seed).default_generators("weights"):
        return method(config)


class Node:
    """The clients of a SuperNode, for as long as one message takes.

    Args:
        prototype: the method.
        data: the clients' data, by id.
        plan: the run's options.
        context: Flower's, with the node's configuration.
        trainer: whose device and precision clients have.
        options: further options of the clients' Trainers.
    """

    def __init__(
        self,
        prototype: Client,
        data: Mapping[int, ClientData],
        plan: Plan,
        context: Context,
        trainer: L.Trainer,
        options: Mapping[str, Any],
    ) -> None:
        self.prototype, self.data, self.plan, self.trainer = prototype, data, plan, trainer
        self.folder = Path(str(context.node_config.get("folder", "lit-pfl-clients")))
        epochs = plan.local_epochs or prototype.min_local_epochs
        self.work = Work(prototype, self, plan.seed, epochs, options, trainer, plan.rounds)

    @property
    def clients(self) -> list[int]:
        """Ids of the clients of this node."""
        return list(self.data)

    def client(self, client_id: int) -> ClientData:
        """Return a client's data."""
        return self.data[client_id]

    def join(self) -> RecordDict:
        """Return who lives here: numbers of samples, and what is shared before training."""
        engine = Local()
        engine.setup(self.work)
        infos = engine.joined()
        records = pack({client: info.initial for client, info in infos.items()})
        records["samples"] = MetricRecord({str(client): info.num_samples for client, info in infos.items()})
        records["method"] = described(self.prototype, self.work.local_epochs)
        return records

    def train(self, records: RecordDict) -> RecordDict:
        """Let clients load their replies and train a round; keep what they have become."""
        order = records.config_records["round"]
        completed, run = int(order["completed"]), str(order["run"])
        for reason in records.config_records.get("refused", {}).values():
            rank_zero_warn(f"The server has refused an upload of this node. {reason}")
        uploads: dict[int, Payload] = {}
        troubles, losses = ConfigRecord(), MetricRecord()
        for client in clients_in(records):
            engine, answered = self._engine(client), int(records.config_records["answered"][str(client)])
            reply, states = self._reply(records, client, engine), States(self.folder, run, client)
            states.take_up(engine, answered)
            try:
                if client in engine.left:
                    troubles[str(client)] = [f"Client {client}: a callback has ended its training.", ""]
                else:
                    with self._computing(client, engine):
                        upload, loss, n = engine.train({client: reply}, completed)[client]
                    if isinstance(upload, UploadError):
                        troubles[str(client)] = [str(upload), upload.tensor]
                    else:
                        uploads[client] = as_payload(upload)
                        losses[str(client)] = [float(loss), float(n)]
                states.keep(engine, completed + 1, answered)
            finally:
                engine.abort()
        answer = pack(uploads)
        answer["troubles"], answer["losses"], answer["round"] = troubles, losses, order
        return answer

    def evaluate(self, records: RecordDict) -> RecordDict:
        """Score clients' models on their test data, as trained; of those that never were, as they would join now."""
        answer, directions, order = RecordDict(), ConfigRecord(), records.config_records["round"]
        for client, round in records.config_records["answered"].items():
            engine = self._engine(int(client))
            States(self.folder, str(order["run"]), int(client)).take_up(engine, int(round))
            reply = None if round else self._reply(records, int(client), engine)
            with self._computing(int(client), engine):
                for model in engine.clients[int(client)].evaluated:
                    score = engine.ask(partial(scored, model, "test"), {int(client): reply})[int(client)]
                    answer[f"{client}/{model}"] = MetricRecord(
                        {"n": score.n, **score.values, **{SIZE + name: value for name, value in score.sizes.items()}}
                    )
                    directions.update(score.higher_is_better)
        answer["higher_is_better"], answer["round"] = directions, order
        return answer

    def _reply(self, records: RecordDict, client: int, engine: Local) -> Payload:
        own = sum(parameter.numel() for parameter in engine.clients[client].parameters())
        return unpack(records, client, limit=max(own, FROM_FACTORS)).to(self.trainer.strategy.root_device)

    def _engine(self, client: int) -> Local:
        if client not in self.data:
            raise UploadError(f"Client {client} is not at this node; its clients are {sorted(self.data)}.")
        engine = Local()
        engine.setup(self.work, [client])
        self.work.joined(engine.clients[client])  # as when it joined, which may change shapes
        return engine

    def _computing(self, client: int, engine: Local) -> Any:
        data, learner = self.data[client], engine.clients[client].learner
        threads = self.plan.threads or choose_threads(learner, data.to_try(), getattr(data.train, "batch_size", None))
        return computing(threads)
