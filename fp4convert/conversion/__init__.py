"""quantize, dequantize, transcode and prune: from a request to its result.

Imports execution, planning and below; ray in one file.
"""
