"""Differential privacy of clients: what the server is handed, what it costs, and where a run ends."""

import math

import numpy as np
import pytest
import torch

from cli.typed import TINY, rows, typed
from lit_pfl import Federation, Payload, Server
from lit_pfl.core.participation import Bernoulli, Sampling
from lit_pfl.core.privacy import ClientPrivacy, epsilon
from lit_pfl.core.robust import CoordinateMedian
from lit_pfl.core.server import ClientInfo, UniformServer
from lit_pfl.core.updates import update_norm
from lit_pfl.errors import ConfigError
from lit_pfl.methods import (
    AgnosticFL,
    ClusteredFL,
    Ditto,
    FedAdam,
    FedAvg,
    FedDBE,
    FedDyn,
    FedExP,
    FedKD,
    FedNova,
    FedSpa,
    Scaffold,
    SimFed,
)
from lit_pfl.methods.factorized.fedslr import FedSLRServer
from lit_pfl.methods.factorized.structures import STRUCTURES
from lit_pfl.methods.global_model.feddyn import FedDynServer
from tiny import assert_equal, client, digits, run, trainer, weights

dp_accounting = pytest.importorskip("dp_accounting")

SAMPLES = {0: 10, 3: 70, 5: 33, 8: 1}


def payload(seed: int, scale: float = 1.0) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    return Payload({"w": scale * torch.randn(4000, 3, generator=generator), "b": torch.randn(7, generator=generator)})


CENTER, UPLOADS = payload(99), {k: payload(k, 1 + k) for k in SAMPLES}


def started(privacy: ClientPrivacy, server: Server | None = None, sampling: Sampling | None = None, seed: int = 1):
    server = server or Server()
    server.start({k: ClientInfo(n, CENTER) for k, n in SAMPLES.items()})
    privacy.start(server, dict.fromkeys(SAMPLES, CENTER.layout), sampling or Sampling(), seed)
    return server


def flat(tensors) -> np.ndarray:
    return np.concatenate([tensors[name].double().flatten().numpy() for name in ("w", "b")])


@pytest.mark.parametrize("server", [Server, UniformServer])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling("poisson", 0.5)])
def test_the_mean_of_protected_uploads_is_the_sum_of_clipped_updates_over_the_expected_number(server, sampling):
    """Whatever the weights: every client counts the same."""
    privacy = ClientPrivacy(0.0, clip=200.0, delta=1e-5)
    made = started(privacy, server(), sampling)
    made.aggregate(1, privacy.protect_centrally(1, made, UPLOADS, len(UPLOADS)))
    updates = [flat(u) - flat(CENTER) for u in UPLOADS.values()]
    clipped = [u * min(1, 200 / np.linalg.norm(u)) for u in updates]
    assert any(np.linalg.norm(u) < 200 for u in updates)
    assert any(np.linalg.norm(u) > 400 for u in updates)
    expected = flat(CENTER) + sum(clipped) / (0.5 * 4 if sampling.kind == "poisson" else 4)
    np.testing.assert_allclose(flat(made.model), expected, rtol=1e-4, atol=1e-4)


def test_noise_of_the_mean_has_the_deviation_that_is_asked_for():
    privacy, plain = ClientPrivacy(2.0, clip=50.0), ClientPrivacy(0.0, clip=50.0)
    noised, clean = started(privacy), started(plain)
    noised.aggregate(1, privacy.protect_centrally(1, noised, UPLOADS, 4))
    clean.aggregate(1, plain.protect_centrally(1, clean, UPLOADS, 4))
    noise = flat(noised.model) - flat(clean.model)
    assert noise.std() == pytest.approx(2.0 * 50 / 4, rel=0.03)
    assert abs(noise.mean()) < 1


def test_local_noise_is_in_every_upload():
    privacy = ClientPrivacy(0.5, clip=10.0, where="local")
    server = started(privacy)
    sent = privacy.protect_locally(1, server, UPLOADS)
    for k, upload in sent.items():
        update = flat(UPLOADS[k]) - flat(CENTER)
        noise = flat(upload) - flat(CENTER) - update * 10 / np.linalg.norm(update)
        assert noise.std() == pytest.approx(5, rel=0.03)
    assert privacy.protect_centrally(1, server, sent, 4) == sent
    others = [flat(sent[k]) - flat(UPLOADS[k]) for k in SAMPLES]
    assert abs(np.corrcoef(others)[0, 1]) < 0.1


def test_noise_follows_from_seed_round_and_client():
    def noised(seed, round):
        privacy = ClientPrivacy(1.0)
        server = started(privacy, seed=seed)
        return flat(privacy.protect_centrally(round, server, UPLOADS, 4)[3])

    np.testing.assert_array_equal(noised(1, 1), noised(1, 1))
    assert not np.array_equal(noised(1, 1), noised(1, 2))
    assert not np.array_equal(noised(1, 1), noised(2, 1))


def test_the_clip_adapts_to_a_quantile():
    """Andrew et al. 2021, Eq. 3, without noise; then it settles at the median of the norms."""
    privacy = ClientPrivacy(0.0, clip=1.0, quantile=0.5, quantile_lr=0.3)
    server = started(privacy)
    privacy.protect_centrally(1, server, UPLOADS, 4)
    assert privacy.clip == pytest.approx(math.exp(-0.3 * (0 - 0.5)))  # none is shorter
    for round in range(2, 200):
        privacy.protect_centrally(round, server, UPLOADS, 4)
    norms = sorted(update_norm(u, CENTER) for u in UPLOADS.values())
    assert norms[1] * 0.8 < privacy.clip < norms[2] * 1.2
    assert privacy.report(1)["privacy/clip"] == privacy.clip


@pytest.mark.parametrize("where", ["central", "local"])
def test_the_clip_holds_for_uploads_of_any_length(where):
    """The reference would be lost beside an update of 1e20, if it were the difference of the two."""
    privacy = ClientPrivacy(0.0, clip=1.0, where=where)
    server = started(privacy)
    huge = Payload({name: tensor * 1e20 for name, tensor in UPLOADS[3].items()})
    given = {**UPLOADS, 3: huge}
    sent = (
        privacy.protect_centrally(1, server, given, 4)
        if where == "central"
        else privacy.protect_locally(1, server, given)
    )
    weights = server.averaging_weights(1, given) if where == "central" else [1.0] * 4
    for (name, upload), weight in zip(sent.items(), weights, strict=True):
        moved = np.linalg.norm(flat(upload).astype(float) - flat(CENTER))
        assert moved <= (1 / (4 * weight) if where == "central" else 1.0) + 1e-4, name


def test_an_update_of_somebody_who_was_not_drawn_is_left_out():
    """As in Poisson sampling, where such a round has noise alone."""
    privacy = ClientPrivacy(0.0, clip=1.0, quantile=0.5, quantile_lr=0.3)
    server = started(privacy, sampling=Sampling("poisson", 0.5))
    protected = privacy.protect_centrally(1, server, {3: UPLOADS[3]}, 0)
    np.testing.assert_allclose(flat(protected[3]), flat(CENTER), atol=1e-6)
    assert privacy.clip == pytest.approx(math.exp(-0.3 * (0.5 - 0.5)))  # nobody's norm is in the share
    drawn = privacy.protect_centrally(2, server, {3: UPLOADS[3]}, 1)
    assert np.abs(flat(drawn[3]) - flat(CENTER)).max() > 1e-3


def test_noise_of_counts_is_what_the_account_takes_it_to_be():
    """Also where some of the clients take part, and the account is of all."""
    found = []
    for count_noise in (0.25, 0.5):
        privacy = ClientPrivacy(0.1, clip=1e9, quantile=0.5, quantile_lr=1.0, count_noise=count_noise)
        server = started(privacy)  # four clients
        privacy.protect_centrally(1, server, {3: UPLOADS[3]}, 1)
        found.append(math.log(privacy.clip / 1e9) + (1 / 2 + 0.5 - 0.5))
    drawn = privacy.draws.generator("privacy of counts", 1).standard_normal()
    assert found == pytest.approx([-0.25 * 4 * drawn, -0.5 * 4 * drawn])


@pytest.mark.seconds
def test_a_round_in_which_nobody_is_drawn_leaves_the_model_where_it_was():
    """But for the noise, of which there is none here: so it is the same for any clip."""

    def model(probability, clip):
        options = {"noise_multiplier": 0.0, "clip": clip}
        return private(rounds=1, privacy=options, participation=Bernoulli(probability))[0].coordinator.server.model

    assert_equal(dict(model(1e-9, 0.1)), dict(model(1e-9, 10.0)))
    with pytest.raises(AssertionError):
        assert_equal(dict(model(0.9, 0.1)), dict(model(0.9, 10.0)))


def test_counts_take_their_part_of_the_noise():
    """Together they cost what one round of updates with the given multiplier does (Theorem 1)."""
    privacy = ClientPrivacy(0.3, clip=1.0, quantile=0.5, count_noise=0.25)
    started(privacy)
    updates, counts = privacy._noise_of_updates(), 0.25 * 4
    assert updates**-2 + (2 * counts) ** -2 == pytest.approx(0.3**-2)
    with pytest.raises(ConfigError, match=r"federation.privacy.count_noise=0.01: give more than 0.0375"):
        started(ClientPrivacy(0.3, quantile=0.5, count_noise=0.01))


# What it costs


def renyi(order: int, q: float, sigma: float) -> float:
    """Return a Poisson sampled Gaussian's Renyi divergence at a whole order (Mironov et al. 2019, Section 3.3)."""
    k = np.arange(order + 1)
    terms = [math.comb(order, int(i)) for i in k] * (1 - q) ** (order - k) * q**k * np.exp((k**2 - k) / (2 * sigma**2))
    return math.log(terms.sum()) / (order - 1)


def test_epsilon_of_a_published_setting():
    """Abadi et al. 2016, Section 3.2: q = 0.01, sigma = 4, 10,000 steps, delta = 1e-5: epsilon is about 1.26.

    Its conversion from moments is looser than the accountant's (Canonne et al. 2020), which gives less.
    """
    steps, delta, orders = 10_000, 1e-5, np.arange(2, 64)
    divergences = steps * np.array([renyi(int(order), 0.01, 4.0) for order in orders])
    classical = divergences - math.log(delta) / (orders - 1)
    assert classical.min() == pytest.approx(1.26, abs=0.01)
    tighter = divergences + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert epsilon(steps, 4.0, delta, "poisson", 0.01) == pytest.approx(tighter.min(), rel=1e-6)
    assert epsilon(100, 4.0, delta, "poisson", 0.01, 0, "pld") < epsilon(100, 4.0, delta, "poisson", 0.01)


@pytest.mark.seconds
def test_epsilon_is_the_accountant_s():
    d = dp_accounting
    account = d.rdp.RdpAccountant()
    account.compose(d.PoissonSampledDpEvent(0.05, d.GaussianDpEvent(0.8)), 40)
    assert epsilon(40, 0.8, 1e-6, "poisson", 0.05) == account.get_epsilon(1e-6)
    account = d.rdp.RdpAccountant(neighboring_relation=d.NeighboringRelation.REPLACE_ONE)
    account.compose(d.SampledWithoutReplacementDpEvent(100, 10, d.GaussianDpEvent(1.0)), 20)
    assert epsilon(20, 2.0, 1e-5, "fixed", 0.1, 100) == account.get_epsilon(1e-5)
    account = d.pld.PLDAccountant()
    account.compose(d.GaussianDpEvent(5.0), 10)
    assert epsilon(10, 5.0, 1e-5) == pytest.approx(account.get_epsilon(1e-5), rel=1e-3)
    assert epsilon(10, 10.0, 1e-5, "replaced") == epsilon(10, 5.0, 1e-5)  # an upload may be any other within the clip
    assert epsilon(0, 1.0, 1e-5) == 0
    assert epsilon(3, 0.0, 1e-5) == math.inf


def test_local_epsilon_is_that_of_the_client_that_took_part_most_often():
    privacy = ClientPrivacy(4.0, where="local")
    server = started(privacy)
    for round in range(1, 4):
        privacy.protect_locally(round, server, {k: UPLOADS[k] for k in ([3] if round > 1 else SAMPLES)})
    assert privacy.taken == {0: 1, 3: 3, 5: 1, 8: 1}
    assert privacy.epsilon(3) == epsilon(3, 4.0, 1e-5, "replaced")


# In a federation


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def private(method=FedAvg, rounds: int = 2, path=None, privacy: dict | None = None, **options):
    made = ClientPrivacy(**{"noise_multiplier": 1.0, "clip": 0.5, **(privacy or {})})
    federation = Federation(client(method, optimizer=sgd), **{"seed": 3, "threads": 1, "privacy": made, **options})
    fitting = trainer(rounds)
    fitting.fit(federation, datamodule=digits(6), ckpt_path=path)
    return federation, fitting


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, Ditto, FedDyn, FedKD, FedDBE, FedAdam])
def test_epsilon_is_logged_every_round(method):
    _, fitting = private(method, participation=Bernoulli(0.5))
    assert float(fitting.callback_metrics["privacy/epsilon"]) == pytest.approx(epsilon(2, 1.0, 1e-5, "poisson", 0.5))


@pytest.mark.parametrize("taking_part", [2, 4, 6])
def test_a_server_that_sums_over_clients_does_not_tell_how_many_there_were(taking_part):
    everybody = range(8)
    infos = {k: ClientInfo(1, Payload({"w": torch.zeros(3)})) for k in everybody}
    for server in (
        FedDynServer(frozenset({"w"})),
        FedSLRServer(frozenset({"w"}), 0.0, 2.0, STRUCTURES["low_rank"], False),
    ):
        server.start(infos)
        privacy = ClientPrivacy(0.0, clip=1.0)
        privacy.start(server, {k: infos[k].initial.layout for k in everybody}, Sampling("poisson", 0.5), seed=1)
        uploads = {k: Payload({"w": torch.full((3,), 0.1)}) for k in everybody[:taking_part]}
        server.aggregate(1, privacy.protect_centrally(1, server, uploads, taking_part))
        kept = server.deviation if isinstance(server, FedDynServer) else server.dual
        step = 1 if isinstance(server, FedDynServer) else -1 / 2
        torch.testing.assert_close(kept["w"], torch.full((3,), step * taking_part * 0.1 / 8))


@pytest.mark.parametrize("method", [SimFed, Scaffold, ClusteredFL, AgnosticFL, FedExP])
def test_methods_that_use_single_uploads_take_local_noise_only(method):
    with pytest.raises(ConfigError, match=r"federation.privacy.where=central: [\w ]+ uses single uploads"):
        private(method)
    federation, fitting = private(method, privacy={"where": "local", "noise_multiplier": 0.1})
    assert math.isfinite(fitting.callback_metrics["privacy/epsilon"])
    assert federation.refused == []


def test_what_privacy_does_not_cover():
    with pytest.raises(ConfigError, match=r"tensor '.*' holds torch.uint8, to which no noise is added"):
        private(FedSpa, privacy={"where": "local"})
    with pytest.raises(ConfigError, match=r"tensor 'steps' holds counts, to which no noise is added"):
        private(FedNova, privacy={"where": "local"})
    with pytest.raises(ConfigError, match="without model.mean"):
        run(client(FedAvg, mean=CoordinateMedian()), privacy=ClientPrivacy())
    for options, said in (
        ({"clip": 0}, "privacy.clip=0: give a number above 0"),
        ({"clip": float("inf")}, "privacy.clip=inf: give a finite number"),
        ({"noise_multiplier": float("inf")}, "privacy.noise_multiplier=inf: give a finite number"),
        ({"delta": 1}, "privacy.delta=1: give a number above 0 and below 1"),
        ({"where": "somewhere"}, "privacy.where='somewhere': choose central, local"),
        ({"quantile": 0.5, "where": "local"}, "a local clip cannot adapt"),
    ):
        with pytest.raises(ConfigError, match=said):
            ClientPrivacy(**options)


@pytest.mark.seconds
@pytest.mark.parametrize("where", ["central", "local"])
def test_a_resumed_run_is_the_same(tmp_path, where):
    privacy = {"where": where} | ({"quantile": 0.5, "count_noise": 0.5} if where == "central" else {})
    whole, fitting = private(rounds=4, privacy=privacy)
    _, first = private(rounds=2, privacy=privacy)
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed, again = private(rounds=4, privacy=privacy, path=tmp_path / "two.ckpt")
    assert_equal(weights(whole), weights(resumed))
    assert whole.coordinator.privacy.state_dict() == resumed.coordinator.privacy.state_dict()
    spent = epsilon(4, 1.0, 1e-5, "all" if where == "central" else "replaced")
    for one in (fitting, again):
        assert float(one.callback_metrics["privacy/epsilon"]) == pytest.approx(spent)


@pytest.mark.seconds
def test_epsilon_of_a_resumed_run_covers_its_former_rounds(tmp_path):
    plain = Federation(client(FedAvg, optimizer=sgd), seed=3, threads=1)
    without = trainer(1)
    without.fit(plain, datamodule=digits(6))
    without.save_checkpoint(tmp_path / "without.ckpt")
    _, first = private(rounds=1, privacy={"noise_multiplier": 0.5})
    first.save_checkpoint(tmp_path / "with.ckpt")
    for path, privacy, said in (
        ("with", {"noise_multiplier": 8.0}, r"noise_multiplier=0.5, clip=0.5, where=central\), not .*multiplier=8.0"),
        ("with", {"noise_multiplier": 0.5, "clip": 9.0}, r"clip=0.5, where=central\), not .*clip=9.0"),
        ("with", {"noise_multiplier": 0.5, "where": "local"}, "where=central.*where=local"),
        ("with", {"noise_multiplier": 0.5, "quantile": 0.5, "count_noise": 0.5}, "quantile=0.5"),
        ("without", {}, "with none, not ClientPrivacy"),
    ):
        with pytest.raises(ConfigError, match=f"federation.privacy: the checkpoint is of a run.*{said}"):
            private(privacy=privacy, path=tmp_path / f"{path}.ckpt")
    other = Federation(client(FedAvg, optimizer=sgd), threads=1)
    with pytest.raises(ConfigError, match="federation.privacy: .* not none"):
        trainer(2).fit(other, datamodule=digits(6), ckpt_path=tmp_path / "with.ckpt")
    trainer().test(other, datamodule=digits(6), ckpt_path=tmp_path / "with.ckpt")
    _, again = private(privacy={"noise_multiplier": 0.5, "delta": 1e-3, "budget": 99.0}, path=tmp_path / "with.ckpt")
    assert float(again.callback_metrics["privacy/epsilon"]) == pytest.approx(epsilon(2, 0.5, 1e-3))
    made = Federation(client(FedAvg, optimizer=sgd), threads=1, privacy=ClientPrivacy(1.0))
    trainer().test(made, datamodule=digits(6), ckpt_path=tmp_path / "without.ckpt")  # which takes no privacy


@pytest.mark.seconds
def test_a_run_ends_before_its_budget_is_exceeded(tmp_path):
    budget = epsilon(3, 1.0, 1e-5) + 0.01
    federation, fitting = private(rounds=9, privacy={"budget": budget})
    assert federation.coordinator.round == 3
    assert fitting.callback_metrics["privacy/epsilon"] <= budget
    assert {row.split for row in federation.rows} == {"test"}  # the models of the last round are tested as ever
    fitting.save_checkpoint(tmp_path / "three.ckpt")
    with pytest.raises(ConfigError, match=r"epsilon is \S+ after round 3, and another round would exceed the budget"):
        private(rounds=9, privacy={"budget": budget}, path=tmp_path / "three.ckpt")
    larger, _ = private(rounds=9, privacy={"budget": 1.3 * budget}, path=tmp_path / "three.ckpt")
    assert 3 < larger.coordinator.round < 9
    with pytest.raises(ConfigError, match=r"federation.privacy.budget=0.1: the first round takes"):
        private(privacy={"budget": 0.1})


@pytest.mark.seconds
def test_privacy_on_the_command_line(capsys, tmp_path):
    words = ["fit", *TINY, "--model", "FedAvg", "--model.factorization", "null", "--folder", str(tmp_path / "run")]
    came = typed(capsys, *words, "--federation.privacy", "ClientPrivacy", "--federation.privacy.noise_multiplier", "2")
    assert came.code == 0, came.errors
    spent = [float(row["privacy/epsilon"]) for row in rows(tmp_path / "run" / "metrics.csv") if row["privacy/epsilon"]]
    assert spent == [pytest.approx(epsilon(r, 2.0, 1e-5)) for r in (1, 2)]
    again = ["fit", "--config", str(tmp_path / "run" / "config.yaml"), "--trainer.max_epochs", "3"]
    resumed = ["--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt"), "--federation.privacy.delta", "1e-3"]
    came = typed(capsys, *again, *resumed)
    assert came.code == 0, came.errors
    assert float(rows(tmp_path / "run" / "metrics.csv")[-1]["privacy/epsilon"] or spent[-1]) < spent[-1]


@pytest.mark.parametrize(
    ("rounds", "noise", "kind", "share"),
    [(10, 1.0, "fixed", 0.99), (3, 1000.0, "fixed", 0.05), (3, 0.05, "fixed", 0.5), (10, 1.0, "poisson", 0.999)],
)
def test_being_drawn_costs_no_more_than_being_there_always(rounds, noise, kind, share, capfd):
    always = "all" if kind == "poisson" else "replaced"
    assert epsilon(rounds, noise, 1e-5, kind, share, 100) <= epsilon(rounds, noise, 1e-5, always)
    assert "WARNING" not in capfd.readouterr().err
