"""What FedDyn and SCAFFOLD keep of clients' drift, at each client and as a mean at the server."""

import numpy as np
import pytest
import torch
from quadratic import OnceBroken, Quadratics, equal, flat, quadratic, sgd

from lit_pfl.methods import FedDyn, Scaffold
from tiny import client, digits, run, weights

PLAIN = {"optimizer": sgd(0.1)}
pytestmark = pytest.mark.parametrize(
    ("method", "kept", "options"),
    [(FedDyn, "deviation", {"alpha": 0.1}), (Scaffold, "control", {"server_lr": 0.5})],
    ids=["FedDyn", "Scaffold"],
)


def of_clients(federation, kept) -> np.ndarray:
    return np.stack([flat(dict(getattr(member, kept).items())) for member in federation.clients.values()])


def test_that_of_others_stays_and_the_mean_is_the_server_s(method, kept, options):
    federations = [run(client(method, **PLAIN, **options), rounds=r, participation=0.5) for r in (2, 3)]
    before, after = (of_clients(federation, kept) for federation in federations)
    moved = {k for k in range(4) if not np.array_equal(before[k], after[k])}
    assert moved == set(federations[0].participants(2))
    np.testing.assert_allclose(after.mean(0), flat(getattr(federations[1].coordinator.server, kept)), atol=1e-6)


def test_a_refused_client_forgets_what_the_server_never_knew(method, kept, options):
    broken = type("Method", (method, OnceBroken), {})
    own = {"alpha": 3.0} if method is FedDyn else {}
    with pytest.warns(UserWarning, match="Client 2"):
        federation = run(quadratic(broken, Quadratics.random(), **own), equal(4), rounds=5)
    server = federation.coordinator.server
    np.testing.assert_allclose(of_clients(federation, kept).mean(0), flat(getattr(server, kept)), atol=1e-9)
    assert np.isfinite(flat(server.model)).all()


def test_heads_at_home_have_none(method, kept, options):
    federation = run(client(method, **PLAIN, **options), digits(3, permute_labels=True), rounds=2)
    member = federation.clients[1]
    assert not [name for name in [*member.upload(), *getattr(member, kept)] if ".head." in name]
    heads = [state["backbone.head.weight"] for state in weights(federation).values()]
    member.download(federation.coordinator.server.reply(1))
    assert torch.equal(member.backbone.head.weight, heads[1])
    assert not torch.equal(heads[0], heads[1])


def test_averaged_running_statistics_are_averaged_and_no_more(method, kept, options):
    federation = run(client(method, norm_stats="averaged", **PLAIN, **options), rounds=2)
    server, members = federation.coordinator.server, federation.clients.values()
    for name in (f"backbone.body.1.{kind}" for kind in ("running_mean", "running_var")):
        mean = torch.stack([member.learner.get_buffer(name) for member in members]).mean(0)
        torch.testing.assert_close(server.model[name], mean)
    assert server.model["backbone.body.1.num_batches_tracked"].dtype == torch.int64
    for holder in (server, *members):
        assert all("running" not in name and "tracked" not in name for name in getattr(holder, kept))
