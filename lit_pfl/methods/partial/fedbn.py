"""FedBN: federated averaging of everything but batch norm."""

from typing import Any, Literal

from torch import nn

from lit_pfl.core import Client
from lit_pfl.core.server import Weighting
from lit_pfl.core.sharing import EVERYTHING, Role
from lit_pfl.errors import ConfigError

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


class FedBN(Client):
    """Every client keeps its batch norm, weights and running statistics; all else is averaged.

    Batch norm is found by its kind, wherever it is; codes that look for "bn" in names average that of torchvision's
    ``downsample``. With ``of="all"`` and ``weighting="samples"`` this is ``FedAvg(local="norm")``.

    Args:
        of: what is kept local: ``batch_norm``, as in the paper, or also the weights of ``all`` other norm layers.
        weighting: the mean of what is sent: ``uniform``, as in the authors' code, or by numbers of ``samples``, as in
            FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: for a network without such a layer, for which this would be FedAvg.

    Source:
        Li et al. 2021 (FedBN), Algorithm 1.
    """

    shares = EVERYTHING

    own_norms: frozenset[str]

    def __init__(
        self, of: Literal["batch_norm", "all"] = "batch_norm", weighting: Weighting = "uniform", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.of, self.weighting = of, weighting

    def configure_learner(self) -> None:
        super().configure_learner()
        modules = self.learner.named_modules(remove_duplicate=False)
        batch_norms = {name for name, module in modules if isinstance(module, _BATCH_NORMS)}
        roles = self.roles()
        self.own_norms = frozenset(
            name
            for name, role in roles.items()
            if name.rpartition(".")[0] in batch_norms or (self.of == "all" and role in ("norm", "norm_stats"))
        )
        if not self.own_norms:
            others = "; model.of=all keeps other norms" if self.of == "batch_norm" and "norm" in roles.values() else ""
            raise ConfigError(
                f"model.learner: {type(self.learner).__name__} has no batch norm, so FedBN would be FedAvg; use "
                f"model=FedAvg{others}."
                if self.of == "batch_norm"
                else f"model.learner: {type(self.learner).__name__} has no norm layer; use model=FedAvg."
            )

    def is_shared(self, name: str, role: Role) -> bool:
        return name not in self.own_norms and super().is_shared(name, role)
