"""Steps under the strategy: gradients reduced once per optimizer step or after every micro-batch, errors that end no loop silently."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlbatch.distributed.failure import end_of_data_is_an_error
from lightning_rlbatch.functional.gradient_sync import GradientSync, reduces_once
from lightning_rlbatch.strategies.checkpoint import CheckpointingStrategy
from lightning_rlbatch.strategies.sharding import reduces_unused_parameters, require_same_gradients, shardable_roots


class SynchronizingStrategy(CheckpointingStrategy):
    """Knows what was sharded, and when its gradients are reduced.

    Attributes:
        grad_sync: See :class:`RLBatchFSDPStrategy`.
        data_parallel_replicate_size: Replicas of the sharded model (HSDP).
    """

    grad_sync: GradientSync
    data_parallel_replicate_size: int

    @staticmethod
    def roots(module: nn.Module) -> Iterable[nn.Module]:
        """Yield what is sharded as a whole: children of the module, and the frozen models that it lists.

        Args:
            module: The LightningModule.
        """
        yield from (root for _, root in shardable_roots(module))
        unregistered = getattr(module, "unregistered_modules", None)
        if unregistered is not None:
            yield from unregistered()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients unreduced on each rank; the first backward outside of the context reduces their sum."""
        assert self.model is not None
        roots = [root for root in self.roots(self.model) if isinstance(root, FSDPModule)]
        once = reduces_once(self.grad_sync, sum(p.numel() for p in self.model.parameters() if p.requires_grad))

        def switch(on: bool) -> None:
            for root in roots:
                if once:
                    root.set_requires_gradient_sync(on)
                elif self.data_parallel_replicate_size > 1:  # each backward leaves a reduced shard; replicas add theirs up at the end
                    root.set_requires_all_reduce(on)

        switch(False)
        try:
            yield
        finally:
            switch(True)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        if not reduces_unused_parameters():
            assert self.model is not None
            require_same_gradients(self.model, self._world_group)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.pass_point()
        return super().training_step(*args, **kwargs)

    # -- steps of a module's own: Lightning's loops take a StopIteration for the end of the data ----------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", super().predict_step, args, kwargs)

    def _step(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return run(*args, **kwargs)
        except StopIteration as error:
            if is_param_in_hook_signature(getattr(self.lightning_module, name), "dataloader_iter", explicit=True):
                raise  # it reads the data itself
            raise end_of_data_is_an_error(error, f"{name} of {type(self.lightning_module).__name__}") from error
