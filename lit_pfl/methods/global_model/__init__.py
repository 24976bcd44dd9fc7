"""One model for all clients.

What clients trained is averaged; the methods differ in the local loss and in the server's step.
"""
