"""Start the ranks, or join those that somebody else has started, with every rank's errors told to all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from typing_extensions import override

from lightning_rlbatch.strategies.guarded import Guarded
from lightning_rlbatch.strategies.state import full_model_state

if TYPE_CHECKING:
    from lightning_rlbatch.strategies.fsdp import RLBatchFSDPStrategy


class ScriptLauncher(_SubprocessScriptLauncher):
    """Run the script once more per rank; under torchrun or SLURM the ranks are there already and nothing is started.

    Args:
        strategy: The strategy; its cluster environment is known.
    """

    def __init__(self, strategy: "RLBatchFSDPStrategy") -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        return super().launch(Guarded(self._strategy, function), *args, trainer=trainer, **kwargs)


class ProcessLauncher(_MultiProcessingLauncher):
    """Fork or spawn the ranks from this process, for notebooks and tests; the trained weights come back to it.

    Args:
        strategy: The strategy.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        return super().launch(Guarded(self._strategy, function), *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: "pl.Trainer", results: Any) -> Any:
        # Lightning would store this rank's shards, which the parent cannot load: it has no process group.
        module = trainer.lightning_module
        state = full_model_state(module, keep=self._strategy.local_rank == 0)
        original = module.state_dict
        object.__setattr__(module, "state_dict", lambda: state)
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            object.__setattr__(module, "state_dict", original)
