"""StandAlone: every client trains alone."""

from lit_pfl.core import Client


class StandAlone(Client):
    """Every client trains alone, from the common initial weights. Nothing is sent.

    Source:
        The "Stand-Alone" rows of SimFed and Factorized-FL, "Local" of FedSLR.
    """

    shares = frozenset()
