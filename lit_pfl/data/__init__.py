"""Data sets, split among clients."""

from lit_pfl.data.augment import Augment, CropFlip, ResizedCropJitter
from lit_pfl.data.datamodule import ImageDataModule
from lit_pfl.data.domains import GROUPS, Domains
from lit_pfl.data.federated import ClientData, FederatedDataModule
from lit_pfl.data.labels import label_permutation
from lit_pfl.data.loader import BatchLoader, ImageSet, ResidentLoader
from lit_pfl.data.loaders import (
    example_of,
    identity_of,
    in_batches_of,
    in_order,
    labels_of,
    num_samples,
    part_of,
    samples_of,
)
from lit_pfl.data.partition import (
    IID,
    BalancedDirichlet,
    ClassShards,
    ClientDirichlet,
    Dirichlet,
    Partition,
    Uniform,
)
from lit_pfl.data.sources import CIFAR10, CIFAR100, MNIST, SVHN, Digits, FashionMNIST, TinyImageNet

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "GROUPS",
    "IID",
    "MNIST",
    "SVHN",
    "Augment",
    "BalancedDirichlet",
    "BatchLoader",
    "ClassShards",
    "ClientData",
    "ClientDirichlet",
    "CropFlip",
    "Digits",
    "Dirichlet",
    "Domains",
    "FashionMNIST",
    "FederatedDataModule",
    "ImageDataModule",
    "ImageSet",
    "Partition",
    "ResidentLoader",
    "ResizedCropJitter",
    "TinyImageNet",
    "Uniform",
    "example_of",
    "identity_of",
    "in_batches_of",
    "in_order",
    "label_permutation",
    "labels_of",
    "num_samples",
    "part_of",
    "samples_of",
]
