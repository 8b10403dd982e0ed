"""Round rows under a scale rule: a file for each method.

Methods wrap each other. Imports calibration and the floors below it.
"""
