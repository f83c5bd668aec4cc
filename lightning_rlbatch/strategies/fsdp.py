"""A Lightning strategy: FSDP2 over a data-parallel x sequence-parallel mesh."""

import dataclasses
import functools
import uuid
from datetime import timedelta
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rlbatch.distributed.fingerprint import CollectiveCheck
from lightning_rlbatch.distributed.mesh import Meshes, build_meshes, check_world
from lightning_rlbatch.functional.gradient_sync import GradientSync
from lightning_rlbatch.strategies.atomic import AtomicCheckpointIO
from lightning_rlbatch.strategies.compatibility import (
    check_lightning_module,
    check_links,
    check_whole_copies,
    mixed_up_packages,
)
from lightning_rlbatch.strategies.failure import FailureReport, require_ranks
from lightning_rlbatch.strategies.launch import ProcessLauncher, ScriptLauncher
from lightning_rlbatch.strategies.materialize import Materializer
from lightning_rlbatch.strategies.precision import convert_parameters, fsdp_precision, mixed_precision_policy
from lightning_rlbatch.strategies.sharding import (
    ShardingOptions,
    require_same_options,
    require_sharded,
    shard,
)
from lightning_rlbatch.strategies.synchronization import SynchronizingStrategy


class RLBatchFSDPStrategy(SynchronizingStrategy):
    """Shard parameters, gradients and optimizer states over all ranks; share samples inside sequence-parallel groups.

    The world is ``data_parallel x sequence_parallel``; FSDP2 shards over all of it, or over
    ``world / data_parallel_replicate_size`` ranks with replicas (HSDP). Runs on CUDA with NCCL and on CPU with gloo.
    Registered as ``strategy="rlbatch_fsdp"``.

    Blocks are found and sharded by the strategy after ``configure_model``; a module needs no FSDP code. A frozen model
    that is held outside the module tree is sharded too if the module lists it in ``unregistered_modules()``.

    Args:
        sequence_parallel_size: Ranks that share one packed micro-batch (Ulysses); the world size must be a multiple.
        data_parallel_replicate_size: Replicas of the sharded model (HSDP).
        wrap_cls: Class names of the blocks to shard one by one. None finds them.
        reshard_after_forward: Free gathered block parameters between forward and backward (saves memory, gathers twice).
        cpu_offload: Keep parameters, gradients and optimizer states in host memory.
        reference_cpu_offload: Keep the shards of frozen models (the reference policy) in host memory.
        activation_checkpointing: Compute the activations of each block again in the backward pass, to save memory.
        grad_sync: ``"last"`` reduces gradients once per optimizer step, after the last micro-batch; whole gradients lie on every rank
            until then. ``"every"`` reduces after each micro-batch: more communication, a shard's memory. ``"auto"`` is ``"last"`` for
            models of up to 1.07 billion trained parameters (4 GiB of gradients), else ``"every"``. The numbers are the same.
        compile_backend: Backend with which ``torch.compile`` compiles each block, such as ``"inductor"``; None does not compile.
        save_distributed_checkpoint: True writes a folder with one file per rank, False one ordinary file.
        async_save: Write checkpoints in the background while training goes on; they cost a copy of their size in host memory. The next
            one and the end of training wait for the one before. A checkpoint takes its name, and an older one is removed, when it is
            complete. Use ``RLBatchModelCheckpoint(save_last="link")``: a second copy under the name ``last`` would wait for the first.
        start_method: How to start the ranks on this machine: None runs the script again for each (Lightning's default), ``"fork"``,
            ``"forkserver"`` or ``"spawn"`` start them from this process. No effect under torchrun and SLURM.
        check_collectives: Debug mode: ranks compare what they are about to do before each optimizer step, and name the first difference.
        load_weights_only: False trusts checkpoints that hold other objects than tensors and plain values.
        process_group_backend: Backend; None takes NCCL on CUDA and gloo on CPU.
        timeout: How long a collective waits before it fails.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, or a cluster environment of your own.
        precision_plugin: Set by the Trainer. ``bf16-mixed`` becomes an FSDP2 policy with fp32 master weights.

    Raises:
        ValueError: A size is not positive, or the world size is not a multiple of it.

    Example::

        trainer = Trainer(accelerator="cpu", devices=2, strategy=RLBatchFSDPStrategy(), max_epochs=60)
        trainer.fit(PPOModule(...), datamodule=RolloutDataModule(...))
    """

    strategy_name = "rlbatch_fsdp"

    def __init__(
        self,
        sequence_parallel_size: int = 1,
        data_parallel_replicate_size: int = 1,
        *,
        wrap_cls: list[str] | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        reference_cpu_offload: bool = False,
        activation_checkpointing: bool = False,
        grad_sync: GradientSync = "auto",
        compile_backend: str | None = None,
        save_distributed_checkpoint: bool = False,
        async_save: bool = False,
        start_method: Literal["fork", "forkserver", "spawn"] | None = None,
        check_collectives: bool = False,
        load_weights_only: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        for name, size in (
            ("sequence_parallel_size", sequence_parallel_size),
            ("data_parallel_replicate_size", data_parallel_replicate_size),
        ):
            if size < 1:
                raise ValueError(f"Expected {name} to be at least 1 but got {size}. Use 1 to switch it off.")
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint, process_group_backend=process_group_backend, timeout=timeout
        )
        self.sequence_parallel_size = sequence_parallel_size
        self.data_parallel_replicate_size = data_parallel_replicate_size
        self.wrap_cls = wrap_cls
        self.reshard_after_forward = reshard_after_forward
        if grad_sync not in get_args(GradientSync):
            raise ValueError(f"Expected grad_sync to be 'auto', 'every' or 'last' but got {grad_sync!r}.")
        self.cpu_offload = cpu_offload
        self.reference_cpu_offload = reference_cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.grad_sync = grad_sync
        self.compile_backend = compile_backend
        self.start_method = start_method
        self.check_collectives = check_collectives
        self.load_weights_only = load_weights_only
        self.async_save = async_save
        self.checkpoint_io = AtomicCheckpointIO()
        if accelerator is not None:
            self.accelerator = accelerator
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.precision_plugin = precision_plugin
        self._meshes: Meshes | None = None
        self.collective_check: CollectiveCheck | None = None

    def __repr__(self) -> str:
        sizes = f"sequence_parallel_size={self.sequence_parallel_size}, data_parallel_replicate_size={self.data_parallel_replicate_size}"
        return f"{type(self).__name__}({sizes}){mixed_up_packages()}"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="FSDP2 over a data-parallel x sequence-parallel mesh", override=True)

    @property
    def meshes(self) -> Meshes:
        """The batch mesh and the FSDP mesh, known from ``DataModule.setup`` and ``configure_model`` on.

        Raises:
            RuntimeError: Before the Trainer has set up the processes.
        """
        if self._meshes is None:
            raise RuntimeError("The meshes exist once the Trainer has joined its processes: read them in setup() or configure_model().")
        return self._meshes

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = fsdp_precision(precision_plugin)

    @override
    def connect(self, model: "pl.LightningModule") -> None:
        check_lightning_module(model)
        super().connect(model)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.start_method is None or self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self)
        else:
            self._launcher = ProcessLauncher(self, start_method=self.start_method)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        check_whole_copies(self.lightning_module.trainer)
        ParallelStrategy.setup_environment(self)
        self.set_world_ranks()
        # Every rank raises here, before it joins a process group in which the others would wait.
        check_world(
            self.world_size,
            sequence_parallel_size=self.sequence_parallel_size,
            data_parallel_replicate_size=self.data_parallel_replicate_size,
        )
        if self.world_size > 1:
            require_ranks()
        self._setup_distributed()
        self._meshes = build_meshes(
            self.root_device.type,
            sequence_parallel_size=self.sequence_parallel_size,
            data_parallel_replicate_size=self.data_parallel_replicate_size,
            timeout=self._timeout,
        )
        if self.world_size > 1:
            self.failure_report = FailureReport(self.global_rank, self.world_size, self.broadcast(uuid.uuid4().hex))
        self._world_group = self._meshes.world_group
        if self.async_save and self._save_distributed_checkpoint:  # the writing threads agree while the main ones train
            self._save_group = dist.new_group(backend="gloo", timeout=self._timeout)
        if self.check_collectives:
            self.collective_check = CollectiveCheck(self._meshes.world_group)
        self._device_mesh = self._meshes.batch
        self.lightning_module._device_mesh = self._device_mesh

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.model is not None
        assert self.accelerator is not None
        if self.async_save:
            check_links(trainer)
        self.accelerator.setup(trainer)
        self.barrier("configure_model")  # a rank that could not build its models ends all of them here, before they communicate
        self.parallelize(self.model)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def parallelize(self, module: nn.Module) -> None:
        """Shard every child of the module, and the frozen models it lists; done once per module.

        Args:
            module: The LightningModule after ``configure_model``.

        Raises:
            MisconfigurationException: The module is wrapped by FSDP1, or a trainable parameter cannot be sharded.
        """
        if any(isinstance(child, torch.distributed.fsdp.FullyShardedDataParallel) for child in module.modules()):
            raise MisconfigurationException("RLBatchFSDPStrategy shards with FSDP2: remove FullyShardedDataParallel from the module.")
        mesh = self.meshes.fsdp
        assert mesh is not None  # the Trainer has set up the processes
        options = ShardingOptions(
            mesh,
            mixed_precision_policy(self.precision_plugin),
            wrap_cls=self.wrap_cls,
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=self.cpu_offload,
            activation_checkpointing=self.activation_checkpointing,
            compile_backend=self.compile_backend,
        )
        frozen = dataclasses.replace(options, cpu_offload=self.cpu_offload or self.reference_cpu_offload)
        for root in list(self.roots(module)):
            own = options if any(parameter.requires_grad for parameter in root.parameters()) else frozen
            if isinstance(root, FSDPModule):
                require_same_options(root, own)
                continue
            convert_parameters(root, self.precision_plugin)
            materializer = Materializer(self.root_device, self.meshes.world_group)
            materializer.require_equal(root)
            shard(root, own, materializer)
        require_sharded(module)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
            return
        for child in self.model.modules():  # shards stay where they are; what is used as it is moves
            for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.root_device)

    @override
    def teardown(self) -> None:
        super().teardown()
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        # After a run that ended well there are hooks to come, which communicate: `Guarded` ends the watch behind them.
        if self.failure_report is not None and (trainer is None or trainer.state.status != TrainerStatus.RUNNING):
            self.failure_report.close()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by data-parallel rank: sequence-parallel peers must draw the same random numbers."""
        if isinstance(dataloader, DataLoader) and dataloader.num_workers > 0 and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.meshes.dp_rank)
        return dataloader
