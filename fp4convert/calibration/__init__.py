"""Statistics of what linear layers are given, and how they are gathered.

Imports checkpoint and below; torch and transformers.
"""
