"""Densities, masks, bits."""

import numpy as np
import pytest
import torch

from lit_pfl.ops import erk_densities, pack_bits, prune_and_regrow, random_mask, unpack_bits

SHAPES = {"first": (64, 3, 3, 3), "middle": (128, 64, 3, 3), "last": (256, 256, 3, 3), "head": (10, 256)}


def shapes() -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_densities_solve_to_the_total(density):
    """The scale is where ``sum min(size, scale * sum(shape))`` is the number of active weights: found by bisection."""
    sizes = np.array([np.prod(shape) for shape in SHAPES.values()])
    sums = np.array([sum(shape) for shape in SHAPES.values()])
    low, high = 0.0, float(sizes.max())
    for _ in range(200):
        middle = (low + high) / 2
        enough = np.minimum(sizes, middle * sums).sum() >= density * sizes.sum()
        low, high = (low, middle) if enough else (middle, high)
    densities = erk_densities(shapes(), density)
    assert list(densities) == list(SHAPES)
    np.testing.assert_allclose([*densities.values()], np.minimum(1, high * sums / sizes), rtol=1e-6)
    assert (np.array([*densities.values()]) * sizes).sum() == pytest.approx(density * sizes.sum())


def test_large_layers_are_sparser_and_small_ones_dense():
    densities = erk_densities(shapes(), 0.3)
    assert densities["first"] == densities["head"] == 1
    assert 0.2 < densities["last"] < 0.3 < densities["middle"] < 1
    ratio = densities["middle"] / densities["last"]
    assert ratio == pytest.approx((198 / (128 * 64 * 9)) / (518 / (256 * 256 * 9)))


def test_what_is_dense_in_any_case_counts():
    sizes = {name: shape.numel() for name, shape in shapes().items()}
    densities = erk_densities(shapes(), 0.3, {"middle"})
    assert densities["middle"] == densities["first"] == 1
    assert sum(densities[name] * sizes[name] for name in sizes) == pytest.approx(0.3 * sum(sizes.values()))
    assert set(erk_densities(shapes(), 1.0, set(SHAPES)).values()) == {1.0}
    with pytest.raises(ValueError, match=f"{sizes['last']} of .* weights are dense"):
        erk_densities(shapes(), 0.3, {"last"})


def test_of_a_tensor_without_entries_no_share_is_taken():
    empty, full = torch.Size([0, 3]), torch.Size([8, 8])
    assert erk_densities({"empty": empty, "full": full}, 0.5) == {"empty": 1, "full": 0.5}
    assert erk_densities({"empty": empty}, 0.5) == {"empty": 1}


@pytest.mark.parametrize("active", [0, 1, 17, 60])
def test_random_masks_have_as_many_active_weights(active):
    masks = [random_mask(torch.Size([3, 4, 5]), active, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert all(mask.sum() == active and mask.shape == (3, 4, 5) and mask.dtype == torch.bool for mask in masks)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2]) == (active in (0, 60))


@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_the_smallest_go_and_those_with_the_highest_scores_come(count):
    rng = np.random.default_rng(count)
    weight, scores = rng.normal(size=40), rng.random(40)
    mask = rng.permutation(40) < 20
    kept = set(sorted(np.flatnonzero(mask), key=lambda i: abs(weight[i]))[count:])
    new = kept | set(sorted(set(range(40)) - kept, key=lambda i: -scores[i])[:count])
    result = prune_and_regrow(*(torch.from_numpy(x).view(4, 10) for x in (weight, mask, scores)), count)
    assert result.shape == (4, 10)
    assert set(result.flatten().nonzero().flatten().tolist()) == new


def test_memory_formats_do_not_matter():
    weight, scores = torch.randn(4, 3, 2, 2), torch.rand(4, 3, 2, 2)
    mask = torch.rand(4, 3, 2, 2) < 0.5
    plain = prune_and_regrow(weight, mask, scores, 5)
    last = [x.to(memory_format=torch.channels_last) for x in (weight, mask, scores)]
    assert torch.equal(prune_and_regrow(*last, 5), plain)
    assert torch.equal(pack_bits([last[1]]), pack_bits([mask]))


def test_bits_are_packed_as_numpy_does_and_come_back():
    masks = {"a": torch.rand(3, 7) < 0.5, "b": torch.rand(1, 2, 3) < 0.5, "c": torch.rand(5, 1) < 0.5}
    packed = pack_bits(masks.values())
    assert packed.dtype == torch.uint8
    bits = np.concatenate([mask.numpy().ravel() for mask in masks.values()])
    np.testing.assert_array_equal(packed.numpy(), np.packbits(bits))
    back = unpack_bits(packed, {name: mask.shape for name, mask in masks.items()})
    assert all(torch.equal(back[name], mask) for name, mask in masks.items())
