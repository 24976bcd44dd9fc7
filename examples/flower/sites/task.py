"""What is learnt, and on what: the one part that is yours to change."""

from functools import partial

import torch
from flwr.app import Context, UserConfig

from lit_pfl import Client, methods
from lit_pfl.core import ClientSpec
from lit_pfl.data import ClientData, Digits, Dirichlet
from lit_pfl.models import VGG9, ResNet9

BACKBONES = {"PsiNet": partial(VGG9, width=8, norm="batch")}


def method(config: UserConfig) -> Client:
    """Return the method, the same for all sites and the server."""
    name = str(config["method"])
    return getattr(methods, name)(backbone=BACKBONES.get(name, partial(ResNet9, width=4)))


def spec(config: UserConfig) -> ClientSpec:
    """Return what sites are to learn, for the server: images of 16 x 16, ten classes; it has no data."""
    return ClientSpec(example=(torch.zeros(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)), num_classes=10)


def digits(clients: int) -> Digits:
    """Return the digits of all sites, with other classes at each."""
    data = Digits(num_clients=clients, partition=Dirichlet(alpha=0.5), batch_size=32)
    data.setup()
    return data


def data(context: Context) -> dict[int, ClientData]:
    """Return the data of one node's clients, by client id: here parts of one data set, at yours what is on disk."""
    everybody = digits(int(context.run_config["clients"]))
    mine = str(context.node_config["clients"]).split(",")
    return {int(client): everybody.client(int(client)) for client in mine}
