"""Label heterogeneity: every client numbers the classes in its own way."""

import random


def label_permutation(client: int, num_classes: int, seed: int = 1234) -> list[int]:
    """Return a client's own numbering of the classes.

    Args:
        client: the client's index, from 0.
        num_classes: number of classes C.
        seed: seed of the split. Seeds that differ by less than the number of clients give the same permutations, to
            other clients.

    Returns:
        The new label of each of the C classes. ``seed=1234`` gives the papers' permutations.

    Source:
        Factorized-FL, Tables 2 and 4: Python's generator seeded with ``seed + client``, a shuffle of 0..C-1.

    Example:
        >>> label_permutation(0, 10)
        [2, 8, 3, 5, 6, 4, 9, 0, 1, 7]
    """
    labels = list(range(num_classes))
    random.Random(seed + client).shuffle(labels)
    return labels
