"""Other packages beside this one, on the same weights."""
