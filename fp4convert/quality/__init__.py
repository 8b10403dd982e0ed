"""inspect, verify, compare and analyze: what an artifact is, and what it lost.

Imports planning and below.
"""
