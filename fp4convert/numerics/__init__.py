"""Formats, and the reference arithmetic that every kernel equals.

Imports errors only.
"""
