"""Checkpoints on disk: a bundle of files that is replaced as a whole, or not at all."""
