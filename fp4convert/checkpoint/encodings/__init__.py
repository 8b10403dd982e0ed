"""How a source stores a matrix: floats, FP8, integers, four bits.

Imports dialects, recipes and below.
"""
