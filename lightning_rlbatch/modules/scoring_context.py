"""Run models outside of Lightning's hooks as inside of them: no gradient, evaluation mode, the run's precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch


@contextmanager
def scoring_context(module: "pl.LightningModule") -> Iterator[None]:
    """Enter evaluation without gradient under the precision plugin's context; restore every training flag on the way out.

    Rollouts are collected by a dataloader's iterator, where Lightning has no context of its own. Without the precision
    plugin's context the old log-probs would be computed in another precision than the update's, and the first probability
    ratio would not be 1.

    Args:
        module: A module that is attached to a Trainer.
    """
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        with torch.no_grad(), module.trainer.precision_plugin.forward_context():
            yield
    finally:
        for child in training:
            child.training = True
