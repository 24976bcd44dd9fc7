"""Memory that several processes see."""

import torch
from torch import nn

from lit_pfl.engines.shared_memory import Home


def test_a_parameter_that_has_moved_can_take_another_shape():
    """As matching gives it; the graph of a copy would remember the former one."""
    layer = nn.Linear(3, 2)
    home = Home(list(layer.parameters()))
    for parameter, at_home in zip(layer.parameters(), home.tensors, strict=True):
        assert torch.equal(parameter, at_home)
        assert not at_home.requires_grad
        parameter.data = at_home
    for outputs in (2, 5):
        layer.weight.data, layer.bias.data = torch.ones(outputs, 3), torch.zeros(outputs)
        layer(torch.ones(4, 3)).sum().backward()
        assert layer.weight.grad.shape == (outputs, 3)
        layer.zero_grad()
