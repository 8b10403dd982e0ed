"""inspect, verify, compare, analyze: what an artifact is, what it lost.

Imports planning and below.
"""
