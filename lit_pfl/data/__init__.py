"""Data sets, split among clients."""

from lit_pfl.data.augment import Augment, CropFlip, ResizedCropJitter
from lit_pfl.data.datamodule import ClientData, FederatedDataModule
from lit_pfl.data.labels import label_permutation
from lit_pfl.data.loader import BatchLoader, ImageSet
from lit_pfl.data.partition import IID, Dirichlet, Partition
from lit_pfl.data.sources import CIFAR10, CIFAR100, MNIST, SVHN, Digits, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "MNIST",
    "SVHN",
    "Augment",
    "BatchLoader",
    "ClientData",
    "CropFlip",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FederatedDataModule",
    "ImageSet",
    "Partition",
    "ResizedCropJitter",
    "label_permutation",
]
