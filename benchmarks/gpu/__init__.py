"""What the CUDA kernels take on a GPU, and whether they are right there."""
