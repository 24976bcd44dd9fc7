"""A federation of clients under a stock Trainer, and attacks on one."""

from lit_pfl.federation.attacks import ALIE, Attack, InnerProduct, LabelFlip, ScaledUpdate, SignFlip
from lit_pfl.federation.federation import Federation

__all__ = ["ALIE", "Attack", "Federation", "InnerProduct", "LabelFlip", "ScaledUpdate", "SignFlip"]
