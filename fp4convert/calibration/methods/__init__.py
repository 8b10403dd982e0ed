"""Methods that use a calibration: GPTQ, AWQ.

Imports checkpoint and below; torch.
"""
