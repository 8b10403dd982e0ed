"""Bytes on a disk and on the Hub: safetensors, GGUF, JSON.

Imports errors, process and progress.
"""
