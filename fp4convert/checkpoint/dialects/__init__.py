"""How each engine names and lays out four-bit weights: one file a dialect.

Imports storage and numerics.
"""
