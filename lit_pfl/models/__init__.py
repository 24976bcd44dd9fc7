"""Backbones, body and head apart."""

from lit_pfl.models.backbone import Backbone
from lit_pfl.models.cnn import CNN, MLP
from lit_pfl.models.resnet import ResNet9

__all__ = ["CNN", "MLP", "Backbone", "ResNet9"]
