"""A project of Flower: what server and clients run."""
