"""Fast, exact RL post-training batches for PyTorch Lightning."""

__version__ = "0.1.0"
