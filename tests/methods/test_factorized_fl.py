"""Factorized-FL against its formulas."""

import numpy as np
import pytest
import torch

import lit_pfl.data.datamodule as datamodule
from lit_pfl import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.data import label_permutation
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FactorizedFL, FedAvg
from lit_pfl.methods.factorized.factorized_fl import FactorizedFLServer, MatchingRule
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, digits, run, spec, weights

V = "backbone.body.0.v"


def rule(**options) -> MatchingRule:
    defaults = {"tau": 0.0, "epsilon": 1.0, "min_matches": 1, "below_tau": "drop", "match": "best"}
    return MatchingRule(**{**defaults, "mixing": "simultaneous", **options})


def uploads(num_clients: int = 6, seed: int = 0) -> dict[int, Payload]:
    g = torch.Generator().manual_seed(seed)
    return {
        k: Payload({"u": torch.randn(9, 1, generator=g), V: torch.randn(40, 1, generator=g)})
        for k in range(num_clients)
    }


def replies(own: dict[int, Payload], mixed: bool = False, **options) -> dict[str, np.ndarray]:
    server = FactorizedFLServer(rule(**options), V, mixed, seed=5)
    server.start({k: ClientInfo(10, upload) for k, upload in own.items()})
    server.aggregate(1, own)
    return {n: np.stack([server.reply(k)[n].numpy() for k in own]) for n in server.reply(0)}


def by_the_formulas(
    own: dict[int, Payload], name: str, tau: float, epsilon: float, n_min: int, zero: bool
) -> np.ndarray:
    """Eq. 5 in NumPy: u_k <- sum_i softmax(epsilon sigma_ki) u_i over the partners of k."""
    v = np.stack([upload[V].numpy().ravel().astype(np.float64) for upload in own.values()])
    theta = np.stack([upload[name].numpy().astype(np.float64) for upload in own.values()])
    new = []
    for k in range(len(v)):
        sigma = v @ v[k] / (np.linalg.norm(v, axis=1) * np.linalg.norm(v[k]))
        order = np.argsort(-sigma)
        chosen = order[: max((sigma >= tau).sum(), n_min)]
        if zero:
            sigma, chosen = np.where(sigma >= tau, sigma, 0), order
        scores = np.exp(epsilon * sigma[chosen])
        new.append(np.tensordot(scores / scores.sum(), theta[chosen], axes=1))
    return np.stack(new)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("tau", "epsilon", "n_min"), [(0.95, 20.0, 4), (0.0, 1.0, 1), (0.05, 5.0, 2)])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_server_step_equals_the_formulas(tau, epsilon, n_min, zero, mixed):
    own = uploads()
    below = "zero" if zero else "drop"
    got = replies(own, mixed, tau=tau, epsilon=epsilon, min_matches=n_min, below_tau=below)
    assert set(got) == ({"u", V} if mixed else {"u"})  # v goes up to be compared, and does not come back
    for name, values in got.items():
        np.testing.assert_allclose(values, by_the_formulas(own, name, tau, epsilon, n_min, zero), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"tau": 0.05, "min_matches": 2}, {"match": "worst"}, {"below_tau": "zero"}])
def test_mixing_does_not_care_who_has_which_number(options):
    own = uploads()
    order = [3, 5, 0, 1, 4, 2]
    straight = replies(own, epsilon=3.0, **options)["u"]
    shuffled = replies({k: own[j] for k, j in enumerate(order)}, epsilon=3.0, **options)["u"]
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-6)


def test_clients_with_the_same_v_get_the_plain_mean_of_u():
    own = {k: Payload({**upload, V: torch.ones(40, 1)}) for k, upload in uploads().items()}
    mean = np.mean([upload["u"].numpy() for upload in own.values()], axis=0)
    np.testing.assert_allclose(replies(own, tau=0.9, epsilon=20.0)["u"], np.stack([mean] * 6), atol=1e-6)


def test_clients_with_orthogonal_v_stand_alone():
    own = {k: Payload({**upload, V: torch.eye(40)[:, k : k + 1]}) for k, upload in uploads().items()}
    u = replies(own, tau=0.1)["u"]
    assert all(np.array_equal(u[k], upload["u"].numpy()) for k, upload in own.items())


def test_the_worst_and_random_matches_are_three_others_and_oneself():
    own = uploads()
    for match in ("worst", "random"):
        got = rule(match=match).weights(torch.rand(6, 6).fill_diagonal_(1), np.random.default_rng(0))
        assert ((got > 0).sum(1) == 4).all()
        assert (got.diagonal() > 0).all()
    assert np.array_equal(replies(own, match="none")["u"], np.stack([upload["u"] for upload in own.values()]))


def test_sequential_mixing_uses_what_is_mixed_already():
    own = uploads()
    one, other = (replies(own, mixing=mixing)["u"] for mixing in ("simultaneous", "sequential"))
    assert not np.allclose(one, other)
    w = rule().weights(
        torch.from_numpy(np.corrcoef(np.stack([u[V].ravel() for u in own.values()]))), np.random.default_rng()
    )
    assert torch.allclose(w.sum(1), torch.ones(6, dtype=w.dtype))


class EvenServer(Server):
    def averaging_weights(self, round, uploads):
        return [1 / len(uploads)] * len(uploads)


class EvenFedAvg(FedAvg):
    def configure_server(self):
        return EvenServer()


@pytest.mark.seconds
def test_all_alike_and_everything_mixed_it_is_factorized_fedavg():
    kind = Factorization(form="FFxIO", l1=1e-3)
    beta = run(client(FactorizedFL, mixes="uvm", tau=-1.0, epsilon=0.0, factorization=kind), rounds=3)
    fedavg = run(client(EvenFedAvg, factorization=kind), rounds=3)
    for k, state in weights(fedavg).items():
        for name, tensor in state.items():
            torch.testing.assert_close(weights(beta)[k][name], tensor, atol=1e-5, rtol=0, msg=name)


TRAVELS = {
    "u": {"body.0.u", "body.1.weight", "body.1.bias", "body.0.bias", "head.u", "head.bias"},
    "uv": {"body.0.v", "head.v"},
    "um": {"body.0.mu", "head.mu"},
    "uvm": {"body.0.v", "head.v", "body.0.mu", "head.mu"},
}


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("mixes", TRAVELS)
def test_what_travels(mixes, permuted):
    federation = run(client(FactorizedFL, mixes=mixes), digits(permute_labels=permuted), rounds=1)
    wanted = {f"backbone.{name}" for name in TRAVELS["u"] | TRAVELS[mixes]}
    if permuted:
        wanted = {name for name in wanted if ".head." not in name}
    assert set(federation.coordinator.server.reply(0)) == wanted
    assert set(federation.clients[0].upload()) == wanted | {V}


def test_the_v_that_is_compared_is_that_before_the_classifier():
    from lit_pfl.models import ResNet9

    for layers, last in ((1, "body.6.0"), (2, "body.9")):
        method = FactorizedFL(backbone=lambda c, k, n=layers: ResNet9(c, k, width=4, fc_layers=n))
        member = method.build(spec())
        names = [name for name, _ in factorized_layers(member.backbone)]
        assert member.criterion == f"backbone.{names[-2]}.v"
        assert names[-2].startswith(last)


# The penalty and the threshold


def trained(**options):
    kind = Factorization(form="FFxIO", start="paper", **options)
    return run(client(FactorizedFL, factorization=kind, match="none"), rounds=2).clients[0]


def mus(member) -> torch.Tensor:
    return torch.cat([layer.mu.detach().flatten() for _, layer in factorized_layers(member)])


@pytest.mark.seconds
def test_the_penalty_shrinks_mu_unless_it_is_inert():
    free, inert = trained(l1=0.0), trained(l1=0.05, l1_mode="inert")
    assert_equal(free.state_dict(), inert.state_dict())
    for mode in ("subgradient", "proximal"):
        assert mus(trained(l1=0.05, l1_mode=mode)).abs().sum() < 0.5 * mus(free).abs().sum()


@pytest.mark.seconds
def test_only_the_proximal_step_makes_exact_zeros():
    assert (mus(trained(l1=0.05, l1_mode="proximal")) == 0).float().mean() > 0.3
    assert (mus(trained(l1=0.05)) == 0).float().mean() < 0.05


def test_a_proximal_step_is_soft_thresholding_at_lambda_times_the_learning_rate():
    kind = Factorization(form="FFxIO", l1=0.3, l1_mode="proximal")
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    member = client(FactorizedFL, factorization=kind, optimizer=sgd, scheduler=None).build(
        spec(channels=1, image_size=8)
    )
    layer = member.backbone.body[0]
    torch.nn.init.normal_(layer.mu, std=0.05)
    optimizer = member.configure_optimizers()
    (layer.mu**2).sum().backward()
    stepped = layer.mu.detach() - 0.1 * 2 * layer.mu.detach()
    optimizer.step()
    expected = stepped.sign() * (stepped.abs() - 0.03).clamp(min=0)
    torch.testing.assert_close(layer.mu.detach(), expected)


@pytest.mark.seconds
def test_small_entries_of_mu_count_as_zero_when_used_or_sent_but_are_trained_on():
    member = trained(l1=0.0, threshold=0.02)
    layer = member.backbone.body[0]
    assert 0 < (layer.mu.abs() < 0.02).sum() < layer.mu.numel()
    dense = layer.weight  # in training mode: mu as it is
    layer.eval()
    kept = layer.mu * (layer.mu.abs() >= 0.02)
    torch.testing.assert_close(layer.weight - dense, kept - layer.mu)
    beta = client(FactorizedFL, mixes="uvm", factorization=Factorization(form="FFxIO", threshold=0.02))
    member = run(beta, rounds=1).clients[0]
    sent = member.upload()
    zeros = sum(int((layer.mu.abs() < 0.02).sum()) for _, layer in factorized_layers(member))
    assert zeros > 0
    assert sent.elements == sum(tensor.numel() for tensor in sent.values()) - zeros


# Labels


class Relabelled(FactorizedFL):
    """Client 1 has its classes in another order; so has its head."""

    order: list[int] | None = None

    def configure_learner(self) -> None:
        super().configure_learner()
        if self.spec.client_id == 1 and self.order is not None:
            head = self.backbone.head
            with torch.no_grad():
                for tensor in (head.v, head.mu, head.bias):
                    before = tensor.clone()
                    for old, new in enumerate(self.order):
                        tensor[new] = before[old]


@pytest.mark.seconds
@pytest.mark.parametrize("mixes", ["u", "uvm"])
def test_numbering_the_classes_of_one_client_otherwise_changes_nothing_for_anybody(mixes, monkeypatch):
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    method = client(Relabelled, mixes=mixes)
    before = weights(run(method, digits(permute_labels=True), rounds=2))

    def renumbered(who: int, classes: int, seed: int = 1234) -> list[int]:
        labels = label_permutation(who, classes, seed)
        return [order[label] for label in labels] if who == 1 else labels

    monkeypatch.setattr(datamodule, "label_permutation", renumbered)
    method.order = order
    after = weights(run(method, digits(permute_labels=True), rounds=2))
    for k in before:
        for name, tensor in before[k].items():
            other = after[k][name]
            if k == 1 and name in ("backbone.head.v", "backbone.head.mu", "backbone.head.bias"):
                other = other[order]
            torch.testing.assert_close(other, tensor, atol=2e-5, rtol=1e-4, msg=f"{k} {name}")


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match=r"model\.factorization"):
        FactorizedFL(factorization=None)
    with pytest.raises(ConfigError, match=r"model\.mixes=um"):
        FactorizedFL(mixes="um", factorization=Factorization(form="FFxIO", mask=False))
    with pytest.raises(ConfigError, match="rawview"):
        client(FactorizedFL, factorization=Factorization(form="IFxOF", pi="rawview")).build(
            spec(channels=1, image_size=8)
        )
