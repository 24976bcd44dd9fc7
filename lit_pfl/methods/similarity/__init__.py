"""Clients get mixtures of one another's models, by how similar they are or how much they help."""
