"""The HTML page, SARIF, the model card, and what codes mean.

Imports quality, checkpoint and below.
"""
