"""How training samples are split to clients."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lit_pfl.errors import ConfigError

Indices = npt.NDArray[np.int64]


class Partition(ABC):
    """Splits samples among clients. A new one needs :meth:`split` only, and then works by name on the command line.

    Attributes:
        needs_labels: whether it splits by classes. One that does not is given zeros where the data has none.

    Raises:
        ConfigError: when data are split, for parts that are not one per client or not positions of samples.
    """

    needs_labels: ClassVar[bool] = True

    @abstractmethod
    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Deal the samples.

        Args:
            labels: (n,) class of every sample.
            num_clients: number of clients K, at most n.
            rng: source of all randomness.

        Returns:
            K arrays of sample positions, no position twice unless the partition says so.
        """

    def checked_split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return what :meth:`split` does, if that can be; whether clients may have samples in common is its affair.

        Raises:
            ConfigError: when there is not a part for every client, or one is not a list of positions or mask of
                samples.
        """
        name, n = type(self).__name__, len(labels)
        parts = [np.asarray(part) for part in self.split(labels, num_clients, rng)]
        if len(parts) != num_clients:
            raise ConfigError(f"data.partition: {name} deals {len(parts)} parts to {num_clients} clients.")
        parts = [np.flatnonzero(part) if part.dtype == bool and part.shape == (n,) else part for part in parts]
        for client, part in enumerate(parts):
            if part.ndim != 1 or (len(part) and not np.issubdtype(part.dtype, np.integer)):
                raise ConfigError(
                    f"data.partition: {name} gives client {client} an array {part.dtype} {part.shape}; it must be a "
                    "list of positions of samples."
                )
            if len(part) and not 0 <= part.min() <= part.max() < n:
                strange = part.min() if part.min() < 0 else part.max()
                raise ConfigError(
                    f"data.partition: {name} gives client {client} sample {strange}; those that it may deal are 0 to "
                    f"{n - 1}."
                )
        return [part.astype(np.int64) for part in parts]

    def domains(self, num_classes: int) -> list[list[int]]:
        """Return the data set's domains, each with clients and a label space of its own; by default it is all one.

        Args:
            num_classes: number of classes of the data set.

        Returns:
            The sorted ids of the classes of every domain, no class twice. ``split`` is called once for each domain.

        Raises:
            ConfigError: when these are no domains of such a data set.
        """
        return [list(range(num_classes))]


class Uniform(Partition):
    """Every client gets the same number of samples, whatever their classes.

    The samples come shuffled and are cut into K parts in that order; sizes differ by one where K does not divide them.

    Source:
        FedSLR, Appendix B.1 (IID); Factorized-FL, Appendix B.2 (4 x 1,200 samples of a domain).
    """

    needs_labels = False

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        return np.array_split(np.arange(len(labels)), num_clients)


class IID(Partition):
    """Every client gets the same number of samples of every class.

    As in Factorized-FL's released code a class of m samples gives every client round(m / K), and what remains is not
    used. Where that would leave a whole class out, or some client with less than 80% of another's samples, since the
    last ones find too little, the samples are assigned one by one, class by class, and all are used.

    Source:
        Factorized-FL, Appendix B.1; SimFed, Section 5.1.
    """

    needs_labels = False

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        by_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        sizes = [round(len(members) / num_clients) for members in by_class]
        shares = [
            np.concatenate([m[client * n : (client + 1) * n] for m, n in zip(by_class, sizes, strict=True)])
            for client in range(num_clients)
        ]
        if min(sizes) < 1 or min(map(len, shares)) < 0.8 * max(map(len, shares)):
            everything = np.concatenate(by_class)
            shares = [everything[client::num_clients] for client in range(num_clients)]
        return [np.sort(share) for share in shares]


def _concentration(alpha: float) -> float:
    """Return a Dirichlet distribution's concentration, if it is one."""
    if not 0 < alpha < math.inf:
        raise ConfigError(f"data.partition.alpha={alpha}: give a number above 0; for equal shares choose IID.")
    return alpha


class Dirichlet(Partition):
    """Every class is divided among the clients by proportions from a symmetric Dirichlet distribution.

    Always ends after one draw: clients left with fewer than ``min_samples`` are given samples of the largest clients.

    Args:
        alpha: concentration; the smaller, the more a class gathers at few clients.
        min_samples: smallest number of samples of a client (lower if there are not enough for all); 0 allows empty
            clients, which then take no part.

    Source:
        Factorized-FL, Appendix B.1 (alpha = 0.5), and its released code (proportions over clients for each class).
    """

    def __init__(self, alpha: PositiveFloat = 0.5, min_samples: NonNegativeInt = 10) -> None:
        self.alpha = _concentration(alpha)
        self.min_samples = min_samples

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        shares: list[list[Indices]] = [[] for _ in range(num_clients)]
        for c in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == c))
            proportions = self._proportions([sum(map(len, share)) for share in shares], len(labels), rng)
            cuts = (np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
            for share, part in zip(shares, np.split(members, cuts), strict=True):
                share.append(part)
        clients = [rng.permutation(np.concatenate(share)) for share in shares]
        self._fill_up(clients, min(self.min_samples, len(labels) // num_clients))
        return [np.sort(client) for client in clients]

    def _proportions(self, held: list[int], n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Divide a class among clients that hold this many of the n samples already."""
        return rng.dirichlet(np.full(len(held), self.alpha))

    @staticmethod
    def _fill_up(clients: list[Indices], least: int) -> None:
        sizes = np.array([len(client) for client in clients])
        for poor in range(len(clients)):
            while sizes[poor] < least:
                rich = sizes.argmax()  # of equal ones the first
                take = min(least - sizes[poor], sizes[rich] - least)
                clients[poor] = np.concatenate([clients[poor], clients[rich][-take:]])
                clients[rich] = clients[rich][:-take]
                sizes[poor], sizes[rich] = len(clients[poor]), len(clients[rich])


class BalancedDirichlet(Dirichlet):
    """As :class:`Dirichlet`, but a client that holds its equal share of all samples gets nothing of further classes.

    Args:
        alpha: concentration; the smaller, the more a class gathers at few clients.
        min_samples: see :class:`Dirichlet`. The paper's code draws again until everyone has 10.

    Source:
        FedMA (Wang et al. 2020), released code: 16 clients, alpha = 0.5; used by Psi-Net, Section 5.2.
    """

    def _proportions(self, held: list[int], n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        hungry = np.array(held) < n / len(held)
        proportions = super()._proportions(held, n, rng) * hungry
        if not proportions.sum():  # at a very small alpha all of the class may have gone to one client
            proportions = hungry.astype(float)
        return proportions / proportions.sum()


class ClientDirichlet(Partition):
    """All clients get equally many samples, of classes in proportions from a client's own Dirichlet distribution.

    One sample after another goes to a random client that is not full, of a class drawn from the client's proportions.
    What remains when n is not a multiple of the number of clients is not used.

    Args:
        alpha: concentration; the smaller, the fewer classes a client has.
        exhausted: what to do about a class that is used up. ``redraw``: draw among the classes that are left.
            ``reuse``: assign its samples again, so that some are at several clients, or at one client several times.

    Source:
        FedDyn (Acar et al. 2021), released code (``redraw``); FedSLR, Appendix B.1: alpha = 0.1, and its released
        code (``reuse``).
    """

    def __init__(self, alpha: PositiveFloat = 0.1, exhausted: Literal["redraw", "reuse"] = "redraw") -> None:
        self.alpha = _concentration(alpha)
        self.exhausted = exhausted

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        members = [np.flatnonzero(labels == c).tolist() for c in np.unique(labels)]
        left = [list(m) for m in members]
        some_left = np.ones(len(left))
        proportions = rng.dirichlet(np.full(len(left), self.alpha), num_clients)
        size = len(labels) // num_clients
        clients: list[list[int]] = [[] for _ in range(num_clients)]
        hungry = list(range(num_clients))
        while hungry:
            client = hungry[rng.integers(len(hungry))]
            weights = np.cumsum(proportions[client] * some_left)
            if not weights[-1]:  # none of the client's classes is left
                weights = np.cumsum(some_left)
            c = np.searchsorted(weights / weights[-1], rng.random(), side="right")
            clients[client].append(left[c].pop())
            if not left[c] and self.exhausted == "reuse":
                left[c] = list(members[c])
            some_left[c] = bool(left[c])
            if len(clients[client]) == size:
                hungry.remove(client)
        return [np.sort(np.array(client)) for client in clients]


class ClassShards(Partition):
    """Every client has samples of exactly ``classes_per_client`` classes.

    Every class is cut into equally many shards of equal size, none used twice. What remains of a class when its shards
    are equal is not used.

    Args:
        classes_per_client: number of classes C that a client has.
        deal: who gets which classes: ``in_turn``: they are assigned over and over in one random order, so that few
            different sets of classes come about (10 clients with 5 of 10 classes: two sets, without a class in common);
            ``mixed``: every client gets those classes that most shards are left of, drawn among equals.

    Raises:
        ConfigError: when the K C shards are not equally many of every class.

    Source:
        Psi-Net, Section 5.1, "N*C": N clients with C classes each, the data split equally without duplication.
    """

    def __init__(self, classes_per_client: PositiveInt = 2, deal: Literal["in_turn", "mixed"] = "in_turn") -> None:
        self.classes_per_client, self.deal = classes_per_client, deal

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        classes, sizes = np.unique(labels, return_counts=True)
        shards = self._shards_of_a_class(num_clients, len(classes))
        if shards > sizes.min():
            raise ConfigError(
                f"data.num_clients={num_clients} with data.partition.classes_per_client={self.classes_per_client} cuts "
                f"each class into {shards} shards, and one class has {sizes.min()} training samples; give fewer."
            )
        cut = {c: rng.permutation(np.flatnonzero(labels == c)) for c in classes}
        cut = {c: members[: len(members) // shards * shards].reshape(shards, -1) for c, members in cut.items()}
        deal = self._mixed if self.deal == "mixed" else self._in_turn
        pieces = {c: iter(shards_of_c) for c, shards_of_c in cut.items()}
        return [np.sort(np.concatenate([next(pieces[c]) for c in own])) for own in deal(classes, num_clients, rng)]

    def _in_turn(self, classes: Indices, num_clients: int, rng: np.random.Generator) -> Indices:
        return np.resize(rng.permutation(classes), (num_clients, self.classes_per_client))

    def _mixed(self, classes: Indices, num_clients: int, rng: np.random.Generator) -> Indices:
        dealt, deal = np.zeros(len(classes)), []
        for _ in range(num_clients):  # from the fullest, so that nobody finds shards of too few classes in the end
            order = rng.permutation(len(classes))
            deal.append(order[np.argsort(dealt[order], kind="stable")][: self.classes_per_client])
            dealt[deal[-1]] += 1
        return classes[np.stack(deal)]

    def _shards_of_a_class(self, num_clients: int, num_classes: int) -> int:
        own = self.classes_per_client
        if own <= num_classes and num_clients * own % num_classes == 0:
            return num_clients * own // num_classes
        step = num_classes // math.gcd(num_classes, num_clients)
        fitting = ", ".join(str(n) for n in range(step, num_classes + 1, step))
        message = f"data.partition.classes_per_client={own} "
        if own > num_classes:
            message += f"is more than the {num_classes} classes"
        else:
            message += f"with {num_clients} clients does not share {num_classes} classes equally"
        message += f"; with data.num_clients={num_clients} give {fitting}"
        if own < num_classes:
            message += (
                f", or give a number of clients that is a multiple of {num_classes // math.gcd(num_classes, own)}"
            )
        raise ConfigError(message + ".")
