"""How often the update waits for its device: on an accelerator every read of a value on the host stops the queue of work."""

import collections
import functools
import traceback

import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples
from helpers import length_reward, make_trainer, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import ClipCov, PackedBatch
from lightning_rlbatch.functional.segments import segment_ids
from lightning_rlbatch.models.scored_positions import ScoredPositions
from lightning_rlbatch.modules import PPOModule, SFTModule
from lightning_rlbatch.testing import run_distributed


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for values, by the last line of ours or of transformers that asked."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
    ON_THE_HOST_ONLY = ("_lead_through",)  # functions of ours that are called for host tensors alone

    def __init__(self):
        super().__init__()
        self.places = collections.Counter()

    def note(self, what):
        stack = traceback.extract_stack()
        frames = [f"{frame.filename}:{frame.lineno}" for frame in stack if "/tests/" not in frame.filename]
        if any(frame.name in self.ON_THE_HOST_ONLY for frame in stack):
            return
        if any("torch/optim" in frame for frame in frames):
            return  # step counts of an optimizer live on the host
        ours = [frame for frame in frames if "lightning_rlbatch" in frame or "transformers" in frame]
        self.places[what, ours[-1] if ours else "elsewhere"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(getattr(index, "dtype", None) == torch.bool for index in _indices(args))
        unknown_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in self.OPERATIONS or by_mask or unknown_size:
            self.note(name)
        return func(*args, **(kwargs or {}))


def _indices(args):
    return args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []


def watch(module, reads):
    """Count the reads of the module's optimizer steps; ``tolist`` of a CPU tensor runs no operation, so the method itself is watched."""
    step = module.training_step

    def watched(batch, batch_idx):
        with pytest.MonkeyPatch.context() as patch, reads:
            for name in ("tolist", "cpu", "numpy"):
                original = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, functools.partialmethod(_noting, reads, name, original))
            step(batch, batch_idx)

    module.training_step = watched


def _noting(tensor, reads, name, original, *args, **kwargs):
    reads.note(name)
    return original(tensor, *args, **kwargs)


def make(kind):
    if kind == "sft":
        return SFTModule(tiny_llama)
    options = {
        "grpo": {},
        "ppo": {"critic": tiny_llama},
        "full kl": {"kl_coefficient": 0.1, "kl_kind": "full"},
        "clip cov": {"policy_loss": ClipCov()},
    }
    return PPOModule(tiny_llama, [length_reward], **options[kind])


KINDS = ("sft", "grpo", "ppo", "full kl", "clip cov")


def test_reads_from_the_device_do_not_grow_with_the_number_of_micro_batches():
    samples = make_samples([(2, 9), (1, 3), (2, 2), (3, 6)])

    def fn(rank, world_size):
        found = {}
        for kind in KINDS:
            for budget in (12, 64):
                module, reads = make(kind), Reads()
                watch(module, reads)
                data = HandMadeDataModule(samples, [Step(BatchingOptions(max_tokens_per_rank=budget))])
                make_trainer(world_size, "auto", max_epochs=1).fit(module, datamodule=data)
                found[kind, budget] = reads.places
        return found

    (found,) = run_distributed(fn, 1, init_process_group=False)
    for kind in KINDS:
        few, many = found[kind, 64], found[kind, 12]
        assert 0 < few.total() <= 12, few
        assert many - few == collections.Counter(), f"{kind}: a read per micro-batch: {many - few}"


def test_prepared_positions_are_those_found_without_preparation_and_follow_a_changed_mask():
    mask = torch.tensor([False, True, True, False, True])
    batch = PackedBatch([0, 3, 5], {"input_ids": torch.arange(5), "response_mask": mask})
    other = PackedBatch([0, 2], {"input_ids": torch.arange(2), "response_mask": torch.zeros(2, dtype=torch.bool)})
    positions = ScoredPositions(None)
    positions.prepare([batch, other])
    with Reads() as reads:
        prepared = [positions.find(each)[2].clone() for each in (batch, other, batch.with_fields({"advantages": torch.ones(5)}))]
    assert not reads.places
    assert [each.tolist() for each in prepared] == [[0, 1, 3], [0], [0, 1, 3]]
    assert positions.find(batch.with_fields({"response_mask": mask & False | torch.tensor([0, 0, 1, 0, 0]).bool()}))[2].tolist() == [1]


def test_what_is_not_counted_is_done_for_host_tensors_alone():
    """A tensor without values cannot be read: whatever read it would raise."""
    assert segment_ids(torch.empty(4, dtype=torch.int32, device="meta"), 7).shape == (7,)
