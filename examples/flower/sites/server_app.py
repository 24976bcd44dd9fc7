"""What the SuperLink runs."""

from lit_pfl.links.flower import server_app
from sites.task import method, spec

app = server_app(method, spec)
