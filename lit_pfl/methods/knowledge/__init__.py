"""Models teach one another.

What travels is what models say of data (class means, outputs), or a model that others are taught by.
"""
