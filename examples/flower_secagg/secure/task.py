"""What is learnt, and on what: the one part that is yours to change."""

from functools import partial

import torch
from flwr.app import Context, UserConfig

from lit_pfl import Client, methods
from lit_pfl.core import ClientSpec
from lit_pfl.data import ClientData, Digits, Dirichlet
from lit_pfl.models import MLP


def method(config: UserConfig) -> Client:
    """Return the method, the same for all sites and the server."""
    return getattr(methods, str(config["method"]))(backbone=partial(MLP, hidden=64))


def spec(config: UserConfig) -> ClientSpec:
    """Return what sites are to learn, for the server: images of 8 x 8, ten classes; it has no data."""
    return ClientSpec(example=(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)), num_classes=10)


def digits(clients: int) -> Digits:
    """Return the digits of all sites, with other classes at each."""
    data = Digits(num_clients=clients, partition=Dirichlet(alpha=0.5), batch_size=32, image_size=8)
    data.setup()
    return data


def data(context: Context) -> ClientData:
    """Return the data of one node's client: here a part of one data set, at yours what is on disk."""
    return digits(int(context.run_config["clients"])).client(int(context.node_config["clients"]))
