"""``Trainer(strategy="federated", devices=N, num_nodes=M)``: a federation's clients spread over processes."""

from typing import Any, TypeVar

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_pfl.engines.processes import Processes
from lit_pfl.engines.ranks import LAST_WORDS, ManyRanks, Ranks
from lit_pfl.errors import ConfigError, RankError
from lit_pfl.lightning_internals import ScriptLauncher

T = TypeVar("T")


class FederatedStrategy(ParallelStrategy):
    """Runs a federation in several processes, each with some of its clients.

    Processes are started as Lightning's other strategies do it: by running the script again on this machine, or by
    torchrun, SLURM and so on. Every client stays in one process. All processes compute the server's step, from the same
    uploads and so with the same result.

    Args:
        timeout: seconds that processes wait for one another, as for one whose clients take longer, before giving up. A
            process that has died is noticed at once.
        accelerator: set by the Trainer, like what follows.
        parallel_devices: see Lightning's strategies.
        cluster_environment: see Lightning's strategies.
        checkpoint_io: see Lightning's strategies.
        precision_plugin: see Lightning's strategies.
    """

    strategy_name = "federated"

    def __init__(
        self,
        timeout: float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.timeout = timeout
        self.ranks = Ranks()
        self.num_nodes = 1

    @property
    def root_device(self) -> torch.device:  # noqa: D102
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell Lightning which of the processes this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            assert self.cluster_environment is not None
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def connect(self, model: L.LightningModule) -> None:
        """Take a federation.

        Raises:
            ConfigError: when it is none: processes would train models that know nothing of one another.
        """
        if not hasattr(model, "from_all_ranks"):
            raise ConfigError(
                f"strategy=federated spreads a Federation's clients; {type(model).__name__} is none. Give "
                "Federation(method(learner=...)), or join Trainers by FederatedLoop(ProcessGroupLink())."
            )
        super().connect(model)

    def setup_environment(self) -> None:
        """Meet the other processes, once."""
        super().setup_environment()
        self.set_world_ranks()
        if self.world_size == 1 or self.ranks.size > 1:
            return
        assert isinstance(self._launcher, ScriptLauncher)
        assert self.cluster_environment is not None
        address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        group = Processes(self.global_rank, self.world_size, address, port, self.timeout, self._launcher.check)
        self.ranks = ManyRanks(group, self.root_device)

    def model_to_device(self) -> None:  # noqa: D102
        assert self.model is not None
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:  # noqa: D102
        self.ranks.exchange()

    def broadcast(self, obj: T, src: int = 0) -> T:  # noqa: D102
        return self.ranks.exchange(obj)[src].words if self.ranks.size > 1 else obj

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:  # noqa: D102
        if self.ranks.size == 1:
            return tensor
        return torch.stack([told.tensors[0].clone() for told in self.ranks.exchange(tensors=[tensor])])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:  # noqa: D102
        if self.ranks.size == 1 or not isinstance(tensor, Tensor):
            return tensor
        total = self.all_gather(tensor).sum(0)
        return total / self.world_size if str(reduce_op).lower() in ("mean", "avg") else total

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, and end those that this one has started."""
        # Those who are stopped by a signal do not wait; the others notice that they are gone.
        if isinstance(exception, Exception) and not isinstance(exception, RankError):
            notes = getattr(exception, "__notes__", ())
            self.ranks.fail(" ".join([f"{type(exception).__name__}: {exception}", *notes]))
        if isinstance(self._launcher, ScriptLauncher):
            self._launcher.end(LAST_WORDS)


def ranks_of(trainer: L.Trainer) -> Ranks:
    """Return the processes of a Trainer's run."""
    return trainer.strategy.ranks if isinstance(trainer.strategy, FederatedStrategy) else Ranks()


if FederatedStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        FederatedStrategy.strategy_name, FederatedStrategy, description="A federation's clients spread over processes"
    )
