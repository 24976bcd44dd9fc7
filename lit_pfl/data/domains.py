"""Domain heterogeneity: groups of clients that tell different classes apart."""

from itertools import pairwise

import numpy as np

from lit_pfl.data.partition import Indices, Partition, Uniform
from lit_pfl.errors import ConfigError

#: CIFAR-100's superclasses, its "coarse" labels, in their order: the classes of each. Source: SimFed, Section 5.1.
CIFAR100_SUPERCLASSES = {
    "aquatic mammals": [4, 30, 55, 72, 95],
    "fish": [1, 32, 67, 73, 91],
    "flowers": [54, 62, 70, 82, 92],
    "food containers": [9, 10, 16, 28, 61],
    "fruit and vegetables": [0, 51, 53, 57, 83],
    "household electrical devices": [22, 39, 40, 86, 87],
    "household furniture": [5, 20, 25, 84, 94],
    "insects": [6, 7, 14, 18, 24],
    "large carnivores": [3, 42, 43, 88, 97],
    "large man-made outdoor things": [12, 17, 37, 68, 76],
    "large natural outdoor scenes": [23, 33, 49, 60, 71],
    "large omnivores and herbivores": [15, 19, 21, 31, 38],
    "medium mammals": [34, 63, 64, 66, 75],
    "non-insect invertebrates": [26, 45, 77, 79, 99],
    "people": [2, 11, 35, 46, 98],
    "reptiles": [27, 29, 44, 78, 93],
    "small mammals": [36, 50, 65, 74, 80],
    "trees": [47, 52, 56, 59, 96],
    "vehicles 1": [8, 13, 48, 58, 90],
    "vehicles 2": [41, 69, 81, 85, 89],
}

#: Five groups of ten classes of CIFAR-100. Source: the class ids of Factorized-FL, Table 4 (which names most of them
#: wrongly: 22, there the couch, is the clock).
CIFAR100_FIVE = {
    "household objects": [5, 20, 22, 25, 39, 40, 84, 86, 87, 94],
    "fruits and foods": [0, 9, 10, 16, 28, 51, 53, 57, 61, 83],
    "trees and flowers": [47, 52, 54, 56, 59, 62, 70, 82, 92, 96],
    "transport": [8, 13, 41, 48, 58, 69, 81, 85, 89, 90],
    "animals": [3, 34, 42, 43, 63, 64, 66, 75, 88, 97],
}

#: Groups of classes by name.
GROUPS = {
    "cifar100_five": list(CIFAR100_FIVE.values()),
    "cifar100_superclasses": list(CIFAR100_SUPERCLASSES.values()),
}


class Domains(Partition):
    """The classes are grouped into domains, and every domain has data, clients and a label space of its own.

    Of K clients and D domains, client k is of domain ``k // (K / D)``. Its labels are 0, 1, ... in the order of the
    domain's class ids, and permuted if labels are to be. Classifier heads are never shared. Classes in no group are not
    used.

    Args:
        groups: lists of class ids, one list a domain, or the name of some: ``cifar100_five`` (Factorized-FL: 5 domains
            of 10 classes, for 20 clients) or ``cifar100_superclasses`` (SimFed: 20 domains of 5 classes, for 20
            clients).
        within: how the training samples of a domain are split among its clients, :class:`Uniform` by default.

    Raises:
        ConfigError: when data are split, for an empty group, for a class that is in two groups or not in the data, and
            where ``within`` has domains too.

    Source:
        Factorized-FL, Appendix B.2 and Table 4; SimFed, Section 5.1.

    Example:
        >>> Domains([[2, 0], [1, 3]]).domains(num_classes=5)
        [[0, 2], [1, 3]]
    """

    def __init__(self, groups: list[list[int]] | str = "cifar100_five", within: Partition | None = None) -> None:
        self.groups = groups
        self.within = within or Uniform()

    def domains(self, num_classes: int) -> list[list[int]]:
        groups = GROUPS.get(self.groups) if isinstance(self.groups, str) else self.groups
        if not groups or not all(groups):
            raise ConfigError(
                f"data.partition.groups={self.groups}: give a list of class ids for every domain, none empty, like "
                f"[[0,1],[2,3]], or one of {', '.join(GROUPS)}."
            )
        classes = sorted(c for group in groups for c in group)
        strange = [c for c in classes if c not in range(num_classes)]
        if strange:
            raise ConfigError(
                f"data.partition.groups: there is no class {strange[0]}; "
                f"the classes of the data set are 0 to {num_classes - 1}."
            )
        twice = [c for c, following in pairwise(classes) if c == following]
        if twice:
            raise ConfigError(f"data.partition.groups has class {twice[0]} twice; put each class into one domain.")
        if isinstance(self.within, Domains):
            raise ConfigError("data.partition.within: a domain has no domains; give a partition of another kind.")
        return [sorted(group) for group in groups]

    def split(self, labels: Indices, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        return self.within.split(labels, num_clients, rng)
