"""Why some of Lightning's own callbacks do not fit our modules.

The standard library only: ``rlbatch explain`` tells the same without loading torch.
"""

_BEFORE_MODELS = "works on the module before its models are made, so that it would have no effect"
CALLBACK_REASONS = {
    "BaseFinetuning": f"{_BEFORE_MODELS}. Freeze parameters in build_models (requires_grad_(False)) and remove the callback.",
    "BatchSizeFinder": "would change mini_batch_size, and with it the update. Set max_tokens_per_rank, with the help of MemoryRehearsal.",
    "GradientAccumulationScheduler": "accumulates batches, but one batch here is one optimizer step. Set mini_batch_size.",
    "LearningRateFinder": "looks for a loss that falls as training goes well. Compare short runs, and set the lr of the optimizer.",
    "ModelPruning": f"{_BEFORE_MODELS}. Prune in build_models and remove the callback.",
    "StochasticWeightAveraging": f"{_BEFORE_MODELS}. Use WeightAveraging or EMAWeightAveraging, under DDP or on one device.",
}
"""By the name of the class, as what follows "it"."""
NEVER_SAVES = "never saves by time under manual optimization. Use RLBatchModelCheckpoint with the same train_time_interval."
"""Of ``ModelCheckpoint`` with a ``train_time_interval``."""


def misfit_callback(name: str, module: str, reason: str) -> str:
    """Return the sentence about a callback.

    Args:
        name: Of its class.
        module: Of the module's class.
        reason: As above.
    """
    return f"The callback {name} does not fit {module}: it {reason}"
