"""Mini-batches, modules and rollouts made by hand, whose numbers are known beforehand or come from the slow, obvious way."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.store import SAMPLE_ID, RolloutStore, gather_table
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.functional.aggregation import Denominators, aggregate
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules import MicroBatchOutput, PPOModule, RLBatchModule
from lightning_rlbatch.rollout.dispatch import contiguous_share
from lightning_rlbatch.rollout.engine import Completion, RolloutRequest, SamplingParams
from tests.helpers import VOCAB, frozen_sgd

# -- mini-batches made by hand -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """One optimizer step of a test.

    Attributes:
        options: How the mini-batch is cut.
        settings: Attributes of the module that are set before the step.
        order: Which samples, in which order; None takes all as they are.
        samples: The samples, where they are not the data module's.
    """

    options: BatchingOptions
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    order: Sequence[int] | None = None
    samples: PackedBatch | None = None


class HandMadeDataModule(pl.LightningDataModule):
    """Feeds steps whose samples are known, dealt over the ranks as rollouts would lie, through the real exchange and planner.

    Args:
        samples: All samples, on every rank.
        steps: What to train on.
    """

    def __init__(self, samples: PackedBatch, steps: Sequence[Step]) -> None:
        super().__init__()
        self.samples = samples
        self.steps = steps

    def train_dataloader(self) -> "HandMadeDataModule":
        return self

    def val_dataloader(self) -> list[Any]:
        return []

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[MiniBatch]:
        module = self.trainer.lightning_module
        for step in self.steps:
            for name, value in step.settings.items():
                assert hasattr(module, name), name
                setattr(module, name, value)
            samples = self.samples if step.samples is None else step.samples
            chosen = samples.select(list(range(samples.num_samples)) if step.order is None else step.order)
            yield deal(chosen, step.options, module.meshes).mini_batch(list(range(chosen.num_samples)))


def deal(samples: PackedBatch, options: BatchingOptions, meshes: Meshes) -> RolloutStore:
    """Return this rank's store of one mini-batch whose samples every rank knows."""
    number = samples.num_samples
    samples = samples.with_fields(
        per_sample={SAMPLE_ID: torch.arange(number), "reward": torch.zeros(number, dtype=torch.float64), "truncated": torch.zeros(number)}
    )
    own = samples.select(list(contiguous_share(number, meshes.world_size, meshes.rank)))
    return RolloutStore(own, gather_table(own, torch.arange(number), 1, meshes), [list(range(number))], options, meshes)


def make_samples(shapes: Sequence[tuple[int, int]], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PackedBatch:
    """Return samples with all fields of PPO, at random.

    Args:
        shapes: (prompt tokens, response tokens) of each sample; a sample without response tokens is legal.
        seed: Of tokens and fields.
        dtype: Of the floating-point fields.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + response for prompt, response in shapes]
    total = sum(lengths)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    mask = torch.cat([torch.tensor([False] * prompt + [True] * response) for prompt, response in shapes])

    def draw(scale: float, shift: float = 0.0) -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64).mul(scale).add(shift).to(dtype)

    fields = {
        "input_ids": torch.randint(3, VOCAB, (total,), generator=generator),
        "response_mask": mask,
        "old_log_probs": draw(0.5, -4.0),
        "ref_log_probs": draw(0.5, -4.0),
        "advantages": draw(1.0),
        "returns": draw(1.0),
        "values": draw(0.3),
    }
    return PackedBatch(bounds, fields)


def with_policy_log_probs(samples: PackedBatch, model: LlamaForCausalLM, *, noise: float = 0.0, seed: int = 1) -> PackedBatch:
    """Return samples whose old and reference log-probs are the model's own plus noise: ratios near 1, as in training."""
    generator = torch.Generator().manual_seed(seed)
    rows = plain_log_probs(samples, model)
    moved = {
        name: torch.where(samples["response_mask"], rows + noise * torch.randn(rows.shape, generator=generator, dtype=torch.float64), 0)
        for name in ("old_log_probs", "ref_log_probs")
    }
    return samples.with_fields(per_token={name: value.to(samples[name].dtype) for name, value in moved.items()})


@torch.no_grad()
def plain_log_probs(samples: PackedBatch, model: LlamaForCausalLM) -> Tensor:
    """Return [T] log-probs from one forward per sample with the model's own attention: the slow, obvious way."""
    rows = []
    for ids in samples.split_per_sample("input_ids"):
        logits = model.eval()(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].double().log_softmax(-1)
        rows.append(torch.cat([logits.new_zeros(1), logits[:-1].gather(1, ids[1:, None]).squeeze(1)]))
    return torch.cat(rows)


# -- modules whose numbers can be worked out by hand -------------------------------------------------------------------------------


class Scale(torch.nn.Module):
    """One weight, 1 at first: its gradient is the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return self.weight * values


class ConstantLossModule(RLBatchModule):
    """The loss of a token is its ``constant`` times the weight: losses, gradients and metrics are sums of the constants."""

    def __init__(self, loss_aggregation: str = "token-mean", **kwargs: Any) -> None:
        super().__init__(**{"optimizer": frozen_sgd, "max_grad_norm": None, **kwargs})
        self.loss_aggregation = loss_aggregation
        self.seen: list[list[int]] = []
        self.num_micro_batches = 0

    def build_models(self) -> None:
        self.model = Scale()

    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        self.seen.append([])
        super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Only here because Lightning warns about data modules with a ``val_dataloader`` otherwise."""

    def micro_batch_step(self, micro_batch: PackedBatch, denominators: Denominators) -> MicroBatchOutput:
        self.num_micro_batches += 1
        mask = self.score_mask(micro_batch)
        if SAMPLE_ID in micro_batch:
            self.seen[-1] += [
                index for index, used in zip(micro_batch[SAMPLE_ID].tolist(), micro_batch.split_per_sample("response_mask")) if used.any()
            ]
        terms = self.model(micro_batch["constant"])
        loss = aggregate(terms, mask, micro_batch.cu_seqlens, self.loss_aggregation, denominators)
        return MicroBatchOutput(loss, {"mine": (torch.where(mask, micro_batch["constant"], 0).sum(), mask.sum())})


def constant_sample(num_responses: int, constant: float, sample_id: int = 0) -> dict[str, Any]:
    """Return a sample of one prompt token and some response tokens that share one constant."""
    length = 1 + num_responses
    mask = [False] + [True] * num_responses
    return {"input_ids": [3] * length, "response_mask": mask, "constant": torch.full((length,), constant), SAMPLE_ID: sample_id}


# -- rollouts made by hand ---------------------------------------------------------------------------------------------------------


class ScriptedEngine:
    """A rollout engine without a model: the response to a prompt has as many tokens as the prompt's first token says."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: Any = None) -> list[Completion]:
        completions = []
        for request in requests:
            length = min(request.prompt_ids[0] - 2, sampling.max_new_tokens)
            tokens = [3 + (request.seed + place) % (VOCAB - 3) for place in range(length)]
            completions.append(Completion(tokens, [-1.0] * length, "stop"))
        return completions

    def update_weights(self, weights: Any) -> None:
        for _ in weights:
            pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass


class ScriptedPPO(PPOModule):
    """PPO whose responses have known lengths: prompt 'a' is answered by 1 token, 'b' by 2, ..."""

    def build_engine(self, model: Any) -> ScriptedEngine:
        return ScriptedEngine()


def prompts(text: str) -> list[dict[str, str]]:
    """Return one prompt row per letter."""
    return [{"prompt": letter} for letter in text]


def varied_reward(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Return a reward that differs between rollouts of a prompt."""
    return [1.0 + sum(tokens) % 7 for tokens in completion_ids]
