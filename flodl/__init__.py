"""flodl: data-parallel PyTorch training on unequal machines."""

__version__ = "0.1.0"
