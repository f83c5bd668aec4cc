"""Pure functions and frozen dataclasses: no torch.distributed, no Lightning."""
