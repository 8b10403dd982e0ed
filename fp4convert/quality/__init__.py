"""inspect, verify, compare, analyze: describe artifacts, measure losses.

Imports planning and below.
"""
