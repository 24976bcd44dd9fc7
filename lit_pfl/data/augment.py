"""Augmentation of a batch at once, on its device; every image of the batch is changed differently.

The work is kornia's: of the libraries with per-image randomness it was the fastest here (256 images of 3 x 32 x 32 on
two cores: 25 ms for the whole of :class:`ResizedCropJitter`, against 74 ms for torchvision image by image).
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_pfl.errors import ConfigError


class Augment(nn.Module, ABC):
    """A random change of training images.

    Attributes:
        on_normalized: whether the images arrive normalized, or with values from 0 to 1.
    """

    on_normalized: ClassVar[bool] = False

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Change (B, C, H, W) images; the shape stays."""


class CropFlip(Augment):
    """Mirror half of the images, and shift half of them by padding and cropping.

    Args:
        padding: pixels on every side.
        padding_mode: what is in the padding; zeros are those of the normalized space, a mean color.
        crop_probability: share of the images that are shifted.

    Raises:
        ConfigError: for a padding below 0, one that a smaller image is to be reflected in, and a share that is none.

    Source:
        FedSLR (padding 4, on CIFAR; 8 on Tiny-ImageNet); FedMA (reflect, all images).
    """

    on_normalized: ClassVar[bool] = True

    def __init__(
        self,
        padding: int = 4,
        padding_mode: Literal["constant", "reflect"] = "constant",
        crop_probability: float = 0.5,
    ) -> None:
        super().__init__()
        if padding < 0:
            raise ConfigError(f"data.augment.padding={padding}: give 0 pixels or more.")
        if not 0 <= crop_probability <= 1:
            raise ConfigError(f"data.augment.crop_probability={crop_probability}: give a share from 0 to 1.")
        self.padding = padding
        self.padding_mode = padding_mode
        self.crop_probability = crop_probability
        self.flip: nn.Module | None = None

    def forward(self, images: Tensor) -> Tensor:
        if self.flip is None:
            from kornia.augmentation import RandomCrop, RandomHorizontalFlip  # takes a second to import

            size = (images.shape[-2], images.shape[-1])
            if self.padding_mode == "reflect" and self.padding >= min(size):
                raise ConfigError(
                    f"data.augment.padding={self.padding}: images of {size[0]} x {size[1]} pixels can be reflected in "
                    f"{min(size) - 1} at most; give less, or padding_mode=constant."
                )
            self.flip = RandomHorizontalFlip(p=0.5)
            self.crop = RandomCrop(size, padding=self.padding, padding_mode=self.padding_mode)
        images = self.flip(images)
        # kornia's own probability of cropping is one for the whole batch; like kornia, draw on the CPU
        shifted = torch.rand(len(images), 1, 1, 1) < self.crop_probability
        return torch.where(shifted.to(images.device), self.crop(images), images)


class ResizedCropJitter(Augment):
    """Random resized crop, mirroring, color jitter and greyscale.

    Source:
        Factorized-FL's released code; see its default values there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: nn.Sequential | None = None

    def forward(self, images: Tensor) -> Tensor:
        if self.steps is None:
            from kornia.augmentation import ColorJitter, RandomGrayscale, RandomHorizontalFlip, RandomResizedCrop

            size = (images.shape[-2], images.shape[-1])
            steps: list[nn.Module] = [RandomResizedCrop(size), RandomHorizontalFlip(p=0.5)]
            if images.shape[1] == 3:
                steps += [ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8), RandomGrayscale(p=0.2)]
            self.steps = nn.Sequential(*steps)
        return self.steps(images)
