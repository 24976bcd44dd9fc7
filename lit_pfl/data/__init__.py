"""Data sets, split among clients."""

from lit_pfl.data.augment import Augment, CropFlip, ResizedCropJitter
from lit_pfl.data.datamodule import PartitionedDataModule
from lit_pfl.data.domains import GROUPS, Domains
from lit_pfl.data.federated import ClientData, FederatedDataModule
from lit_pfl.data.from_dataset import FromDataset
from lit_pfl.data.images import BatchLoader, ImageDataModule, ImageSet
from lit_pfl.data.labels import label_permutation
from lit_pfl.data.loaders import (
    batch_size_of,
    example_of,
    has_batches,
    identity_of,
    in_batches_of,
    in_order,
    labels_of,
    num_samples,
    part_of,
    samples_of,
    targets_of,
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
from lit_pfl.data.per_client import PerClient
from lit_pfl.data.resident import ResidentLoader, SampleSet, TensorLoader
from lit_pfl.data.sources import CIFAR10, CIFAR100, MNIST, SVHN, Digits, FashionMNIST, TinyImageNet
from lit_pfl.data.table import Table
from lit_pfl.data.text import Text, WindowLoader

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
    "FromDataset",
    "ImageDataModule",
    "ImageSet",
    "Partition",
    "PartitionedDataModule",
    "PerClient",
    "ResidentLoader",
    "ResizedCropJitter",
    "SampleSet",
    "Table",
    "TensorLoader",
    "Text",
    "TinyImageNet",
    "Uniform",
    "WindowLoader",
    "batch_size_of",
    "example_of",
    "has_batches",
    "identity_of",
    "in_batches_of",
    "in_order",
    "label_permutation",
    "labels_of",
    "num_samples",
    "part_of",
    "samples_of",
    "targets_of",
]
