"""A policy with adapters is its own reference: the base model, with the adapters off."""

import pytest
import torch
from hand_made import (
    HandMadeDataModule,
    ScriptedPPO,
    Step,
    make_samples,
    plain_log_probs,
    prompts,
    varied_reward,
    with_policy_log_probs,
)
from helpers import StepRecorder, ToyTokenizer, make_trainer, tiny_llama, whole_parameters

from lightning_rlbatch.data import BatchingOptions, RolloutDataModule
from lightning_rlbatch.testing import run_distributed


class LowRank(torch.nn.Module):
    """A linear layer with a low-rank adapter, with the names that peft's layers have."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(1)
        self.down = torch.nn.Parameter(torch.randn(2, base_layer.in_features, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(base_layer.out_features, 2, generator=generator))
        self.enabled = True

    def enable_adapters(self, enabled):
        self.enabled = enabled
        self.requires_grad_(enabled)  # as peft does, of the base layer too: what was frozen must be frozen again

    def forward(self, states):
        result = self.base_layer(states)
        return result + states @ self.down.T @ self.up.T if self.enabled else result


def adapted_llama():
    model = tiny_llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_of_a_policy_with_adapters_is_its_base_model_without_a_copy(world_size):
    def fn(rank, world_size):
        seen = {}

        class Watching(ScriptedPPO):
            def compute_advantages(self, store, token_rewards):
                samples = store.samples
                seen["error"] = float(
                    (samples["ref_log_probs"] - plain_log_probs(samples, tiny_llama())).abs()[samples["response_mask"]].max()
                )
                seen["adapter"] = float((samples["ref_log_probs"] - samples["old_log_probs"]).abs().max())
                seen["frozen"] = len(self.unregistered_modules())
                seen["trained"] = sorted({name.rsplit(".", 1)[1] for name, p in self.named_parameters() if p.requires_grad})
                seen.setdefault("before", whole_parameters(self))
                return super().compute_advantages(store, token_rewards)

        module = Watching(
            adapted_llama, [varied_reward], kl_coefficient=0.1, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        )
        sizes = {"train_batch_size": 2, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 7}
        data = RolloutDataModule(lambda: prompts("gf"), ToyTokenizer(), max_tokens_per_rank=8, **sizes)
        make_trainer(world_size, max_epochs=2).fit(module, datamodule=data)
        after = whole_parameters(module)
        seen["moved"] = sorted(
            {name.rsplit(".", 1)[1] for name, value in seen.pop("before").items() if not torch.equal(value, after[name])}
        )
        return seen

    for seen in run_distributed(fn, world_size, init_process_group=False):
        assert seen["error"] < 1e-5
        assert seen["adapter"] > 1e-2, "with the adapters on the log-probs are others"
        assert seen["frozen"] == 0, "no second copy of the policy"
        assert seen["trained"] == seen["moved"] == ["down", "up"]


def test_the_full_divergence_is_that_from_the_base_model():
    samples = with_policy_log_probs(make_samples([(2, 5), (1, 9), (3, 1)]), tiny_llama(dtype=torch.float64))
    rows, mask = [], samples["response_mask"]
    for ids in samples.split_per_sample("input_ids"):
        with torch.no_grad():
            log_p, log_q = (
                model(ids[None], use_cache=False).logits[0].double().log_softmax(-1) for model in (adapted_llama(), tiny_llama())
            )
        rows.append(torch.cat([torch.zeros(1), (log_p.exp() * (log_p - log_q)).sum(-1)[:-1]]))
    expected = torch.cat(rows)[mask].mean().item()
    assert expected > 0.01

    def run(world_size, precision):
        recorder = StepRecorder()
        module = ScriptedPPO(adapted_llama, [varied_reward], kl_coefficient=0.1, kl_kind="full")
        trainer = make_trainer(world_size, max_epochs=1, callbacks=[recorder], precision=precision)
        trainer.fit(module, datamodule=HandMadeDataModule(samples, [Step(BatchingOptions(micro_batch_size=1))] * 2))
        frozen = [name for name in recorder.gradients[0] if not name.endswith(("up", "down"))]
        return [row["kl/reference"] for row in recorder.metrics], len(module.unregistered_modules()), frozen

    tolerances = {"32-true": 1e-4, "bf16-mixed": 0.05}
    for runs in run_distributed(lambda rank, size: {name: run(size, name) for name in tolerances}, 2, init_process_group=False):
        for precision, (divergences, copies, frozen) in runs.items():
            assert divergences == pytest.approx([expected] * 2, rel=tolerances[precision])
            assert copies == 0
            assert not frozen
