"""Which modules stay, share a scale or are stacks: recipe files.

Imports storage and numerics.
"""
