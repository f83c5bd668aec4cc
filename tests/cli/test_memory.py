"""The estimate of memory beside what tiny runs allocate, byte for byte: every storage is counted while it lives."""

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from configs import config
from hand_made import HandMadeDataModule, Step, make_samples
from helpers import length_reward, make_trainer
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlbatch.cli import memory_update
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.memory import describe
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import GAE
from lightning_rlbatch.models import scoring
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

BUDGET, LENGTH = 256, 64
VOCABULARY = 4096  # BUDGET x VOCABULARY logits are few enough to be kept whole, TILED x VOCABULARY are not
TILED = 1024
STEP = 2**16  # bytes by which the peak must grow before all storages are looked at again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose head, blocks, parameters and activations are all worth counting."""
    path = str(tmp_path_factory.mktemp("model"))
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, pad_token_id=0, **sizes)).save_pretrained(path)
    return path


class Allocations(TorchDispatchMode):
    """Bytes of all CPU storages that operations have seen, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.see((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage())
        return result

    def see(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self.forget, key)
        self.live += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        if self.live > self.peak + STEP:
            self.look_again()
            self.peak = max(self.peak, self.live)

    def look_again(self):
        """FSDP frees gathered parameters by making their storages empty, which no operation shows."""
        for key, reference in self.storages.items():
            storage = reference()
            self.sizes[key] = 0 if storage is None else storage.nbytes()
        self.live = sum(self.sizes.values())

    def forget(self, key):
        self.live -= self.sizes.pop(key, 0)
        del self.storages[key]


class PeakOfUpdates(pl.Callback):
    """The most bytes of the updates that begin with optimizer states."""

    def __init__(self, allocations: Allocations) -> None:
        self.allocations = allocations
        self.peak = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.allocations.look_again()
        self.allocations.peak = self.allocations.live

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > 1:
            self.peak = max(self.peak, self.allocations.peak)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def amsgrad(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, amsgrad=True)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


OPTIMIZERS = {
    amsgrad: {"class_path": "torch.optim.AdamW", "init_args": {"amsgrad": True}},
    momentum: {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}},
}
# Name -> options of the module, of the strategy, the budget, and the precision.
ONE: dict[str, dict[str, Any]] = {
    "entropy bonus, amsgrad": {"model": {"entropy_coefficient": 0.01}, "optimizer": amsgrad},
    "full KL, momentum": {"model": {"kl_coefficient": 0.1, "kl_kind": "full"}, "optimizer": momentum},
    "tiles not kept, autocast": {"budget": TILED, "model": {"head_memory_mib": 0.0}, "precision": "bf16-mixed"},
}
TWO: dict[str, dict[str, Any]] = {
    "full KL, tiled": {"budget": TILED, "model": {"kl_coefficient": 0.1, "kl_kind": "full"}},
    "checkpointing, bf16": {"budget": TILED, "strategy": {"activation_checkpointing": True}, "precision": "bf16-mixed"},
    "critic, reduced every micro-step": {"model": {"critic": ..., "advantage": GAE()}, "strategy": {"grad_sync": "every"}},
}


def measured(folder: str, case: dict[str, Any], world_size: int) -> int:
    """Train two steps of two micro-batches that fill the budget; return the peak of the second step on this rank."""
    model, strategy, budget = case.get("model", {}), case.get("strategy", {}), case.get("budget", BUDGET)
    groups = world_size // strategy.get("sequence_parallel_size", 1)
    samples = make_samples([(1, LENGTH - 1)] * (2 * budget * world_size // groups * groups // LENGTH), dtype=torch.float32)
    allocations = Allocations()
    watch = PeakOfUpdates(allocations)
    with allocations:
        options = {name: folder if value is ... else value for name, value in model.items()}
        module = PPOModule(folder, [length_reward], optimizer=case.get("optimizer", adamw), **options)
        trainer = make_trainer(
            world_size,
            strategy=RLBatchFSDPStrategy(**strategy) if world_size > 1 else "auto",
            max_epochs=2,
            callbacks=[watch],
            precision=case.get("precision", "32-true"),
        )
        trainer.fit(module, datamodule=HandMadeDataModule(samples, [Step(BatchingOptions(max_tokens_per_rank=budget))]))
    return watch.peak


def estimated(folder: str, case: dict[str, Any], world_size: int) -> int:
    model = {name: folder if value is ... else value for name, value in case.get("model", {}).items() if name != "advantage"}
    if case.get("optimizer") in OPTIMIZERS:
        model["optimizer"] = OPTIMIZERS[case["optimizer"]]
    lengths = {"max_prompt_length": LENGTH // 2, "max_response_length": LENGTH // 2, "max_tokens_per_rank": case.get("budget", BUDGET)}
    content = config(model={"policy": folder, **model}, strategy=case.get("strategy"), data=lengths)
    content["trainer"] |= {"devices": world_size, "precision": case.get("precision", "32-true")}
    if world_size == 1:
        content["trainer"]["strategy"] = "auto"
    memory = explain(run_config(content)).memory
    assert memory is not None
    return memory.total


@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE), (2, TWO)], ids=["one process", "two FSDP ranks"])
def test_the_estimate_is_what_an_update_allocates_at_its_peak(folder, world_size, cases):
    def fn(rank: int, size: int) -> list[int]:
        return [measured(folder, case, size) for case in cases.values()]

    peaks = run_distributed(fn, world_size, init_process_group=False)
    found = {name: max(peak[index] for peak in peaks) for index, name in enumerate(cases)}
    ratios = {name: estimated(folder, case, world_size) / found[name] for name, case in cases.items()}
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios


def test_constants_of_the_head_are_those_of_the_package():
    names = ("DIRECT_ELEMENTS", "CPU_TILE", "ACCELERATOR_TILE", "HEAD_MEMORY_MIB")
    assert [getattr(memory_update, name) for name in names] == [getattr(scoring, name) for name in names]


def sizes_of(content: dict[str, Any]) -> dict[str, int]:
    memory = explain(run_config(content)).memory
    assert memory is not None
    return {describe(part): part.size for part in memory.parts}


def test_an_optimizer_that_is_not_known_is_said_to_be_taken_for_adamw_and_8_bit_states_are_a_quarter(folder):
    content = config(model={"policy": folder, "optimizer": {"class_path": "mine.Sophia"}})
    memory = explain(run_config(content)).memory
    assert memory is not None
    assert "states of Sophia are not known here" in memory.notes[0]
    adamw_states = sizes_of(config(model={"policy": folder}))["policy: AdamW states (fp32 x 2)"]
    assert sizes_of(content)["policy: Sophia states (fp32 x 2)"] == adamw_states
    content["model"]["init_args"]["optimizer"] = {"class_path": "bitsandbytes.optim.AdamW8bit"}
    assert sizes_of(content)["policy: AdamW8bit states (8 bit x 2)"] == adamw_states // 4


def test_without_a_bound_on_tokens_only_states_are_counted(folder):
    content = config(model={"policy": folder}, data={"max_tokens_per_rank": ..., "micro_batch_size": 2, "max_prompt_length": None})
    memory = explain(run_config(content)).memory
    assert memory is not None
    assert (memory.bounded, memory.update) == (False, 0)
    assert memory.total == memory.states > 0
