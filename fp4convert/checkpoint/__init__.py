"""What a checkpoint holds: modules, records, dialects, encodings.

Imports recipes and below.
"""
