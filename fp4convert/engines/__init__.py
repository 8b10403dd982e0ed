"""What inference engines load, by version: rows, verdicts, versions.

Imports errors.
"""
