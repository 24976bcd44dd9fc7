"""Models teach one another.

What is sent is what models say of data (class means, outputs), or a model that others are taught by.
"""
