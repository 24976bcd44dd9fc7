"""Callbacks that look at what a classifier's layers make of its input."""
