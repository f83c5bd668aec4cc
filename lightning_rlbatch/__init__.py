"""Fast, exact RL post-training batches for PyTorch Lightning.

Names are imported when they are first used: ``import lightning_rlbatch`` loads neither Lightning nor transformers.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "MiniBatch": "data",
    "PPOModule": "modules",
    "RLBatchCLI": "cli",
    "RLBatchFSDPStrategy": "strategies",
    "RLBatchModule": "modules",
    "ReplayDataModule": "data",
    "RolloutDataModule": "data",
    "SFTDataModule": "data",
    "SFTModule": "modules",
    "TokenBudgetLoader": "data",
    "TokenBudgetSampler": "data",
    "callbacks": None,
}

__all__ = [*sorted(_HOMES), "register"]


def register() -> None:
    """Make ``Trainer(strategy="rlbatch_fsdp")`` known; importing ``lightning_rlbatch.strategies`` does it too."""
    importlib.import_module("lightning_rlbatch.strategies")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    home = _HOMES[name]
    if home is None:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
