"""Small models, prompts and references that the rollout tests share."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_rlbatch.rollout.engine import RolloutRequest, rollout_seed

VOCAB_SIZE = 50
STOP = 7


def toy_llama(seed: int = 0, tied: bool = False, max_length: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # peaked distributions: a wrong mask or position shows
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=STOP,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def mixed_requests(num_prompts: int = 6, rollouts_per_prompt: int = 3) -> list[RolloutRequest]:
    """Requests with prompts of 1, 2, ... tokens, groups next to each other."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(8, VOCAB_SIZE, (1 + index,), generator=generator).tolist() for index in range(num_prompts)]
    return [RolloutRequest(p, rollout_seed(0, 0, index, r)) for index, p in enumerate(prompts) for r in range(rollouts_per_prompt)]


@torch.no_grad()
def reference_log_probs(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a completion from one unpadded forward without a cache: the slow, obvious way."""
    logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


@contextmanager
def quick_collections() -> Iterator[None]:
    """Keep the garbage collector from looking at all that the tests have imported: continuous batching calls it at every end."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
