"""The data sets."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jsonargparse.typing import PositiveInt

from lit_pfl.data.images import ImageDataModule, ImageSet
from lit_pfl.errors import ConfigError, within_memory


class Digits(ImageDataModule):
    """1,797 real handwritten digits that come with scikit-learn: no download.

    Args:
        image_size: the 8 x 8 images are enlarged to this height and width in pixels.
        batch_size: images in a training batch.
        kwargs: see :class:`~lit_pfl.data.ImageDataModule`.
    """

    def __init__(self, image_size: PositiveInt = 16, batch_size: PositiveInt = 16, **kwargs: Any) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        self.image_size = image_size

    def load(self) -> ImageSet:
        digits = _digits()
        images = torch.from_numpy(digits.images / 16 * 255).float().unsqueeze(1)
        with within_memory(f"data.image_size={self.image_size}"):
            images = torch.nn.functional.interpolate(images, size=self.image_size, mode="bilinear").round().byte()
        labels = torch.tensor(digits.target, dtype=torch.int64)
        return ImageSet(images, labels, 10, *_statistics([0.305], [0.376]), channels=1)


@cache  # read from a file of text, which would take a good part of a short run
def _digits() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


class _TorchvisionData(ImageDataModule):
    """A data set that torchvision reads, official training and test data together.

    Args:
        root: folder that holds the data set, as torchvision lays it out.
        download: whether to fetch the data set into ``root`` when it is not there.
        verify: whether the files of CIFAR and SVHN must be the official ones, by their checksums. Files of CIFAR are
            pickles, which may run anything when they are read: accept others only from those whom you trust.
        image_size: height and width in pixels that images are brought to.
        kwargs: see :class:`~lit_pfl.data.ImageDataModule`.

    Raises:
        ConfigError: when the data set is not there, or is not the official one.
    """

    num_classes: ClassVar[int] = 10
    mean: ClassVar[list[float]]
    std: ClassVar[list[float]]

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        verify: bool = True,
        image_size: PositiveInt = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download
        self.verify = verify
        self.image_size = image_size

    def prepare_data(self) -> None:
        """Fetch the data set, if asked to."""
        if self.download:
            self._read()

    def _read(self) -> list[Any]:
        """Return the parts of the data set, the training data first, and say so if they are not there."""
        try:
            return self._open()
        except (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            if self.download:
                raise ConfigError(
                    f"{type(self).__name__} could not be downloaded into {self.root!r}: {error}"
                ) from error
            raise ConfigError(f"{type(self).__name__} {self._what_is_wrong()}") from None

    def _what_is_wrong(self) -> str:
        """Return what a data set that cannot be opened lacks."""
        from torchvision.datasets.utils import calculate_md5

        fetch = "give --data.download true to fetch it, or --data.root FOLDER if you have it"
        files = self._checksums()
        missing = [file for file, _ in files if not file.is_file()]
        if len(missing) == len(files):
            return f"is not in {str(Path(self.root).absolute())!r}: {fetch}."
        if missing:
            return f"is not all in {str(Path(self.root).absolute())!r}, which has no {missing[0].name}: {fetch}."
        for file, official in files:
            if self.verify and (own := calculate_md5(file)) != official:
                return (
                    f"is not the official one: the MD5 checksum of {str(file.absolute())!r} is {own}, not {official}. "
                    "Give --data.verify false to accept it, if you trust its source, or --data.download true to fetch "
                    "it again."
                )
        return f"cannot be read from {str(Path(self.root).absolute())!r}: {fetch}."

    def _open(self) -> list[Any]:
        import torchvision.datasets as datasets

        kind = getattr(datasets, type(self).__name__)
        if not self.verify:
            kind = type(kind.__name__, (kind,), self._without_checksums(kind))
        return [kind(self.root, download=self.download, **part) for part in self._parts()]

    def _parts(self) -> list[dict[str, Any]]:
        return [{"train": True}, {"train": False}]

    def _checksums(self) -> list[tuple[Path, str]]:
        """Return the files that have an official MD5 checksum, and these."""
        return []

    def _without_checksums(self, kind: Any) -> dict[str, Any]:
        """Return what torchvision's class says of its files, without checksums."""
        return {}

    def load(self) -> ImageSet:
        parts = self._read()
        images = torch.cat([self._images(part.data) for part in parts])
        labels = torch.cat([torch.as_tensor(part.targets) for part in parts]).long()
        return self._image_set(images, labels, len(parts[0].targets), getattr(parts[0], "classes", None))

    def _images(self, data: Any) -> torch.Tensor:
        """Return (N, C, H, W) uint8 of what torchvision holds, (N, H, W, 3)."""
        return torch.as_tensor(data).permute(0, 3, 1, 2).contiguous()

    def _image_set(
        self, images: torch.Tensor, labels: torch.Tensor, num_train: int, names: list[str] | None = None
    ) -> ImageSet:
        images, statistics = _resized(images, self.image_size), _statistics(self.mean, self.std)
        data = ImageSet(images, labels, self.num_classes, *statistics, channels=len(self.mean), num_train=num_train)
        return replace(data, class_names=None if names is None else tuple(names))


class _CIFAR(_TorchvisionData):
    """What torchvision knows of the files of both CIFARs."""

    def _checksums(self) -> list[tuple[Path, str]]:
        import torchvision.datasets as datasets

        kind = getattr(datasets, type(self).__name__)
        files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        return [(Path(self.root) / kind.base_folder / name, md5) for name, md5 in files]

    def _without_checksums(self, kind: Any) -> dict[str, Any]:
        lists = {part: [[name, None] for name, _ in getattr(kind, part)] for part in ("train_list", "test_list")}
        return {**lists, "meta": {**kind.meta, "md5": None}}


class CIFAR10(_CIFAR):
    """60,000 color images of 32 x 32 pixels, 10 classes."""

    mean = [0.491, 0.482, 0.447]
    std = [0.247, 0.243, 0.262]


class CIFAR100(_CIFAR):
    """60,000 color images of 32 x 32 pixels, 100 classes."""

    num_classes = 100
    mean = [0.507, 0.487, 0.441]
    std = [0.268, 0.257, 0.276]


class SVHN(_TorchvisionData):
    """99,289 house numbers, color, 32 x 32 pixels, 10 classes: the train and test parts, without "extra"."""

    mean = [0.438, 0.444, 0.473]
    std = [0.1751, 0.1771, 0.1744]

    def _parts(self) -> list[dict[str, Any]]:
        return [{"split": "train"}, {"split": "test"}]

    def _checksums(self) -> list[tuple[Path, str]]:
        import torchvision.datasets as datasets

        files = [datasets.SVHN.split_list[part["split"]] for part in self._parts()]
        return [(Path(self.root) / name, md5) for _, name, md5 in files]

    def _without_checksums(self, kind: Any) -> dict[str, Any]:
        return {"split_list": {part: [url, name, None] for part, (url, name, _) in kind.split_list.items()}}

    def load(self) -> ImageSet:
        parts = self._read()
        images = torch.from_numpy(np.concatenate([part.data for part in parts]))
        labels = torch.from_numpy(np.concatenate([part.labels for part in parts])).long()
        return self._image_set(images, labels, len(parts[0].labels))


class _GreyImages(_TorchvisionData):
    """28 x 28 grey images, shown to models as the papers do: 32 x 32 and three equal channels.

    Args:
        channels: 3 repeats the grey channel, without using more memory; 1 is the data set's own.
        kwargs: ``root``, ``download`` and ``image_size`` (28 is the data set's own), and see
            :class:`~lit_pfl.data.ImageDataModule`.
    """

    def __init__(self, channels: PositiveInt = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.channels = channels

    def _images(self, data: Any) -> torch.Tensor:
        return data.unsqueeze(1)

    def _image_set(self, *args: Any, **kwargs: Any) -> ImageSet:
        return replace(super()._image_set(*args, **kwargs), channels=self.channels)


class MNIST(_GreyImages):
    """70,000 handwritten digits, grey, 28 x 28 pixels, 10 classes."""

    mean = [0.1307]
    std = [0.3081]


class FashionMNIST(_GreyImages):
    """70,000 pieces of clothing, grey, 28 x 28 pixels, 10 classes."""

    mean = [0.2860]
    std = [0.3530]


class TinyImageNet(_TorchvisionData):
    """110,000 color images of 64 x 64 pixels, 200 classes in the order of their names (WordNet ids).

    The official training data and then the official validation data; the official test data have no labels. All are
    decoded once, into 1.4 GB of memory.

    Args:
        image_size: height and width in pixels that images are brought to; 64 is the data set's own.
        kwargs: ``root``, which holds the folder ``tiny-imagenet-200``, and ``download``, and see
            :class:`~lit_pfl.data.ImageDataModule`.

    Raises:
        ConfigError: when the data set is not there, or not all of it.

    Source:
        FedSLR, Section 6.1; the normalization is that of its released code.
    """

    num_classes = 200
    mean = [0.5, 0.5, 0.5]
    std = [0.5, 0.5, 0.5]
    address: ClassVar[str] = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    md5: ClassVar[str] = "90528d7ca1a48142e341f4ef8d21d0de"

    def __init__(self, image_size: PositiveInt = 64, **kwargs: Any) -> None:
        super().__init__(image_size=image_size, **kwargs)

    def _open(self) -> list[Any]:
        """Return a list of (file, class) of each part."""
        from torchvision.datasets.utils import download_and_extract_archive

        folder = Path(self.root) / "tiny-imagenet-200"
        if self.download and not (folder / "wnids.txt").is_file():
            download_and_extract_archive(self.address, self.root, md5=self.md5)
        names = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
        train = []
        for c, name in enumerate(names):
            files = sorted((folder / "train" / name / "images").iterdir())
            train += [(file, c) for file in files]
        lines = [line.split() for line in (folder / "val/val_annotations.txt").read_text(encoding="utf-8").splitlines()]
        return [train, [(folder / "val/images" / file, names.index(name)) for file, name, *_ in lines]]

    def load(self) -> ImageSet:
        from torchvision.io import ImageReadMode, decode_image, read_file

        train, test = self._read()
        files = [*train, *test]
        images = torch.empty(len(files), 3, 64, 64, dtype=torch.uint8)

        def decode(i: int) -> None:
            images[i] = decode_image(read_file(str(files[i][0])), ImageReadMode.RGB)

        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(decode, range(len(files))))
        except RuntimeError as error:
            raise ConfigError(
                f"TinyImageNet in {str(Path(self.root).absolute())!r} is damaged: {error}; remove the folder "
                "tiny-imagenet-200 and give --data.download true to fetch it again."
            ) from error
        labels = torch.tensor([c for _, c in files])
        names = {c: file.parent.parent.name for file, c in train}
        return self._image_set(images, labels, len(train), [names[c] for c in sorted(names)])


def _resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return (N, C, H, W) uint8 images in another height and width."""
    if size == images.shape[-1]:
        return images

    shrinks = size < images.shape[-1]

    def resized(part: torch.Tensor) -> torch.Tensor:
        part = torch.nn.functional.interpolate(part.float(), size=size, mode="bilinear", antialias=shrinks)
        return part.round().byte()

    with within_memory(f"data.image_size={size}"):
        return torch.cat([resized(part) for part in images.split(10_000)])


def _statistics(mean: list[float], std: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(mean), torch.tensor(std)
