"""What methods are made of: a client is a learner under a method."""

from lit_pfl.client.client import Client
from lit_pfl.client.spec import ClientSpec

__all__ = ["Client", "ClientSpec"]
