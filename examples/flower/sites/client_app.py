"""What every SuperNode runs."""

from lit_pfl.links.flower import client_app
from sites.task import data, method

app = client_app(method, data)
