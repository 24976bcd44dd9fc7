"""What a checkpoint holds of a server."""

from collections import deque
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt

from lit_pfl import Client, MixingServer, Payload, Server
from lit_pfl.core import ClientInfo
from lit_pfl.errors import ConfigError
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

ALL = {"model", "seed"}
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
def test_values_are_plain(method):
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


def two(server: Server) -> Server:
    """Return a server of two clients that share one tensor."""
    server.start({k: ClientInfo(3, Payload({"w": torch.ones(200)})) for k in range(2)})
    return server


def resumed(server: Server) -> Server:
    """Return a server of the same kind that has taken over the state, read as a checkpoint is."""
    file = BytesIO()
    torch.save(server.state_dict(), file)
    file.seek(0)
    other = two(type(server)())
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


class Alone(MixingServer):
    def mixing_matrix(self, round, latest):
        return torch.eye(len(latest))


def test_a_tensor_that_nobody_in_a_mixture_has_is_left_out():
    """As one that another client has just unfrozen."""
    server = two(Alone())
    upload = Payload({"w": torch.ones(200)})
    server.aggregate(1, {0: upload, 1: upload.with_({"new": torch.ones(1)})})
    assert [list(server.reply(k)) for k in range(2)] == [["w"], ["w", "new"]]


class More(Alone):
    """Keeps something beside what its base classes keep."""

    kept = ("more",)
    more: Any = None


def test_what_base_classes_keep_is_kept_too():
    server = two(More())
    server.aggregate(1, {0: Payload({"w": torch.zeros(200)}), 1: Payload({"w": torch.ones(200)})})
    server.more = 3
    other = resumed(server)
    assert other.more == 3
    assert [other.reply(k)["w"].sum() for k in range(2)] == [0, 200]


def test_payloads_that_are_kept_are_payloads_again_wherever_they_are():
    """With what of them is sent as sparse, and in factors: it decides how many bytes a reply has."""
    sparse = Payload({"w": torch.eye(20)}, sparse=["w"])
    factors = Payload({}, low_rank={"w": LowRank(torch.ones(20, 1), torch.ones(1, 20), (20, 20))})
    server = two(More())
    server.more = {"history": [sparse, factors], 7: sparse, "pair": (factors, {"step": 4})}
    more = resumed(server).more
    found = [*more["history"], more[7], more["pair"][0]]
    for payload, original in zip(found, [sparse, factors, sparse, factors], strict=True):
        assert isinstance(payload, Payload)
        assert torch.equal(payload["w"], original["w"])
        assert payload.nbytes == original.nbytes
    assert more["pair"][1] == {"step": 4}


def test_what_a_server_keeps_may_be_said_of_one_server():
    server, other = two(Alone()), two(Alone())
    for one in (server, other):
        one.kept = ("more",)
    server.more = 4
    other.load_state_dict(server.state_dict())
    assert (other.more, list(other.latest)) == (4, [])


@pytest.mark.parametrize(("value", "kind"), [(deque([1]), "deque"), ({"a": [object()]}, "object")])
def test_what_could_not_be_read_again_is_not_written(value, kind):
    server = two(More())
    server.more = value
    with pytest.raises(ConfigError, match=rf"^More\.more holds a {kind}, which no checkpoint can; keep tensors, "):
        server.state_dict()


def test_numbers_of_the_command_line_are_plain_in_a_checkpoint():
    server = two(More())
    server.more = [PositiveInt(3), PositiveFloat(0.5), True, np.int64(4), np.str_("word")]
    more = resumed(server).more
    assert more == [3, 0.5, True, 4, "word"]
    assert [type(one) for one in more] == [int, float, bool, int, str]


def test_a_model_in_factors():
    server = started(FedSLR)
    low_rank = LowRank(torch.ones(12, 1), torch.ones(1, 3), (4, 1, 3, 3))
    server.model = Payload({"b": torch.ones(1)}, low_rank={"w": low_rank})
    state = server.state_dict()
    assert list(state["model"]["tensors"]) == ["b"]
    assert state["model"]["factors"] == {"w": (low_rank.left, low_rank.right, low_rank.shape)}
    other = started(FedSLR)
    other.load_state_dict(state)
    assert torch.equal(other.model["w"], low_rank.dense())
    assert other.model.nbytes == server.model.nbytes
