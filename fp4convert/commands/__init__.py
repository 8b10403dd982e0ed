"""The public functions: words in, results out.

Imports everything below; nothing of the command line.
"""
