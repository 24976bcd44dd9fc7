"""FedAvg: federated averaging."""

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING


class FedAvg(Client):
    """One model for all: the mean of the clients' models, weighted by their numbers of samples.

    With a factorization all of u, v and mu are averaged: SimFed's ablation "FedAvg + Factorization", Table 5.

    Source:
        McMahan et al. 2017, Algorithm 1.
    """

    shares = EVERYTHING
