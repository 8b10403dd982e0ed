"""Make one kind of output in each file; one table chooses among them.

Imports calibration and the floors below it.
"""
