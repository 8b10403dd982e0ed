"""Contents of checkpoints: modules, records, dialects, encodings.

Imports recipes and below.
"""
