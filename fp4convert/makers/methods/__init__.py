"""How rows are rounded under a scale rule: a file for each method, which wrap each other.

Imports calibration and the floors below it.
"""
