"""Every private name of Lightning, torch and transformers that this package uses, and why; each has a canary test.

A new release of one of them may drop a name without notice. Look here first when it does.
"""

PRIVATE_NAMES: dict[str, str] = {
    # -- Lightning: strategies -------------------------------------------------------------------------------------------------
    "lightning.pytorch.strategies.ModelParallelStrategy._setup_distributed": "joins the process group; the public way builds a mesh too",
    "lightning.pytorch.strategies.ModelParallelStrategy._timeout": "the base class keeps the timeout of its process group here",
    "lightning.pytorch.strategies.ModelParallelStrategy._device_mesh": "its samplers and checkpoints read the mesh here",
    "lightning.pytorch.strategies.ModelParallelStrategy._save_distributed_checkpoint": "folder or file; kept by the base class",
    "lightning.pytorch.strategies.ModelParallelStrategy._precision_plugin": "behind the public property whose setter we override",
    "lightning.pytorch.strategies.ModelParallelStrategy._launcher": "what `_configure_launcher` of every strategy sets",
    "lightning.pytorch.strategies.ModelParallelStrategy._configure_launcher": "the only place where a strategy chooses its launcher",
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher": "no public launcher forks",
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher._collect_rank_zero_results": "would send the parent shards",
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": "no public launcher runs the script again",
    "lightning.fabric.utilities.optimizer._optimizers_to_device": "what every strategy's setup does with optimizer states",
    "lightning.fabric.utilities.types._PATH": "the type of paths in the signatures that we override",
    # -- Lightning: modules, callbacks -------------------------------------------------------------------------------------------
    "lightning.pytorch.LightningModule._trainer": "tells a module without a Trainer; the public property raises",
    "lightning.pytorch.LightningModule._device_mesh": "its public property `device_mesh` reads it, and strategies set it",
    "lightning.pytorch.callbacks.ModelCheckpoint._train_time_interval": "the stock class never saves by it under manual optimization",
    "lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates": "the metrics to compare by and to fill names with",
    "lightning.pytorch.callbacks.ModelCheckpoint._should_skip_saving_checkpoint": "sanity check, fast_dev_run, saved already",
    "lightning.pytorch.callbacks.ModelCheckpoint._should_save_on_train_epoch_end": "before or after validation",
    "lightning.pytorch.callbacks.ModelCheckpoint._save_topk_checkpoint": "there is no public way to save and rank",
    "lightning.pytorch.callbacks.ModelCheckpoint._save_last_checkpoint": "there is no public way to save the last",
    "lightning.pytorch.callbacks.ModelCheckpoint._remove_checkpoint": "removes before the link has moved",
    "lightning.pytorch.callbacks.ModelCheckpoint._link_checkpoint": "leaves a moment without a link",
    "lightning.pytorch.core.mixins.hparams_mixin._given_hyperparameters": "the configuration that LightningCLI made the module from",
    "lightning.pytorch.callbacks.throughput_monitor._plugin_to_compute_dtype": "dtype of the arithmetic, for the share of peak FLOP/s",
    # -- torch --------------------------------------------------------------------------------------------------------------------
    "torch.nn.modules.dropout._DropoutNd": "the base class of all dropout layers",
    "torch.nn.Module._forward_pre_hooks": "tells whether a model is attached to packed attention already",
    "torch.distributed.distributed_c10d._get_default_store": "tells the other ranks of a failure when collectives cannot",
    # -- transformers ---------------------------------------------------------------------------------------------------------------
    "transformers.PreTrainedModel._no_split_modules": "names the blocks to shard one by one",
    "transformers.PreTrainedModel._supports_attention_backend": "tells whether a model calls attention through the registry",
    "transformers.PreTrainedModel._can_set_attn_implementation": "tells whether a model's attention can be exchanged",
    "transformers.PretrainedConfig._attn_implementation": "the attention in use; there is a public setter but no getter",
    "transformers.PretrainedConfig._attn_implementation_internal": "restores the attention of a model whose hub kernel is absent",
}
"""Dotted path of each name to the reason why there is no way around it."""
