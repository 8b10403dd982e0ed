"""Which modules stay, share a scale or are stacks: configs/*.toml, and patterns.

Imports storage and numerics.
"""
