"""FedALA against its formula, and what it is without learning."""

import numpy as np
import pytest
from quadratic import Quadratics, equal, flat, quadratic

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedALA
from tiny import assert_equal, client, digits, run, weights


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rounds_equal_the_formula(share):
    problem, batches = Quadratics.random(), 4  # whose loss does not depend on the samples
    method = quadratic(FedALA, problem, eta=0.3, layers=1, share=share, threshold=1e-3, window=4)
    federation = run(method, equal(4, batches=batches), rounds=3, local_epochs=2)
    own, w, ws, begun = np.stack([problem.start] * 4), problem.start, np.ones((4, 2)), False
    n = [len(federation.data.client(k).train.dataset) for k in range(4)]
    for _ in range(3):
        ends = []
        for k in range(4):
            x, difference, losses = w.copy(), w - own[k], []

            def mixed(k=k, x=x, difference=difference, own=own):
                return np.concatenate([x[:1], own[k][1:] + difference[1:] * ws[k]])

            while difference.any() and not (losses and begun):
                for _ in range(batches if share == 1 else batches // 2):
                    losses.append(problem.loss(k, mixed()))
                    step = 0.3 * problem.gradient(k, mixed())[1:] * difference[1:]
                    ws[k] = np.clip(ws[k] - step, 0, 1)
                last = losses[(batches if share == 1 else batches // 2) - 1 :: batches if share == 1 else batches // 2]
                if len(last) > 4 and np.std(last[-4:]) < 1e-3:
                    break
            x = mixed()
            for _ in range(2 * batches):
                x = x - 0.1 * problem.gradient(k, x)
            ends.append(x)
        begun = begun or bool((w != problem.start).any())
        own, w = np.stack(ends), np.average(ends, axis=0, weights=n)
    for k, member in federation.clients.items():
        np.testing.assert_allclose(dict(member.mixed.items())["backbone.second"], ws[k], atol=1e-9)
        np.testing.assert_allclose(flat(member.learner.state_dict()), own[k], rtol=1e-8)
    assert (ws < 1).any()


@pytest.mark.seconds
def test_the_last_tensors_are_those_that_travel():
    assert list(client_of(layers=2).mixed) == ["backbone.head.weight", "backbone.head.bias"]
    assert list(client_of(labels=True).mixed) == ["backbone.body.1.weight", "backbone.body.1.bias"]
    assert list(client_of(layers=[r"body\.0"]).mixed) == ["backbone.body.0.weight", "backbone.body.0.bias"]


def client_of(labels=False, **options):
    return run(client(FedALA, **options), digits(2, permute_labels=labels), rounds=1).clients[0]


@pytest.mark.parametrize(
    ("layers", "words"), [(9, "there are 6 shared weights"), (["nothing"], "no shared weight matches")]
)
def test_layers_that_are_not_there(layers, words):
    with pytest.raises(ConfigError, match=rf"^model\.layers=.*{words}"):
        client_of(layers=layers)


def test_a_part_has_one_sample_at_least_and_may_be_any():
    member = client_of(share=1e-3)
    [(images, _)] = member._batches()
    assert len(images) == 1
    n = member.data.num_samples
    member.share = (n - 1) / n + 1e-9
    firsts = {float(next(iter(member._batches()))[0][0].sum()) for _ in range(20)}
    assert len(firsts) == 2  # it leaves out the last sample or the first


def test_the_first_time_ends_whatever_the_losses():
    federation = run(quadratic(FedALA, Quadratics.random(), threshold=0.0, max_passes=7), equal(2), rounds=3)
    assert all(member.begun for member in federation.clients.values())


@pytest.mark.slow
def test_weights_stay_between_0_and_1_and_an_evaluation_leaves_them():
    federation = run(client(FedALA, eta=100.0), rounds=3, participation=0.5)
    for member in federation.clients.values():
        assert all(((w >= 0) & (w <= 1)).all() for _, w in member.mixed.items())
    a, b = (run(client(FedALA), rounds=3, evaluate=when, participation=0.5) for when in ("before", "after"))
    assert_equal(weights(a), weights(b))
