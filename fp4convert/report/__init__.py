"""The HTML page, SARIF, the model card, and the meaning of codes.

Imports quality, checkpoint and below.
"""
