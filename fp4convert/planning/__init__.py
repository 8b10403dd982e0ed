"""Headers and a recipe become a plan of every output byte; reads no weights.

Imports calibration and below.
"""
