"""Robust means as an option of methods."""

import warnings

import numpy as np
import pytest
import torch

import lit_pfl.methods
from cli.typed import TINY, typed
from lit_pfl import Client, Payload, Server
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.robust import (
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    RobustMean,
    TrimmedMean,
)
from lit_pfl.core.updates import update_norm, update_of, updated
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.methods import ClusteredFL, Ditto, FedAvg, FedIT, FedMA, PFedMe, PsiNet, Scaffold
from lit_pfl.methods.factorized.fedslr import FedSLRServer
from lit_pfl.models import MLP
from lit_pfl.testing.method_tester import LoRANet
from tiny import always_first, assert_equal, client, digits, run, weights

MEANS = [
    CoordinateMedian(), TrimmedMean(0.2), GeometricMedian(), Krum(2), MultiKrum(2), NormClipping(0.5), FLTrust(0),
]  # fmt: skip
UNIFORM = [0.1] * 10


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(4, 3, generator=generator).to(dtype),
        "b": torch.randn((), generator=generator).to(dtype),
        "n": torch.randint(100, (2,), generator=generator),
    }


CENTER = Payload(tensors(99))
UPLOADS = {k: Payload(tensors(k)) for k in range(10)}


def vectors(uploads: dict[int, Payload]) -> np.ndarray:
    return np.stack([np.concatenate([u["w"].double().flatten(), u["b"].double().view(1)]) for u in uploads.values()])


def averaged(mean: RobustMean, uploads=UPLOADS, given=UNIFORM, center=CENTER) -> tuple[np.ndarray, Payload]:
    result = mean(uploads, given, ["w", "b", "n"], center)
    assert result.layout == CENTER.layout or uploads is not UPLOADS
    return vectors({0: result})[0], result


def test_the_coordinate_median_is_numpy_s():
    found, result = averaged(CoordinateMedian())
    np.testing.assert_allclose(found, np.median(vectors(UPLOADS), axis=0), rtol=1e-6)
    counts = np.median(np.stack([u["n"].numpy() for u in UPLOADS.values()]), axis=0)
    assert result["n"].tolist() == np.round(counts).tolist()


def test_the_trimmed_mean_cuts_a_share_at_each_end():
    found, _ = averaged(TrimmedMean(0.2))
    np.testing.assert_allclose(found, np.sort(vectors(UPLOADS), axis=0)[2:-2].mean(0), rtol=1e-5, atol=1e-7)
    for share in (-0.1, 0.5):
        with pytest.raises(ConfigError, match=r"model.mean.share=.*below 0.5"):
            TrimmedMean(share)


def test_a_trimmed_mean_of_so_few_uploads_that_none_is_left_out_is_told():
    with pytest.warns(UserWarning, match=r"model.mean.share=0.05: of 10 uploads none is left out"):
        averaged(TrimmedMean(0.05))
    with warnings.catch_warnings(action="error"):
        averaged(TrimmedMean(0.1))
        averaged(TrimmedMean(0.0))


def test_krum_returns_an_upload_and_multi_krum_a_mean_of_some():
    x = vectors(UPLOADS)
    apart = ((x[:, None] - x[None]) ** 2).sum(-1)
    scores = np.sort(apart, axis=1)[:, 1:7].sum(1)  # the 10 - 2 - 2 nearest others
    best = np.argsort(scores)
    assert_equal(dict(averaged(Krum(2))[1]), dict(UPLOADS[int(best[0])]))
    np.testing.assert_allclose(averaged(MultiKrum(2))[0], x[best[:8]].mean(0), rtol=1e-5, atol=1e-7)
    for chosen in (3, 30):  # the latter is all
        found, _ = averaged(MultiKrum(2, chosen))
        np.testing.assert_allclose(found, x[best[:chosen]].mean(0), rtol=1e-5, atol=1e-7)
    with pytest.raises(UploadError, match=r"model.mean.byzantine=4: Krum needs 11 uploads in a round, .* 10;"):
        averaged(Krum(4))


def test_the_geometric_median_starts_at_the_weighted_mean():
    given = (np.arange(10) + 1) / 55
    x = vectors(UPLOADS)
    v = given @ x
    for _ in range(3):
        beta = given / np.linalg.norm(x - v, axis=1)
        v = beta @ x / beta.sum()
    np.testing.assert_allclose(averaged(GeometricMedian(), given=given.tolist())[0], v, rtol=1e-5, atol=1e-7)


def test_norm_clipping_shortens_updates():
    x, c = vectors(UPLOADS), vectors({0: CENTER})[0]
    updates = x - c
    lengths = np.linalg.norm(updates, axis=1)
    bound = float(np.median(lengths))
    shares = np.minimum(1, bound / lengths)[:, None]
    found, result = averaged(NormClipping(bound))
    np.testing.assert_allclose(found, c + (updates * shares).mean(0), rtol=1e-5, atol=1e-6)
    counts, start = np.stack([u["n"].numpy() for u in UPLOADS.values()]), CENTER["n"].numpy()
    assert result["n"].tolist() == np.round(start + ((counts - start) * shares).mean(0)).tolist()
    assert update_norm(UPLOADS[3], CENTER) == pytest.approx(lengths[3])


def test_a_tensor_that_the_center_lacks_or_has_in_another_shape_is_an_update_itself():
    n = torch.tensor([7])
    upload = Payload({"w": torch.tensor([3.0, 4.0]), "grown": torch.ones(2), "late": torch.ones(1), "n": n})
    center = {"w": torch.ones(2), "grown": torch.ones(1), "n": n}
    update = update_of(upload, center)
    assert {name: tensor.tolist() for name, tensor in update.items()} == {"w": [2, 3], "grown": [1, 1], "late": [1]}
    assert update_of(upload, center, ["w", "n", "nowhere"]).keys() == {"w"}
    assert_equal(dict(updated(upload, center, update)), dict(upload))


def test_updates_beside_that_of_a_trusted_client():
    x, c = vectors(UPLOADS), vectors({0: CENTER})[0]
    g = x - c
    g0, others = g[4], np.delete(g, 4, axis=0)
    trust = np.maximum(0, others @ g0 / np.linalg.norm(others, axis=1) / np.linalg.norm(g0))
    scaled = others * (np.linalg.norm(g0) / np.linalg.norm(others, axis=1))[:, None]
    expected = c + trust @ scaled / trust.sum()
    np.testing.assert_allclose(averaged(FLTrust(4))[0], expected, rtol=1e-5, atol=1e-6)
    with pytest.warns(UserWarning, match="model.mean.trusted=12: there is no upload of this client"):
        assert_equal(dict(averaged(FLTrust(12))[1]), dict(CENTER))
    opposite = {0: UPLOADS[0], 1: Payload({n: (2 * CENTER[n] - t) for n, t in UPLOADS[0].items()})}
    assert_equal(dict(averaged(FLTrust(0), opposite, [0.5, 0.5])[1]), dict(CENTER))  # nobody points along it


@pytest.mark.parametrize("length", [1e-3, 1e-12])
def test_a_tiny_update_counts_as_one_of_the_trusted_length(length):
    """However much it is stretched for that, no digits of the others are lost."""
    center = {"w": torch.tensor([0.0, 100.0, -3.0])}
    steps = [[0.3, 0.4, 0.0], [0.0, 0.5, 0.0], [length, 0.0, 0.0]]
    uploads = {k: Payload({"w": center["w"] + torch.tensor(step)}) for k, step in enumerate(steps)}
    found = FLTrust(0)(uploads, [1 / 3] * 3, ["w"], center)
    trust = np.array([0.8, 0.6])
    expected = trust @ [[0, 0.5, 0], [0.5, 0, 0]] / trust.sum()
    np.testing.assert_allclose(found["w"] - center["w"], expected, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormClipping(0), lambda: NormClipping(float("nan")), lambda: MultiKrum(-1), lambda: MultiKrum(0, 0),
        lambda: GeometricMedian(0), lambda: GeometricMedian(3, 0.0),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_in_python_too(make):
    with pytest.raises(ConfigError, match=r"^model\.mean\.\w+="):
        make()


@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: type(mean).__name__)
def test_three_of_ten_far_away_move_a_robust_mean_little(mean):
    if isinstance(mean, MultiKrum):
        mean = type(mean)(3)
    elif isinstance(mean, TrimmedMean):
        mean = TrimmedMean(0.3)
    elif isinstance(mean, GeometricMedian):
        mean = GeometricMedian(iterations=200)
    honest = {k: Payload({n: CENTER[n] + t / 10 for n, t in tensors(k).items() if n != "n"}) for k in range(10)}
    far = Payload({"w": torch.full((4, 3), 1e30), "b": torch.tensor(-1e30)})
    uploads = {k: far if k in (3, 5, 8) else upload for k, upload in honest.items()}
    found = vectors({0: mean(uploads, UNIFORM, ["w", "b"], CENTER)})[0]
    assert np.linalg.norm(found - vectors({0: CENTER})[0]) < 2


def widened(payload):
    return {name: t.float() if t.is_floating_point() else t for name, t in payload.items()}


@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: type(mean).__name__)
def test_half_precision_is_kept(mean):
    half, names = torch.bfloat16, ["w", "b", "n"]
    uploads = {k: Payload(tensors(k, half)) for k in range(10)}
    result = mean(uploads, UNIFORM, names, tensors(99, half))
    wide = mean({k: Payload(widened(u)) for k, u in uploads.items()}, UNIFORM, names, widened(tensors(99, half)))
    assert result["w"].dtype == torch.bfloat16
    assert torch.equal(result["w"], wide["w"].bfloat16())


@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: type(mean).__name__)
def test_flags_are_averaged_too(mean):
    flags = {"keep": torch.tensor([True, False])}
    result = mean({k: Payload({**u, **flags}) for k, u in UPLOADS.items()}, UNIFORM, ["w", "keep"], {**CENTER, **flags})
    assert torch.equal(result["keep"], flags["keep"])


@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: type(mean).__name__)
def test_a_tensor_that_only_some_have_is_averaged_over_those(mean):
    """As one has that has just been unfrozen somewhere; what it was measured from is not known."""
    uploads = {k: Payload({**u, "late": torch.full((2,), 5.0)}) if k < 3 else u for k, u in UPLOADS.items()}
    late = mean(uploads, UNIFORM, ["w", "late"], CENTER)["late"]
    assert late.shape == (2,)
    if not isinstance(mean, NormClipping | FLTrust | Krum):
        assert torch.allclose(late, torch.full((2,), 5.0))


@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: type(mean).__name__)
def test_weights_that_do_not_sum_to_one_scale_the_mean(mean):
    """As those of Scaffold's changes do not, where some clients take part."""
    whole, _ = averaged(mean, center={})
    half, _ = averaged(mean, given=[0.05] * 10, center={})
    np.testing.assert_allclose(half, whole / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mean", [CoordinateMedian(), TrimmedMean(0.1), GeometricMedian(), MultiKrum(1)])
def test_an_upload_of_weight_zero_does_not_count(mean):
    given = [0.0] + [1 / 9] * 9
    others = {k: UPLOADS[k] for k in range(1, 10)}
    assert_equal(dict(averaged(mean, given=given)[1]), dict(averaged(mean, others, given[1:])[1]))


# Methods


class Plain(RobustMean):
    """The weighted mean, which notes that it was asked."""

    asked = 0

    def __call__(self, uploads, weights, names, center):
        type(self).asked += 1
        return weighted_mean(list(uploads.values()), weights, names)


METHODS = [getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__]
#: those whose server makes something of single uploads, which a mean cannot take the place of
TAKE_NONE = {
    "FedFOMO", "FedMA", "PsiNet", "FactorizedFL", "SimFed", "FedAMP", "HeurFedAMP", "FedNova", "FedExP",
    "FedPAC", "FlexLoRA", "FedProto", "FD", "FedGen", "FedGH", "PFedHN", "CCVR", "FLUTE", "PFedLA", "PFedSim", "APPLE",
    "FedCAC",
}  # fmt: skip


@pytest.mark.parametrize("method", always_first(METHODS))
def test_every_method_takes_a_robust_mean_or_says_that_it_cannot(method):
    """One that is the weighted mean makes no difference, to the bit; none is taken and not used."""
    if method.__name__ in TAKE_NONE:
        with pytest.raises(ConfigError, match=r"model.mean=Plain: \w+ (does not average|steps by single) uploads"):
            run(plain_client(method, mean=Plain()), local_epochs=2)
        return
    Plain.asked = 0
    with_mean = run(plain_client(method, mean=Plain()), local_epochs=2)
    assert Plain.asked >= 2
    assert_equal(weights(with_mean), weights(run(plain_client(method), local_epochs=2)))


def plain_client(method: type[Client], **options) -> Client:
    if method is PsiNet:
        return method(**options)
    if method is FedMA:
        options["backbone"] = MLP
    if issubclass(method, FedIT):
        options["backbone"] = LoRANet
    if method in (Scaffold, PFedMe):
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    return client(method, **options)


@pytest.mark.seconds
@pytest.mark.few(3)
@pytest.mark.parametrize("mean", [*MEANS[:3], Krum(1), MultiKrum(1), *MEANS[5:]], ids=lambda mean: type(mean).__name__)
@pytest.mark.parametrize("method", [FedAvg, Ditto, ClusteredFL])
def test_a_run_with_a_robust_mean_is_finite_and_another_one(mean, method):
    data = digits(6)
    found = weights(run(client(method, mean=mean, norm_stats="averaged"), data))
    assert all(torch.isfinite(t).all() for state in found.values() for t in state.values())
    plain = weights(run(client(method, norm_stats="averaged"), digits(6)))
    assert not torch.equal(found[0]["backbone.head.weight"], plain[0]["backbone.head.weight"])


class OwnAverage(Server):
    def aggregate(self, round, uploads):
        self.model = self.average(uploads, self.averaging_weights(round, uploads), list(self.model))


class SaysSo(OwnAverage):
    averages = True


class OwnWeights(Server):
    def averaging_weights(self, round, uploads):
        return super().averaging_weights(round, uploads)


def test_a_server_with_weights_of_its_own_averages_by_them():
    assert OwnWeights().declares("averages")
    assert not OwnWeights().declares("means_only")


def test_a_server_of_ones_own_says_that_it_averages():
    class Own(Client):
        shares = FedAvg.shares

        def configure_server(self):
            return kind()

    kind = OwnAverage
    with pytest.raises(ConfigError, match=r"model.mean=CoordinateMedian: OwnAverage does not .*sets averages = True"):
        run(client(Own, mean=CoordinateMedian()), rounds=1)
    kind = SaysSo
    assert SaysSo().declares("averages")
    run(client(Own, mean=CoordinateMedian()), rounds=1)
    with pytest.raises(ConfigError, match="model.mean='median': give a robust mean"):
        run(client(FedAvg, mean="median"), rounds=1)


def test_fedslr_whose_gammas_are_single_clients_takes_none():
    for each in (True, False):
        assert FedSLRServer(frozenset(), 0.0, 1.0, None, each).declares("averages") is not each


@pytest.mark.seconds
def test_robust_means_by_name_on_the_command_line(capsys, tmp_path):
    words = ["fit", *TINY, "--model", "FedAvg", "--model.factorization", "null", "--folder", str(tmp_path / "run")]
    came = typed(capsys, *words, "--model.mean", "Krum", "--model.mean.byzantine", "0")
    assert came.code == 0, came.errors
    assert "Krum" in (tmp_path / "run" / "config.yaml").read_text()
    wrong = typed(capsys, *words, "--model.mean", "Median")
    assert "model.mean: there is no 'Median'; choose one of " in wrong.errors[0]
    assert {"CoordinateMedian,", "FLTrust,"} <= set(wrong.errors[0].split())
    assert (
        "'share' is not accepted. It has byzantine"
        in typed(capsys, *words, "--model.mean", "Krum", "--model.mean.share", "0.3").errors[0]
    )


def test_a_trusted_client_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.mean\.trusted=9: no client has this id; ids end at 2\.$"):
        run(client(FedAvg, mean=FLTrust(9)), digits(3), rounds=1)
