"""Headers and a recipe become a plan of every output byte.

Imports calibration and below.
"""
