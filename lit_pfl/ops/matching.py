"""Matching the units of several clients' layers to each other, and following a matching through the layer after.

A unit is an output channel of a convolution or an output of a linear layer: its weights and its bias. The order of
units means nothing, so before layers are averaged their units must be matched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from torch import Tensor


@dataclass(frozen=True)
class Matching:
    """How units are matched: the maximum a posteriori of a Beta-Bernoulli process of Gaussian units (BBP-MAP).

    Args:
        gamma: mass of the process; the larger, the sooner a unit stays without a partner and the global layer grows.
        sigma: standard deviation of clients' units around their global unit.
        sigma0: standard deviation of global units around zero.
        sweeps: how often every client is matched again after all have been matched once.
        popularity: what it adds to the gain of joining a unit that c of J clients have: ``paper``:
            ``2 log(c / (J - c))``; ``released``: half of that, and c counted up to 10, as in FedMA's released code.
        average: what a global unit is: ``mean`` of those matched to it, which minimizes FedMA's Eq. 2; ``posterior``:
            its posterior mean, drawn towards zero by the prior, as in the released code.
        max_units: beyond this number of units a client adds at most one to a global layer, or what it has no room for;
            the released code has 700.

    Source:
        Yurochkin et al. 2019 (PFNM), Eq. 8; Wang et al. 2020 (FedMA), Section 2 and Algorithm 1.
    """

    gamma: PositiveFloat = 7.0
    sigma: PositiveFloat = 1.0
    sigma0: PositiveFloat = 1.0
    sweeps: NonNegativeInt = 5
    popularity: Literal["paper", "released"] = "paper"
    average: Literal["mean", "posterior"] = "mean"
    max_units: PositiveInt | None = None


def assignment_gains(units: Tensor, sums: Tensor, counts: Tensor, num_clients: int, matching: Matching) -> Tensor:
    """Return what assigning each of a client's units to each global unit adds to the posterior's logarithm.

    Args:
        units: (L, D), of the client that is matched; D weights (and bias) a unit.
        sums: (G, D) sum of the units matched to each global unit so far, without this client's.
        counts: (G,) their number, from 1 to ``num_clients - 1``.
        num_clients: J.
        matching: the numbers of the model.

    Returns:
        (L, G + N); column G + t - 1 is for opening the t-th new unit.

    Source:
        PFNM, Eq. 8, with a prior mean of zero.
    """
    noise, prior = matching.sigma**-2, matching.sigma0**-2
    precision = prior + noise * counts
    evidence, own = noise * sums, noise * units
    sizes = own.square().sum(1, keepdim=True)
    joined = sizes + 2 * own @ evidence.T + evidence.square().sum(1)  # |own + evidence|^2 for every pair
    old = joined / (precision + noise) - evidence.square().sum(1) / precision
    if matching.popularity == "paper":
        old = old + 2 * torch.log(counts / (num_clients - counts))
    else:
        seen = counts.clamp(max=10)
        old = old + torch.log(seen / (num_clients - seen))
    room = len(units) if matching.max_units is None else max(matching.max_units - len(sums), len(units) - len(sums), 1)
    nth = torch.arange(1, min(len(units), room) + 1, dtype=units.dtype, device=units.device)
    new = sizes / (prior + noise) + 2 * torch.log(matching.gamma / num_clients / nth)
    return torch.cat([old, new], dim=1)


def match_units(units: Sequence[Tensor], matching: Matching, rng: np.random.Generator) -> list[Tensor]:
    """Match the units of J clients: each in turn to those of all others, by the assignment of the greatest total gain.

    Args:
        units: J tensors (L_j, D), in float64 for sums that come out the same whatever was added and taken away.
        matching: the numbers of the model.
        rng: draws the order of clients in every sweep.

    Returns:
        J tensors (L_j,) int64: the global unit of each unit, from 0 to G - 1. No two units of a client share one, and
        every global unit has at least one.
    """
    sums, counts = units[0].new_zeros(0, units[0].shape[1]), units[0].new_zeros(0)
    assignments: dict[int, Tensor] = {}
    widest_first = sorted(range(len(units)), key=lambda client: -len(units[client]))
    for client in [*widest_first, *(int(c) for _ in range(matching.sweeps) for c in rng.permutation(len(units)))]:
        if client in assignments:  # it leaves, and with it the units that were its alone
            left = assignments.pop(client)
            sums[left] -= units[client]
            counts[left] -= 1
            kept = counts > 0
            place = kept.cumsum(0) - 1
            assignments = {other: place[assignment] for other, assignment in assignments.items()}
            sums, counts = sums[kept], counts[kept]
        assignment = _hungarian(assignment_gains(units[client], sums, counts, len(units), matching))
        new = assignment >= len(sums)
        assignment[new] = len(sums) + torch.arange(int(new.sum()), device=new.device)
        sums = torch.cat([sums, sums.new_zeros(int(new.sum()), sums.shape[1])])
        counts = torch.cat([counts, counts.new_zeros(int(new.sum()))])
        sums[assignment] += units[client]
        counts[assignment] += 1
        assignments[client] = assignment
    return [assignments[client] for client in range(len(units))]


def merge_units(units: Sequence[Tensor], assignments: Sequence[Tensor], matching: Matching) -> Tensor:
    """Return the (G, D) global units of J clients' units.

    Args:
        units: J tensors (L_j, D).
        assignments: J tensors (L_j,), as :func:`match_units` returns them.
        matching: the numbers of the model.
    """
    width = 1 + max(int(assignment.max()) for assignment in assignments)
    sums, counts = units[0].new_zeros(width, units[0].shape[1]), units[0].new_zeros(width, 1)
    for own, assignment in zip(units, assignments, strict=True):
        sums[assignment] += own
        counts[assignment] += 1
    if matching.average == "posterior":
        counts += (matching.sigma / matching.sigma0) ** 2
    return sums / counts


def nearest_units(units: Tensor, others: Tensor) -> Tensor:
    """Assign (L, D) units to L different ones of (G, D) others, G >= L, at the least sum of squared distances.

    Args:
        units: (L, D).
        others: (G, D).

    Returns:
        (L,) int64 positions in ``others``.
    """
    return _hungarian(2 * units @ others.T - others.square().sum(1))


def _hungarian(gains: Tensor) -> Tensor:
    # The units of a client whose training failed may be NaN; where it then stands is all one.
    rows = linear_sum_assignment(gains.detach().nan_to_num().cpu().numpy(), maximize=True)[1]
    return torch.from_numpy(rows).to(gains.device)


def unit_matrix(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the (L, D) units of a layer: all weights of one output, and its bias if there is one.

    Args:
        weight: (L, ...).
        bias: (L,), or None.
    """
    return weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias[:, None]], dim=1)


def spread_inputs(weight: Tensor, assignment: Tensor, width: int) -> Tensor:
    """Adapt the input side of a layer whose inputs were matched: move it to the global units, zeros for all others.

    Args:
        weight: (O, L, h, w) of a convolution, or (O, L * P) of a linear layer; with P > 1 its inputs are L channels
            of P positions each, flattened.
        assignment: (L,) global unit of every input.
        width: number of global units G.

    Returns:
        (O, G, h, w) or (O, G * P).
    """
    inputs = weight.reshape(len(weight), len(assignment), -1)
    spread = inputs.new_zeros(len(weight), width, inputs.shape[2])
    spread[:, assignment] = inputs
    return spread.reshape(len(weight), -1, *weight.shape[2:])


def gather_inputs(weight: Tensor, assignment: Tensor, width: int) -> Tensor:
    """Return what :func:`spread_inputs` was given: keep only the inputs that a client's own units have.

    Args:
        weight: (O, G, h, w), or (O, G * P).
        assignment: (L,) global unit of every input.
        width: number of global units G.
    """
    inputs = weight.reshape(len(weight), width, -1)
    return inputs[:, assignment].reshape(len(weight), -1, *weight.shape[2:])
