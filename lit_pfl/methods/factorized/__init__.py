"""Weights in factors, in groups, or sparse.

Part of them is shared, and less is sent.
"""
