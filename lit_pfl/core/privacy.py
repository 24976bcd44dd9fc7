"""Differential privacy of clients: what a server makes of uploads says little about any one client."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, cast

import torch
from jsonargparse.typing import NonNegativeFloat, OpenUnitInterval, PositiveFloat
from torch import Tensor

from lit_pfl.core.encoding import Layout
from lit_pfl.core.participation import Sampling
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.updates import norm_of, update_norm, update_of, updated
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.ops.robust import clipping_factor
from lit_pfl.randomness import Draws


class ClientPrivacy:
    """Clips every client's update to a norm and adds Gaussian noise: ``Federation(..., privacy=ClientPrivacy(1.0))``.

    ``central``: the server is trusted. It scales the sum of the clipped updates by the expected number of participants
    (every client counts the same, whatever its number of samples), with noise of standard deviation
    ``noise_multiplier * clip`` in the sum. Only for methods whose server uses uploads in their mean alone. ``local``:
    the noise is added to every update before it is sent, so that the server need not be trusted; for every method. What
    clients keep for themselves is neither clipped nor noised.

    Logged every round is ``privacy/epsilon``, what has been spent so far; of adaptive clipping also ``privacy/clip``.
    Noise is drawn from the seed and the round, so that a resumed run is the same. Whoever knows the seed can take the
    noise off again: keep it secret if the privacy is to be real.

    Args:
        noise_multiplier: standard deviation of the noise, divided by ``clip``. Without noise (0) epsilon is infinite.
        clip: largest Euclidean norm of an update, over all its tensors; with adaptive clipping, in round 1.
        where: ``central`` or ``local``.
        delta: probability with which the guarantee may fail; choose it well below 1 over the number of clients.
        budget: epsilon after which the run ends: no round begins that would exceed it. Default: no end.
        quantile: adapt ``clip`` so that this share of the updates is shorter, for example 0.5. Default: ``clip`` stays.
        quantile_lr: how fast ``clip`` adapts, the paper's eta_C.
        count_noise: standard deviation of the noise in the number of updates that are shorter, the paper's sigma_b,
            divided by the expected number of participants.
        accountant: how rounds with ``Bernoulli`` participation are added up: ``rdp``, by Renyi divergences, or
            ``pld``, by privacy loss distributions, which is tighter and takes seconds a round. A fixed number of
            clients is always by ``rdp``; without sampling the result is exact.

    Raises:
        ConfigError: for an option that is out of range.

    Source:
        McMahan et al. 2018, Algorithm 1 (flat clipping, fixed denominator); Andrew et al. 2021, Algorithm 1 (adaptive
        clipping). Epsilon is by Google's ``dp-accounting``, in the extra ``privacy``.
    """

    def __init__(
        self,
        noise_multiplier: NonNegativeFloat = 1.0,
        clip: PositiveFloat = 1.0,
        where: Literal["central", "local"] = "central",
        delta: OpenUnitInterval = 1e-5,
        budget: PositiveFloat | None = None,
        quantile: OpenUnitInterval | None = None,
        quantile_lr: PositiveFloat = 0.2,
        count_noise: PositiveFloat = 0.05,
        accountant: Literal["rdp", "pld"] = "rdp",
    ) -> None:
        self.noise_multiplier, self.clip, self.where, self.delta = noise_multiplier, clip, where, delta
        self.budget, self.quantile, self.quantile_lr = budget, quantile, quantile_lr
        self.count_noise, self.accountant = count_noise, accountant
        check_options_of(self, "federation.privacy")
        for name in ("noise_multiplier", "clip"):
            if math.isinf(vars(self)[name]):
                raise ConfigError(f"federation.privacy.{name}=inf: give a finite number.")
        if quantile is not None and where == "local":
            raise ConfigError("federation.privacy.quantile: a local clip cannot adapt; leave it out, or where=central.")
        self.clip = float(clip)  # plain, as in checkpoints: the command line gives numbers of types of its own
        self._first_clip = self.clip
        self.taken: dict[int, int] = {}  # in how many rounds a client has uploaded, where that counts

    def __repr__(self) -> str:
        """Name the options that a run has to keep when it is resumed, as its epsilon is of all rounds together."""
        noise = f"noise_multiplier={self.noise_multiplier}, clip={self._first_clip}, where={self.where}"
        adapting = f", quantile={self.quantile}, quantile_lr={self.quantile_lr}, count_noise={self.count_noise}"
        return f"ClientPrivacy({noise}{'' if self.quantile is None else adapting})"

    def start(self, server: Server, layouts: Mapping[int, Layout], sampling: Sampling, seed: int) -> None:
        """Take note of the federation, before its first round.

        Args:
            server: the method's server.
            layouts: shapes and types of every client's uploads, by id.
            sampling: how clients are sampled.
            seed: the federation's seed.

        Raises:
            ConfigError: for a method or a tensor that this kind of privacy does not cover, or a budget that is too
                small for one round.
        """
        self.sampling, self.clients, self.draws = sampling, len(layouts), Draws(seed)
        self.clip, self.taken = self._first_clip, {}
        for layout in layouts.values():
            for name, (_, dtype) in layout.items():
                if not dtype.is_floating_point or name in server.count_tensors:
                    what = "counts" if name in server.count_tensors else dtype
                    raise ConfigError(
                        f"federation.privacy: tensor {name!r} holds {what}, to which no noise is added; keep it local "
                        "(model.norm_stats=local, model.local), or use another method."
                    )
        if self.where == "central" and not (server.declares("means_only") and server.robust is None):
            raise ConfigError(
                f"federation.privacy.where=central: {server.sees_uploads()} uses single uploads, not their mean "
                "alone; use local, or a method that averages, such as FedAvg or Ditto, without model.mean."
            )
        self._noise_of_updates()
        first = self._epsilon(1)  # refused here where it cannot be computed
        if self.spent(0):
            raise ConfigError(
                f"federation.privacy.budget={self.budget:g}: the first round takes {first:.4g}; give a "
                "larger budget, more noise, or sample fewer of more clients."
            )

    @property
    def expected(self) -> float | None:
        """The expected number of participants; None where it is not a random number."""
        return self._nominal if self.sampling.kind == "poisson" else None

    @property
    def _nominal(self) -> float:
        """The number of participants that the account expects; the noise of counts is ``count_noise`` times it."""
        return self.sampling.share * self.clients

    # ---------------------------------------------------------------------------------------------------------- rounds

    def protect_locally(self, round: int, server: Server, uploads: Mapping[int, Payload]) -> dict[int, Payload]:
        """Return a round's uploads as clients send them."""
        if self.where == "central":
            return dict(uploads)
        std = self.noise_multiplier * self.clip
        for client in uploads:
            self.taken[client] = self.taken.get(client, 0) + 1
        return {k: self._noised(round, k, upload, server.center(k, upload), std, 1.0) for k, upload in uploads.items()}

    def protect_centrally(
        self, round: int, server: Server, uploads: Mapping[int, Payload], planned: int
    ) -> dict[int, Payload]:
        """Return uploads whose weighted mean is the private one, whatever the weights.

        With weights w that sum to 1, center c and clipped updates u of J clients, upload k becomes
        ``c + (u_k + n_k) / (E w_k)``, where E is the expected number of participants and the n_k of all clients
        together have a standard deviation of ``noise_multiplier * clip``. Then the mean is ``c + (sum u + n) / E``.

        Args:
            round: the round's number.
            server: the method's server.
            uploads: those that can be used, by client id; at least one.
            planned: number of participants, also of those whose uploads cannot be used; 0 where nobody was drawn and
                a client trains all the same, whose update is left out.
        """
        if self.where == "local":
            return dict(uploads)
        expected = server.mean_of = self.expected or max(planned, 1)
        weights = server.averaging_weights(round, uploads)
        std = self._noise_of_updates() * self.clip / math.sqrt(len(uploads))
        centers = {client: server.center(client, upload) for client, upload in uploads.items()}
        protected = {
            client: self._noised(round, client, upload, centers[client], std, 1 / (expected * weight), planned > 0)
            for (client, upload), weight in zip(uploads.items(), weights, strict=True)
        }
        if self.quantile is not None:
            self._adapt(round, [update_norm(upload, centers[k]) for k, upload in uploads.items() if planned], expected)
        return protected

    def _noised(
        self,
        round: int,
        client: int,
        upload: Payload,
        center: Mapping[str, Tensor],
        std: float,
        scale: float,
        counts: bool = True,
    ) -> Payload:
        update = update_of(upload, center)
        factor = clipping_factor(norm_of(update), self.clip) if counts else 0.0
        rng = self.draws.generator("privacy", round, client)
        for name, tensor in update.items():
            noise = torch.from_numpy(rng.standard_normal(tuple(tensor.shape))).to(tensor) if std else 0.0
            update[name] = scale * (factor * tensor + std * noise)
        return updated(upload, center, update)

    def _noise_of_updates(self) -> float:
        """Return the noise multiplier of updates, which is more than the whole one where counts are told as well.

        Source:
            Andrew et al. 2021, Theorem 1.
        """
        z, count = self.noise_multiplier, 2 * self.count_noise * self._nominal
        if self.quantile is None or z == 0:
            return z
        if z >= count:
            raise ConfigError(
                f"federation.privacy.count_noise={self.count_noise:g}: give more than "
                f"{self.count_noise * z / count:.3g}; the number of short updates needs more noise than all together."
            )
        return (z**-2 - count**-2) ** -0.5

    def _adapt(self, round: int, norms: list[float], expected: float) -> None:
        """Move the clip towards the quantile of the norms."""
        assert self.quantile is not None
        shorter = sum(norm <= self.clip for norm in norms) - len(norms) / 2  # less a half each: half the sensitivity
        noise = self.draws.generator("privacy of counts", round).standard_normal() * self.count_noise * self._nominal
        share = (shorter + (noise if self.noise_multiplier else 0)) / expected + 0.5
        self.clip *= math.exp(-self.quantile_lr * (share - self.quantile))

    # --------------------------------------------------------------------------------------------------------- account

    def epsilon(self, completed: int) -> float:
        """Return the epsilon that some rounds have spent: central, of all clients; local, of the one that took part
        most often.
        """
        return self._epsilon(completed if self.where == "central" else max(self.taken.values(), default=0))

    def spent(self, completed: int) -> bool:
        """Say whether another round would exceed the budget."""
        if self.budget is None:
            return False
        done = completed if self.where == "central" else max(self.taken.values(), default=0)
        return self._epsilon(done + 1) > self.budget

    def report(self, completed: int) -> dict[str, float]:
        """Return what is logged after a round."""
        clip = {} if self.quantile is None else {"privacy/clip": self.clip}
        return {"privacy/epsilon": self.epsilon(completed), **clip}

    def _epsilon(self, rounds: int) -> float:
        kind = "replaced" if self.where == "local" else self.sampling.kind
        share, clients = self.sampling.share, self.clients
        return epsilon(rounds, self.noise_multiplier, self.delta, kind, share, clients, self.accountant)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"clip": self.clip, "taken": dict(self.taken), "seed": self.draws.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        self.clip, self.taken, self.draws.seed = state["clip"], dict(state["taken"]), state["seed"]


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Let a logger say nothing."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@cache
def epsilon(
    rounds: int,
    noise_multiplier: float,
    delta: float,
    kind: str = "all",
    share: float = 1.0,
    clients: int = 0,
    accountant: str = "rdp",
) -> float:
    """Return the epsilon of a number of rounds, by ``dp-accounting``.

    Args:
        rounds: number of rounds.
        noise_multiplier: standard deviation of the noise, divided by the clip norm.
        delta: delta.
        kind: ``all``: every client in every round; ``poisson``: each with a probability; neighboring federations
            differ by one client more or less. ``fixed``: a fixed number without replacement; ``replaced``: others, and
            noise in every upload; here one client is replaced by another, which moves a sum by up to twice the clip
            norm.
        share: probability of taking part, or share of the clients.
        clients: number of clients; for ``fixed``.
        accountant: for ``poisson``: ``rdp`` or ``pld``.

    Raises:
        ConfigError: when ``dp-accounting`` is not installed.
    """
    if not rounds:
        return 0.0
    if not noise_multiplier:
        return math.inf
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError:
        raise ConfigError(
            "federation.privacy: epsilon needs dp-accounting, in the extra privacy: pip install 'lit-pfl[privacy]'."
        ) from None
    noise = noise_multiplier / 2 if kind in ("fixed", "replaced") else noise_multiplier
    gaussian = dp_accounting.GaussianDpEvent(noise)
    # all in every round, as one round with less noise: a bound for those who are drawn too, at times the smaller one
    everybody = cast(float, dp_accounting.get_epsilon_gaussian(noise / math.sqrt(rounds), delta))
    if kind == "poisson":
        account = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant()
        with _silent("absl"):  # which warns of the orders that it leaves out
            account.compose(dp_accounting.PoissonSampledDpEvent(share, gaussian), rounds)
    elif kind == "fixed":
        account = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        drawn = round(share * clients)
        account.compose(dp_accounting.SampledWithoutReplacementDpEvent(clients, drawn, gaussian), rounds)
    else:
        return everybody
    return min(cast(float, account.get_epsilon(delta)), everybody)
