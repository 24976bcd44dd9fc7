"""What neurons prefer, and how far they are apart, against plain loops."""

import numpy as np
import pytest
import torch

from lit_pfl_callbacks.features.measures import class_preferences, sharing_depth, top_classes, total_variance


@pytest.mark.parametrize("places", [(), (3, 2)])
def test_preferences_sum_products_over_the_samples_of_a_class(places):
    rng = np.random.default_rng(1)
    activations, gradients = rng.normal(size=(2, 7, 4, *places))
    labels = np.array([0, 2, 2, 1, 0, 2, 0])
    expected = np.zeros((4, 5))
    for sample, c in enumerate(labels):
        for neuron in range(4):
            expected[neuron, c] += np.sum(activations[sample, neuron] * gradients[sample, neuron])
    found = class_preferences(*map(torch.tensor, (activations, gradients, labels)), 5)
    np.testing.assert_allclose(found.numpy(), expected)
    assert top_classes(found) == expected.argmax(1).tolist()


def test_a_neuron_that_prefers_nothing_has_no_top_class():
    assert top_classes(torch.tensor([[0.0, -1.0, 0.0], [-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]])) == [-1, 2, -1]


def test_in_a_linear_classifier_a_neuron_prefers_by_activation_times_weight():
    """The paper's first example: the gradient of a logit is its weight."""
    features, weight = torch.rand(6, 4), torch.randn(3, 4)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    found = class_preferences(features, weight[labels], labels, 3)
    for c in range(3):
        torch.testing.assert_close(found[:, c], features[labels == c].sum(0) * weight[c])


def test_total_variance_is_the_mean_distance_from_the_mean_preference():
    preferences = np.random.default_rng(2).normal(size=(9, 4)) + 0.5
    preferences[3] = -1  # prefers nothing
    vectors = [np.maximum(p, 0) / np.maximum(p, 0).sum() for p in preferences if (p > 0).any()]
    mean = sum(vectors) / len(vectors)
    expected = sum(np.sqrt(np.square(v - mean).sum()) for v in vectors) / len(vectors)
    assert total_variance(torch.tensor(preferences)) == pytest.approx(expected)


def test_total_variance_does_not_depend_on_how_strong_preferences_are():
    preferences = torch.rand(5, 3)
    assert total_variance(preferences * torch.rand(5, 1)) == pytest.approx(total_variance(preferences))


def test_neurons_of_one_mind_have_no_variance():
    assert total_variance(torch.tensor([[1.0, 3.0], [2.0, 6.0]])) == 0
    assert np.isnan(total_variance(-torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("variances", "depth"),
    [([0.1, 0.1, 0.5, 0.6], 2), ([0.1, 0.2, 0.3, 0.4, 0.5], 2), ([0.5, 0.1, 0.4], 1), ([0.3], 1), ([0.2, 0.2], 1)],
)
def test_the_depth_is_where_variance_is_half_way_up(variances, depth):
    assert sharing_depth(variances) == depth
