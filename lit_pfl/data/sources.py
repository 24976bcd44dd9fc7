"""The data sets."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jsonargparse.typing import PositiveInt

from lit_pfl.data.datamodule import FederatedDataModule
from lit_pfl.data.loader import ImageSet
from lit_pfl.errors import ConfigError


class Digits(FederatedDataModule):
    """1,797 real handwritten digits that come with scikit-learn: no download.

    Args:
        image_size: the 8 x 8 images are enlarged to this height and width in pixels.
        batch_size: images in a training batch.
        kwargs: see :class:`~lit_pfl.data.FederatedDataModule`.
    """

    def __init__(self, image_size: PositiveInt = 16, batch_size: PositiveInt = 16, **kwargs: Any) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        self.image_size = image_size

    def load(self) -> ImageSet:  # noqa: D102
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images / 16 * 255).float().unsqueeze(1)
        images = torch.nn.functional.interpolate(images, size=self.image_size, mode="bilinear").round().byte()
        return ImageSet(images, torch.from_numpy(digits.target).long(), 10, *_statistics([0.305], [0.376]), channels=1)


class _TorchvisionData(FederatedDataModule):
    """A data set that torchvision reads, official training and test data together.

    Args:
        root: folder that holds the data set, as torchvision lays it out.
        download: whether to fetch the data set into ``root`` when it is not there.
        kwargs: see :class:`~lit_pfl.data.FederatedDataModule`.

    Raises:
        ConfigError: when the data set is not there.
    """

    num_classes: ClassVar[int] = 10
    mean: ClassVar[list[float]]
    std: ClassVar[list[float]]

    def __init__(self, root: str = "data", download: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        """Fetch the data set, if asked to."""
        if self.download:
            self._read()

    def _read(self) -> list[Any]:
        """Return torchvision's data sets, the training data first."""
        import torchvision.datasets as datasets

        kind = getattr(datasets, type(self).__name__)
        try:
            return [kind(self.root, download=self.download, **part) for part in self._parts()]
        except (RuntimeError, OSError) as error:
            if self.download:
                raise ConfigError(
                    f"{type(self).__name__} could not be downloaded into {self.root!r}: {error}"
                ) from error
            raise ConfigError(
                f"{type(self).__name__} is not in {str(Path(self.root).absolute())!r}: give --data.download true to "
                "fetch it, or --data.root FOLDER if you have it."
            ) from None

    def _parts(self) -> list[dict[str, Any]]:
        return [{"train": True}, {"train": False}]

    def load(self) -> ImageSet:
        parts = self._read()
        images = torch.cat([self._images(part.data) for part in parts])
        labels = torch.cat([torch.as_tensor(part.targets) for part in parts]).long()
        return self._image_set(images, labels)

    def _images(self, data: Any) -> torch.Tensor:
        """Return (N, C, H, W) uint8 of what torchvision holds, (N, H, W, 3)."""
        return torch.as_tensor(data).permute(0, 3, 1, 2).contiguous()

    def _image_set(self, images: torch.Tensor, labels: torch.Tensor) -> ImageSet:
        return ImageSet(images, labels, self.num_classes, *_statistics(self.mean, self.std), channels=len(self.mean))


class CIFAR10(_TorchvisionData):
    """60,000 colour images of 32 x 32 pixels, 10 classes."""

    mean = [0.491, 0.482, 0.447]
    std = [0.247, 0.243, 0.262]


class CIFAR100(_TorchvisionData):
    """60,000 colour images of 32 x 32 pixels, 100 classes."""

    num_classes = 100
    mean = [0.507, 0.487, 0.441]
    std = [0.268, 0.257, 0.276]


class SVHN(_TorchvisionData):
    """99,289 house numbers, colour, 32 x 32 pixels, 10 classes: the train and test parts, without "extra"."""

    mean = [0.438, 0.444, 0.473]
    std = [0.1751, 0.1771, 0.1744]

    def _parts(self) -> list[dict[str, Any]]:
        return [{"split": "train"}, {"split": "test"}]

    def load(self) -> ImageSet:  # noqa: D102
        parts = self._read()
        images = torch.from_numpy(np.concatenate([part.data for part in parts]))
        return self._image_set(images, torch.from_numpy(np.concatenate([part.labels for part in parts])).long())


class _GreyImages(_TorchvisionData):
    """28 x 28 grey images, shown to models as the papers do: 32 x 32 and three equal channels.

    Args:
        image_size: height and width in pixels; 28 is the data set's own.
        channels: 3 repeats the grey channel, without using more memory; 1 is the data set's own.
        kwargs: ``root`` and ``download``, and see :class:`~lit_pfl.data.FederatedDataModule`.
    """

    def __init__(self, image_size: PositiveInt = 32, channels: PositiveInt = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size
        self.channels = channels

    def _images(self, data: Any) -> torch.Tensor:
        images = data.unsqueeze(1)
        if self.image_size == images.shape[-1]:
            return images
        parts = [
            torch.nn.functional.interpolate(part.float(), size=self.image_size, mode="bilinear").round().byte()
            for part in images.split(10_000)
        ]
        return torch.cat(parts)

    def _image_set(self, images: torch.Tensor, labels: torch.Tensor) -> ImageSet:
        return ImageSet(images, labels, self.num_classes, *_statistics(self.mean, self.std), channels=self.channels)


class MNIST(_GreyImages):
    """70,000 handwritten digits, grey, 28 x 28 pixels, 10 classes."""

    mean = [0.1307]
    std = [0.3081]


class FashionMNIST(_GreyImages):
    """70,000 pieces of clothing, grey, 28 x 28 pixels, 10 classes."""

    mean = [0.2860]
    std = [0.3530]


def _statistics(mean: list[float], std: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(mean), torch.tensor(std)
