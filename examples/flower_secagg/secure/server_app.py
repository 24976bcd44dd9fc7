"""What the SuperLink runs: rounds in which the server learns the mean of the uploads and no single one."""

import time
import uuid
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from lit_pfl.core import Client, ClientInfo, Server, UniformServer
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.lightning_internals import AtomicCheckpointIO
from lit_pfl.links.flower.clients import same_everywhere
from lit_pfl.links.flower.nodes import LOOK
from lit_pfl.links.flower.plan import Plan
from lit_pfl.randomness import Draws
from secure.options import MODULUS, Masking
from secure.task import method, spec

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, and score the clients after the last one."""
    config, plan = context.run_config, Plan.of(context.run_config)
    masking = Masking.of(config, plan)
    strategy = MaskedMean(same_everywhere(method, config, plan), spec(config), plan)
    workflow = SecAggPlusWorkflow(
        num_shares=1.0,  # with everybody else
        reconstruction_threshold=masking.threshold,
        max_weight=1 if strategy.uniform else masking.largest,
        clipping_range=masking.clip,
        quantization_range=masking.levels,
        modulus_range=MODULUS,
        timeout=plan.timeout,
    )

    def fit(grid: Grid, context: LegacyContext) -> None:
        completed, strategy.absent = strategy.rounds, set()
        for _ in range(2):  # a node that fails while keys are exchanged leaves nothing to unmask: once more without it
            watched = Watched(grid)
            workflow(watched, context)
            if strategy.rounds > completed:
                return
            strategy.absent = watched.silent
        raise UploadError(
            f"Round {completed + 1}: fewer than {masking.threshold} clients have answered, which run-config "
            f"quorum={plan.quorum} asks for, so nothing was unmasked."
        )

    legacy = LegacyContext(context, ServerConfig(num_rounds=plan.rounds), strategy)
    DefaultWorkflow(fit_workflow=fit)(grid, legacy)


class Watched:
    """The way to the nodes; reports which of them fail, which Flower's workflow does not."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.silent = grid, set()

    def send_and_receive(self, messages, *, timeout=None):
        answers = list(self.grid.send_and_receive(messages, timeout=timeout))
        good = {answer.metadata.src_node_id for answer in answers if not answer.has_error()}
        reasons = {answer.metadata.src_node_id: answer.error.reason for answer in answers if answer.has_error()}
        failed = {message.metadata.dst_node_id for message in messages} - good
        for node in sorted(failed):
            print(f"Node {node} has failed. {reasons.get(node, 'It has not answered.').strip()}", flush=True)
        self.silent = self.silent or failed  # the first; without their keys, the others fail next
        return answers


class MaskedMean(FedAvg):
    """What the server does with a round's mean: it is the next model. A method whose server does more is refused.

    Args:
        prototype: the method.
        example: what clients are to learn.
        plan: the run's options.
    """

    def __init__(self, prototype: Client, example, plan: Plan) -> None:
        super().__init__()
        self.plan, self.run = plan, uuid.uuid4().hex
        self.rounds = 0
        self.answered = {}  # of every node, the last round that it was in
        self.absent = set()  # nodes that have just failed
        with Draws(plan.seed).default_generators("weights"):
            client = prototype.build(replace(example, local_epochs=plan.local_epochs or prototype.min_local_epochs))
        with Draws(plan.seed).default_generators("server"):
            server = client.configure_server()
        refuse_unless_plain(type(prototype).__name__, server)
        self.uniform = server.weighting == "uniform"
        server.start({0: ClientInfo(1, client.initial())})
        self.model = dict(server.model)
        for name, tensor in self.model.items():
            if not tensor.is_floating_point():
                raise ConfigError(f"Tensor {name!r} holds {tensor.dtype}, which has no mean; keep it local.")

    def initialize_parameters(self, client_manager):
        """Return the model before the first round."""
        return ndarrays_to_parameters([tensor.numpy() for tensor in self.model.values()])

    def configure_fit(self, server_round, parameters, client_manager):
        """Ask all nodes that are there; before the first round, wait for all clients."""
        until = time.monotonic() + self.plan.timeout
        while server_round == 1 and (here := client_manager.num_available()) < self.plan.clients:
            if time.monotonic() > until:
                raise ConfigError(
                    f"run-config clients={self.plan.clients}: {here} have joined within {self.plan.timeout:g} s."
                )
            time.sleep(LOOK)
        here = [node for node in client_manager.all().values() if node.node_id not in self.absent]
        return [(node, FitIns(parameters, self._order(node))) for node in here]

    def aggregate_fit(self, server_round, results, failures):
        """Take over the mean, which Flower gives in the place of every node's own upload."""
        mean = parameters_to_ndarrays(results[0][1].parameters)
        pairs = zip(self.model.items(), mean, strict=True)
        self.model = {name: torch.from_numpy(array).to(tensor.dtype) for (name, tensor), array in pairs}
        self.rounds = server_round
        self.answered |= {node.node_id: server_round for node, _ in results}
        AtomicCheckpointIO().save_checkpoint(self.model, Path(self.plan.folder) / "model.ckpt")
        print(f"round {server_round}: the mean of {len(results)} clients", flush=True)
        return self.initialize_parameters(None), {}

    def configure_evaluate(self, server_round, parameters, client_manager):
        """Score the clients once, after the last round."""
        if server_round < self.plan.rounds:
            return []
        return [(node, EvaluateIns(parameters, self._order(node))) for node in client_manager.all().values()]

    def aggregate_evaluate(self, server_round, results, failures):
        """Print the means of all scores."""
        total = sum(result.num_examples for _, result in results)
        for name in results[0][1].metrics if results else ():
            mean = sum(result.num_examples * result.metrics[name] for _, result in results) / total
            print(f"{name} {mean:.4f}", flush=True)
        return None, {}

    def _order(self, node):
        return {
            "run": self.run,
            "completed": self.rounds,
            "answered": self.answered.get(node.node_id, 0),
            "uniform": self.uniform,
        }


def refuse_unless_plain(name: str, server: Server) -> None:
    """Raise an error for a method whose server does anything but average."""
    plain = type(server) in (Server, UniformServer) and server.robust is None and server.server_optimizer is None
    if not plain:
        raise ConfigError(
            f"run-config method={name}: its server needs more than the mean of all uploads, which is all that secure "
            "aggregation gives; use a method that only averages, such as FedAvg, FedProx, FedRep or Ditto."
        )
