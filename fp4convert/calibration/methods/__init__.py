"""Methods that use a calibration: GPTQ, AWQ, SmoothQuant.

Imports checkpoint and below; torch.
"""
