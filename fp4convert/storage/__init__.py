"""Bytes on a disk: safetensors and GGUF files, checkpoints, JSON.

Imports errors, process and progress.
"""
