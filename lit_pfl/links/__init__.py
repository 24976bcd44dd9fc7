"""How uploads are sent. All links speak the same two sentences: join and exchange."""

from lit_pfl.engines.greenlets import LocalHub, LocalLink
from lit_pfl.links.process_group import ProcessGroupLink

__all__ = ["LocalHub", "LocalLink", "ProcessGroupLink"]
