"""Random changes of training images."""

import pytest
import torch

from lit_pfl.data import BatchLoader, CropFlip, ImageSet, ResizedCropJitter
from lit_pfl.errors import ConfigError
from tiny import digits

AUGMENTS = [CropFlip, ResizedCropJitter]
PAD = 4


def equal_images(n: int = 32, channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.rand(1, channels, size, size).repeat(n, 1, 1, 1)


def distinct(images: torch.Tensor) -> int:
    return len({tuple(image.flatten().tolist()) for image in images})


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_equal_images_are_changed_differently_and_keep_their_shape(augment, channels):
    images = equal_images(channels=channels)
    before = images.clone()
    changed = augment()(images)
    assert changed.shape == images.shape
    assert changed.dtype == torch.float32
    assert changed.isfinite().all()
    assert distinct(changed) > 1
    assert torch.equal(images, before)  # not in place


@pytest.mark.parametrize("augment", [lambda: CropFlip(crop_probability=1.0), ResizedCropJitter])
def test_hardly_two_of_the_changed_images_are_equal(augment):
    assert distinct(augment()(equal_images())) > 16


@pytest.mark.parametrize("augment", AUGMENTS)
def test_changes_repeat_with_the_seed(augment):
    images, instance = equal_images(), augment()
    changed = []
    for change in (instance, instance, augment()):
        torch.manual_seed(2)
        changed.append(change(images))
    assert torch.equal(changed[0], changed[1])
    assert torch.equal(changed[0], changed[2])
    assert not torch.equal(changed[0], instance(images))


def shifted(image: torch.Tensor, mode: str) -> dict[tuple[bool, int, int], torch.Tensor]:
    """Return all images that mirroring, padding and cropping can make."""
    made = {}
    for mirrored in (False, True):
        padded = torch.nn.functional.pad((image.flip(-1) if mirrored else image)[None], [PAD] * 4, mode=mode)[0]
        for y in range(2 * PAD + 1):
            for x in range(2 * PAD + 1):
                made[mirrored, y, x] = padded[:, y : y + image.shape[1], x : x + image.shape[2]]
    return made


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_crop_flip_mirrors_half_and_shifts_by_whole_pixels(mode, probability):
    images = equal_images(100)
    possible = shifted(images[0], mode)
    found = []
    for changed in CropFlip(PAD, mode, crop_probability=probability)(images):
        found.append(next(how for how, image in possible.items() if torch.equal(image, changed)))
    assert 30 < sum(mirrored for mirrored, _, _ in found) < 70
    offsets = {(y, x) for _, y, x in found}
    if probability:
        assert len(offsets) > 40
        assert {y for y, _ in offsets} == {x for _, x in offsets} == set(range(2 * PAD + 1))
    else:
        assert offsets == {(PAD, PAD)}


@pytest.mark.parametrize("channels", [1, 3])
def test_crop_flip_pads_with_zeros_of_the_normalised_space(channels):
    white = torch.full((40, 1, 12, 12), 255, dtype=torch.uint8)
    data = ImageSet(white, torch.zeros(40).long(), 10, torch.tensor([0.5]), torch.tensor([0.5]), channels)
    images, _ = next(iter(BatchLoader(data, torch.arange(40), 40, augment=CropFlip(PAD, crop_probability=1.0))))
    assert images.shape == (40, channels, 12, 12)
    assert images.unique().tolist() == [0.0, 1.0]  # black would be -1
    assert (images[:, :, PAD:-PAD, PAD:-PAD] == 1).all()


def test_resized_crop_jitter_is_applied_before_normalisation():
    pixels = torch.randint(256, (40, 3, 12, 12), dtype=torch.uint8)
    data = ImageSet(pixels, torch.zeros(40).long(), 10, torch.full((3,), 0.5), torch.full((3,), 0.1), 3)
    images, _ = next(iter(BatchLoader(data, torch.arange(40), 40, augment=ResizedCropJitter())))
    assert images.min() >= -5.001
    assert images.max() <= 5.001
    assert images.min() < -2  # that is 0.3 of 1
    torch.manual_seed(3)
    expected = ResizedCropJitter()(pixels / 255)
    torch.manual_seed(3)
    (images, _) = next(iter(BatchLoader(data, torch.arange(40), 40, augment=ResizedCropJitter())))
    torch.testing.assert_close(images, (expected - 0.5) / 0.1, atol=1e-4, rtol=0)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_only_training_images_are_changed(augment):
    plain, augmented = digits(), digits(augment=augment())
    plain.setup()
    augmented.setup()
    for part in ("train", "val", "test"):
        epochs = []
        for data in (plain, augmented):
            torch.manual_seed(5)
            epochs.append(next(iter(getattr(data.client(1), part))))
        assert torch.equal(epochs[0][1], epochs[1][1])
        assert torch.equal(epochs[0][0], epochs[1][0]) == (part != "train")


def test_the_probability_of_a_crop_is_that_of_each_image():
    torch.manual_seed(0)
    images = torch.randn(3, 8, 8).expand(2000, -1, -1, -1)
    changed = CropFlip(padding=4, crop_probability=0.5)(images)
    unmoved = [(changed == candidate).flatten(1).all(1) for candidate in (images, images.flip(-1))]
    assert abs(float((unmoved[0] | unmoved[1]).float().mean()) - (0.5 + 0.5 / 81)) < 0.04


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"padding": -1}, r"data\.augment\.padding=-1: give 0 pixels or more"),
        ({"crop_probability": 1.5}, r"data\.augment\.crop_probability=1\.5: give a share from 0 to 1"),
        ({"crop_probability": float("nan")}, r"data\.augment\.crop_probability=nan"),
        ({"padding": 8, "padding_mode": "reflect"}, r"data\.augment\.padding=8: .* 8 x 8 pixels .* in 7 at most"),
    ],
)
def test_crops_that_cannot_be_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        CropFlip(**options)(torch.zeros(1, 1, 8, 8))
