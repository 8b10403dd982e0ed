"""Adapters: small changes of a checkpoint's weights, in PEFT's layout.

May import what checkpoint may.
"""
