"""What the CPU kernels and whole commands take on this machine."""
