"""The first minutes on a GPU machine that is lent, without a network."""
