"""Which samples are kept for evaluation, and which of them every client is evaluated on."""

import numpy as np
import numpy.typing as npt

from lit_pfl.data.partition import Indices
from lit_pfl.errors import ConfigError


def check_fractions(train: float, test: float) -> None:
    """Raise a ConfigError for shares of training and test data that do not go together."""
    if not 0 < train < 1 or not 0 < test <= 1 - train + 1e-9:
        raise ConfigError(
            f"data.train_fraction={train} and data.test_fraction={test} must be above 0 "
            "and leave something for each other."
        )


def alike_samples(
    labels: Indices, shares: npt.NDArray[np.float64], count: int, rng: np.random.Generator
) -> list[Indices]:
    """Draw evaluation samples for every client with its own shares of classes; clients may draw the same ones.

    Args:
        labels: (n,) class of every evaluation sample.
        shares: (K, C) number of training samples of each class at each client.
        count: number of samples for a client, up to rounding: of class c it gets ``floor(count * share)``, or all that
            there are.
        rng: source of all randomness.

    Returns:
        K arrays of positions, none twice for one client.

    Raises:
        ConfigError: when ``count`` is too small for a client that has training samples.

    Source:
        FedSLR, Appendix B.1 (100 samples), rounded as in its released code.
    """
    members = [np.flatnonzero(labels == c) for c in range(shares.shape[1])]
    # in whole numbers, since 0.29 * 100 is less than 29
    wanted = count * shares.astype(np.int64) // np.maximum(shares.sum(1, keepdims=True).astype(np.int64), 1)
    for client, (own, trained) in enumerate(zip(wanted, shares, strict=True)):
        if trained.any() and not own.any():
            raise ConfigError(
                f"data.eval_samples={count}: client {client} has {np.count_nonzero(trained)} classes, and rounded down "
                "it gets no sample of any; give more, or data.evaluate_on=own."
            )
    return [
        np.sort(np.concatenate([rng.permutation(of_c)[:n] for of_c, n in zip(members, own, strict=True)]))
        for own in wanted
    ]


def matched_split(labels: Indices, shares: npt.NDArray[np.float64]) -> list[Indices]:
    """Deal evaluation samples so that every client is evaluated on what it is trained on.

    Args:
        labels: (n,) class of every evaluation sample.
        shares: (K, C) number of training samples of each class at each client.

    Returns:
        K arrays of positions; of class c client k gets its share of that class, rounded so that all are used. A client
        that would get nothing gets one sample of the class it has most of, shared with another client.
    """
    parts: list[list[Indices]] = [[] for _ in shares]
    for c in range(shares.shape[1]):
        members = np.flatnonzero(labels == c)
        if not len(members) or not shares[:, c].sum():
            continue
        cuts = np.rint(np.cumsum(shares[:, c])[:-1] / shares[:, c].sum() * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    clients = [np.concatenate(part) if part else np.empty(0, np.int64) for part in parts]
    present = np.isin(np.arange(shares.shape[1]), labels)
    for client, positions in enumerate(clients):
        if not len(positions) and shares[client].any() and present.any():
            members = np.flatnonzero(labels == np.where(present, shares[client], -1).argmax())
            clients[client] = members[[client % len(members)]]
    return clients
