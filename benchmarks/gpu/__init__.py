"""Measure the CUDA kernels on a GPU, and compare what they give."""
