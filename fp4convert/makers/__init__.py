"""How one kind of output is made: a file for each maker, and one table of them.

Imports calibration and the floors below it.
"""
