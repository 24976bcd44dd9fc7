"""Layers that treat every channel, or every feature, by itself."""

from torch import nn

#: types that may stand between two layers when channels are followed, permuted or divided into groups
CHANNELWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Tanh, nn.Sigmoid,
    nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveAvgPool2d,
)  # fmt: skip
