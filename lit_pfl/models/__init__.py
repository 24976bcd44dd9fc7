"""Backbones, body and head apart."""

from lit_pfl.models.backbone import Backbone
from lit_pfl.models.cnn import CNN, MLP
from lit_pfl.models.mobilenet import MobileNetV1
from lit_pfl.models.psi import Boundary, GroupedNorms, Structure, psi
from lit_pfl.models.resnet import ResNet9, ResNet18
from lit_pfl.models.torchvision_model import TorchvisionModel
from lit_pfl.models.vgg import VGG9, VGG16

__all__ = [
    "CNN",
    "MLP",
    "VGG9",
    "VGG16",
    "Backbone",
    "Boundary",
    "GroupedNorms",
    "MobileNetV1",
    "ResNet9",
    "ResNet18",
    "Structure",
    "TorchvisionModel",
    "psi",
]
