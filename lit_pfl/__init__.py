"""Personalized federated learning as a PyTorch Lightning plugin suite."""

from lit_pfl.client import Client
from lit_pfl.federation import Federation
from lit_pfl.payload import Payload
from lit_pfl.server import Server

__all__ = ["Client", "Federation", "Payload", "Server"]
