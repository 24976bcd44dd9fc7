"""What a checkpoint holds of a server: names and contents are those of earlier versions."""

import pytest
import torch

from lit_pfl import Client, MixingServer, Payload, Server
from lit_pfl.core import ClientInfo
from lit_pfl.methods import (
    APPLE,
    AgnosticFL,
    ClusteredFL,
    FactorizedFL,
    FedAvg,
    FedCAC,
    FedDyn,
    FedFOMO,
    FedMA,
    FedSLR,
    FedSpa,
    PFedSim,
    Scaffold,
    SimFed,
)  # fmt: skip
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops.low_rank import LowRank
from lit_pfl.testing.method_tester import PlainNet
from tiny import assert_equal, client, spec

ALL = {"model", "sparse", "seed"}
MIXED = {"latest", "weights"}
#: by method, what its server keeps beside the model
KEPT = {
    FedAvg: set(), SimFed: MIXED, FactorizedFL: MIXED, AgnosticFL: {"lambdas"}, FedDyn: {"deviation"},
    ClusteredFL: {"models", "place", "forks", "scale"}, FedFOMO: {"latest", "affinity", "round"},
    FedMA: {"step", "seen", "assignments", "finished"}, FedSLR: {"dual", "duals"}, FedSpa: {"masks", "round"},
    Scaffold: {"control"}, PFedSim: MIXED | {"similarity"}, APPLE: {"relations", "cores", "round"}, FedCAC: MIXED,
}  # fmt: skip


def started(method: type[Client]) -> Server:
    """Return a method's server, two clients having joined."""
    options = {"backbone": PlainNet} if method is FedMA else {}
    if method is FactorizedFL:
        options["factorization"] = Factorization(form="FFxIO")
    members = [client(method, **options).build(spec(channels=1, image_size=8, local_epochs=2)) for _ in range(2)]
    server = members[0].configure_server()
    server.start({k: ClientInfo(10 + k, member.initial()) for k, member in enumerate(members)})
    return server


@pytest.mark.parametrize("method", KEPT, ids=lambda method: method.__name__)
def test_names_are_what_they_were_and_values_are_plain(method):
    server = started(method)
    state = server.state_dict()
    assert state.keys() == ALL | KEPT[method]

    def plain(value) -> bool:
        return all(map(plain, value.values())) if isinstance(value, dict) else not isinstance(value, Payload)

    assert plain(state)
    other = started(method)
    other.load_state_dict(state)
    assert_equal(other.state_dict(), state)
    assert all(isinstance(one, Payload) for one in (server.model, other.model))


def test_of_a_mixing_server_before_its_first_round_earlier_versions_kept_nothing():
    server = MixingServer()
    server.start({0: ClientInfo(3, Payload({"w": torch.ones(2)}))})
    server.load_state_dict({"model": {"w": torch.zeros(2)}, "sparse": [], "seed": 4})
    assert server.latest == {}
    assert server.mixing() is None
    assert torch.equal(server.reply(0)["w"], torch.zeros(2))


class Alone(MixingServer):
    def mixing_matrix(self, round, latest):
        return torch.eye(len(latest))


def test_a_tensor_that_nobody_in_a_mixture_has_is_left_out():
    """As one that another client has just unfrozen."""
    server = Alone()
    server.start({k: ClientInfo(3, Payload({"w": torch.ones(2)})) for k in range(2)})
    server.aggregate(1, {0: Payload({"w": torch.ones(2)}), 1: Payload({"w": torch.ones(2), "new": torch.ones(1)})})
    assert [list(server.reply(k)) for k in range(2)] == [["w"], ["w", "new"]]


def test_uploads_that_are_kept_are_payloads_again():
    server = started(SimFed)
    name = next(iter(server.model.sparse))
    state = server.state_dict()
    state["latest"] = {1: {name: torch.eye(3)}}
    server.load_state_dict(state)
    assert isinstance(server.latest[1], Payload)
    assert name in server.latest[1].sparse


@pytest.mark.parametrize("factors", [{"factors": {}}, {}], ids=["as earlier versions wrote it", "as it is written"])
def test_a_model_without_factors(factors):
    server = started(FedSLR)
    server.load_state_dict({**server.state_dict(), **factors})
    assert server.model.low_rank == {}


def test_a_model_in_factors():
    server = started(FedSLR)
    low_rank = LowRank(torch.ones(12, 1), torch.ones(1, 3), (4, 1, 3, 3))
    server.model = Payload({"b": torch.ones(1)}, low_rank={"w": low_rank})
    state = server.state_dict()
    assert list(state["model"]) == ["b"]
    assert state["factors"] == {"w": (low_rank.left, low_rank.right, low_rank.shape)}
    other = started(FedSLR)
    other.load_state_dict(state)
    assert torch.equal(other.model["w"], low_rank.dense())
    assert other.model.nbytes == server.model.nbytes
