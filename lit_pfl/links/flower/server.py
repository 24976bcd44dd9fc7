"""The server of a federation of Flower: a coordinator whose clients are in SuperNodes."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_pfl.core import Client, ClientSpec
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.payload_state import payload_from, payload_state
from lit_pfl.core.scores import Row, mean_over_samples, summary
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.lightning_internals import AtomicCheckpointIO, read_whole
from lit_pfl.links.flower.clients import MakeMethod, described, same_everywhere
from lit_pfl.links.flower.messages import SIZE
from lit_pfl.links.flower.nodes import Nodes
from lit_pfl.links.flower.plan import Plan
from lit_pfl.randomness import Draws
from lit_pfl_callbacks.clients import COLUMNS
from lit_pfl_callbacks.run_folder import write_rows
from lit_pfl_callbacks.states import TRAINED

MakeSpec = Callable[[UserConfig], ClientSpec]


def server_app(method: MakeMethod, spec: MakeSpec | None = None) -> ServerApp:
    """Return a ServerApp: rounds of a method among the clients of all SuperNodes.

    In the folder that the run's configuration names it keeps ``checkpoint.ckpt``, from which a run that was interrupted
    continues, ``metrics.csv`` with a row a round, ``refused.csv`` with the uploads that were refused, if there are any,
    and after the last round ``clients.csv`` with everybody's test scores.

    Args:
        method: makes the method from the run's configuration; the same as the clients'.
        spec: returns what clients are to learn, from the run's configuration: an example batch (zeros will do), from
            which networks know the shapes of what they will see, and for a classifier the number of classes. A learner
            that knows its own shapes, or has an ``example_input_array``, needs none.

    Example::

        app = server_app(lambda config: Ditto(learner=MyModule()))
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config, plan = context.run_config, Plan.of(context.run_config)
        FlowerServer(grid, same_everywhere(method, config, plan), spec(config) if spec else None, plan).run()

    return app


class FlowerServer:
    """Runs the rounds, and keeps what a restart needs.

    Args:
        grid: Flower's way to the nodes.
        prototype: the method.
        spec: what clients are to learn, if its learner does not say.
        plan: the run's options.
    """

    def __init__(self, grid: Grid, prototype: Client, spec: ClientSpec | None, plan: Plan) -> None:
        self.prototype, self.spec, self.plan = prototype, spec, plan
        self.local_epochs = plan.local_epochs or prototype.min_local_epochs
        self.draws = Draws(plan.seed)
        self.folder = Path(plan.folder)
        self.coordinator = Coordinator(self._make_server(), plan.quorum)
        self.nodes = Nodes(grid, plan.timeout, self.coordinator.expected, described(prototype, self.local_epochs))
        self.metrics: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []

    def _make_server(self) -> Server:
        example = getattr(self.prototype.learner, "example_input_array", None)
        spec = replace(self.spec or ClientSpec(example=example), local_epochs=self.local_epochs)
        with self.draws.default_generators("weights"):
            client = self.prototype.build(spec)
        with self.draws.default_generators("server"):
            return client.configure_server()

    def run(self) -> None:
        """Run the rounds that are still to come, and score the clients.

        Raises:
            ConfigError: when clients are missing at the start, or the checkpoint is of another run.
            UploadError: when fewer uploads of a round are usable than the quorum asks for.
        """
        if (self.folder / "checkpoint.ckpt").exists():
            self._resume()
        else:
            self._begin()
        while self.coordinator.round < self.plan.rounds:
            self._round()
        self._score()

    def _begin(self) -> None:
        infos = self.nodes.gather(self.plan.clients)
        if len(infos) != self.plan.clients:
            raise ConfigError(
                f"run-config clients={self.plan.clients}: {len(infos)} have joined within {self.plan.timeout:g} s "
                f"({', '.join(map(str, sorted(infos))) or 'none'})."
            )
        self.nodes.begin(uuid.uuid4().hex, infos)
        joined = {str(client): {"samples": i.num_samples, **payload_state(i.initial)} for client, i in infos.items()}
        AtomicCheckpointIO().save_checkpoint(joined, self.folder / "joined.ckpt")
        self.coordinator.start(infos)
        self._save()

    def _resume(self) -> None:
        state, joined = (read_whole(self.folder / f"{name}.ckpt") for name in ("checkpoint", "joined"))
        own = self._identity()
        for name, value in own.items():
            if state["identity"][name] != value:
                raise ConfigError(
                    f"run-config {name}={value}: the run in {self.folder} has {state['identity'][name]}; give another "
                    "folder for another run."
                )
        infos = {int(client): ClientInfo(info["samples"], payload_from(info)) for client, info in joined.items()}
        self.coordinator.start(infos)
        self.coordinator.load_state_dict(state["coordinator"])
        self.metrics, self.refused = state["metrics"], state["refused"]
        self._write_tables()  # the server may have been stopped between the checkpoint and these
        self.nodes.begin(state["run"], infos, state["answered"])
        self.nodes.gather(self.plan.clients)
        rank_zero_info(f"The run in {self.folder} continues after round {self.coordinator.round}.")

    def _identity(self) -> dict[str, Any]:
        own = {name: getattr(self.plan, name) for name in ("clients", "participation", "seed")}
        return {"method": type(self.prototype).__name__, "local-epochs": self.local_epochs, **own}

    def _save(self) -> None:
        state = {
            "identity": self._identity(),
            "run": self.nodes.run,
            "answered": self.nodes.answered,
            "coordinator": self.coordinator.state_dict(),
            "metrics": self.metrics,
            "refused": self.refused,
        }
        AtomicCheckpointIO().save_checkpoint(state, self.folder / "checkpoint.ckpt")

    def _round(self) -> None:
        completed, all_clients = self.coordinator.round, sorted(self.nodes.answered)
        clients = self.draws.choose(all_clients, self.plan.participation, "participation", completed)
        self.nodes.losses.clear()
        self.coordinator.begin_round()
        self.coordinator.train(self.nodes, clients)
        try:
            self.coordinator.end_round()
        except UploadError:
            self._note_refusals()
            self._write_tables()
            raise
        row = {"round": self.coordinator.round, "train/loss": mean_over_samples(self.nodes.losses.values())}
        row |= {"uploads": len(clients) - len(self.coordinator.refused), **self.coordinator.ledger.of_round()}
        self.metrics.append(row)
        self._note_refusals()
        self._save()
        self._write_tables()
        rank_zero_info(_line(row))

    def _note_refusals(self) -> None:
        refusals = self.coordinator.refusals
        self.nodes.refused |= {client: reason for _, client, _, reason in refusals if client is not None}
        self.refused += [refusal._asdict() for refusal in refusals]

    def _write_tables(self) -> None:
        if self.metrics:
            write_rows(self.folder / "metrics.csv", self.metrics)
        if self.refused:
            write_rows(self.folder / "refused.csv", self.refused)

    def _score(self) -> None:
        server, answered = self.coordinator.server, self.nodes.answered
        fresh = {client: server.evaluation_reply(client) for client, round in answered.items() if not round}
        scores, higher_is_better = self.nodes.evaluate(fresh, self.coordinator.round)
        if not scores:
            rank_zero_warn("No node has answered the scoring; clients.csv stays as it was.")
            return
        rows = []
        for client, model, n, values in scores:
            kind = f"{model}:{'before' if answered[client] else 'untrained'}"
            sizes = {name.removeprefix(SIZE): value for name, value in values.items() if name.startswith(SIZE)}
            own = {name: value for name, value in values.items() if not name.startswith(SIZE)}
            rows.append(Row(client, self.coordinator.round, "test", kind, n, own, sizes, TRAINED))
        records = [{column: getattr(row, column) for column in COLUMNS} | {**row.scores} for row in rows]
        write_rows(self.folder / "clients.csv", records)
        means = summary(rows, "test", {"acc": True, **higher_is_better})
        rank_zero_info(_line(means))


def _line(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:{'.4f' if isinstance(value, float) else ''}}" for name, value in values.items())
