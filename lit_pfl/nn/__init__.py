"""Layers."""

from lit_pfl.nn.factorized import (
    FactorizedConv2d,
    FactorizedLinear,
    Form,
    factorize,
    factorized_layers,
    l1_norm_of_masks,
)

__all__ = ["FactorizedConv2d", "FactorizedLinear", "Form", "factorize", "factorized_layers", "l1_norm_of_masks"]
