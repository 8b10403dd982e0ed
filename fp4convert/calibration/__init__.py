"""Statistics of the inputs of linear layers; methods that use them.

Imports checkpoint and below; torch and transformers.
"""
