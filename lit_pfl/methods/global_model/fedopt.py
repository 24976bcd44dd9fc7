"""FedAvgM, FedAdagrad, FedAdam, FedYogi and FedExP: federated averaging with an optimizer at the server.

Each is a name for ``FedAvg(server_optimizer=...)``; other methods that average take the same option.
"""

from typing import Any, ClassVar

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat

from lit_pfl.core.server_optimizer import (
    ServerAdagrad,
    ServerAdam,
    ServerExtrapolation,
    ServerMomentum,
    ServerYogi,
)
from lit_pfl.methods.global_model.fedavg import FedAvg


class FedAvgM(FedAvg):
    """FedAvg whose server has momentum: ``m <- momentum m + D``, ``w <- w + lr m``; D is the mean of the models less w.

    It is ``FedAvg(server_optimizer=ServerMomentum(...))``. With ``momentum=0`` and ``lr=1`` it is FedAvg, bit for bit.

    Args:
        lr: the server's learning rate.
        momentum: how much of the former step is kept; the paper tries 0 to 0.997.
        nesterov: whether the step looks ahead: ``w <- w + lr (D + momentum m)``.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Hsu et al. 2019, Section 4.3.
    """

    def __init__(
        self, lr: PositiveFloat = 1.0, momentum: ClosedUnitInterval = 0.9, nesterov: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(server_optimizer=ServerMomentum(lr, momentum, nesterov), **kwargs)


class FedAdagrad(FedAvg):
    """FedAvg whose server takes Adagrad's steps: ``v <- v + D^2``, ``w <- w + lr m / (sqrt(v) + tau)``.

    D is the mean of the models less w, ``m <- beta1 m + (1 - beta1) D``, and v starts at ``tau^2``. It is
    ``FedAvg(server_optimizer=ServerAdagrad(...))``. Clients train with their own optimizer. In Flower v starts at 0.

    Args:
        lr: the server's learning rate, the paper's eta; it tries 0.001 to 10.
        beta1: how slowly m follows.
        tau: how far the step is from the sign of m.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Reddi et al. 2021, Algorithm 2.
    """

    def __init__(
        self, lr: PositiveFloat = 0.1, beta1: ClosedUnitInterval = 0.0, tau: PositiveFloat = 1e-3, **kwargs: Any
    ) -> None:
        super().__init__(server_optimizer=ServerAdagrad(lr, beta1, tau), **kwargs)


class FedAdam(FedAvg):
    """FedAvg whose server takes Adam's steps, ``w <- w + lr m / (sqrt(v) + tau)``, the first ones uncorrected.

    D is the mean of the models less w, ``m <- beta1 m + (1 - beta1) D``, ``v <- beta2 v + (1 - beta2) D^2``, and v
    starts at ``tau^2``. It is ``FedAvg(server_optimizer=ServerAdam(...))``. Clients train with their own optimizer. In
    Flower v starts at 0, and the first steps are corrected.

    Args:
        lr: the server's learning rate, the paper's eta; it tries 0.001 to 10.
        beta1: how slowly m follows.
        beta2: how slowly v follows.
        tau: how far the step is from the sign of m.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Reddi et al. 2021, Algorithm 2.
    """

    steps_by: ClassVar[type[ServerAdam]] = ServerAdam

    def __init__(
        self,
        lr: PositiveFloat = 0.1,
        beta1: ClosedUnitInterval = 0.9,
        beta2: ClosedUnitInterval = 0.99,
        tau: PositiveFloat = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_optimizer=self.steps_by(lr, beta1, beta2, tau), **kwargs)


class FedYogi(FedAdam):
    """FedAvg whose server takes Yogi's steps: FedAdam's with ``v <- v - (1 - beta2) D^2 sign(v - D^2)``.

    It is ``FedAvg(server_optimizer=ServerYogi(...))``. Clients train with their own optimizer. In Flower v starts at 0.

    Args:
        lr: the server's learning rate, the paper's eta; it tries 0.001 to 10.
        beta1: how slowly m follows.
        beta2: how slowly v follows.
        tau: how far the step is from the sign of m.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Reddi et al. 2021, Algorithm 2.
    """

    steps_by = ServerYogi


class FedExP(FedAvg):
    """FedAvg whose server goes beyond the mean, the further the more the clients' ways differ.

    ``w <- w + eta D`` with ``eta = max(1, sum p_i |D_i|^2 / (2 (|D|^2 + eps)))``: D_i is how far client i went, p_i its
    share of the samples, D their mean. It is ``FedAvg(server_optimizer=ServerExtrapolation(...))``. Evaluated as
    aggregated is the mean of the last two models, without which training continues. The authors' code multiplies eps by
    the number of participants, and lets it decay with the clients' learning rate.

    Args:
        eps: the larger, the nearer is eta to 1. The authors have 0.001 for CIFAR and 0.1 for EMNIST.
        shows_mean: whether the mean of the last two models is evaluated instead of the last.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Jhunjhunwala et al. 2023, Algorithm 1 and Eq. 6.
    """

    def __init__(self, eps: NonNegativeFloat = 1e-3, shows_mean: bool = True, **kwargs: Any) -> None:
        super().__init__(server_optimizer=ServerExtrapolation(eps, shows_mean), **kwargs)
