"""The tiny language model of the Tower of Hanoi example."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build_policy(
    *,
    vocab_size: int = 20,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 2,
    max_length: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Build a Llama with random weights, of about 0.16 M parameters with the defaults.

    Args:
        vocab_size: Tokens of the vocabulary (:class:`examples.hanoi.task.HanoiTokenizer` has this many).
        hidden_size: Width of the residual stream.
        num_layers: Number of decoder blocks.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        max_length: Most tokens of a prompt with its answer.
        dropout: Dropout rate of the attention weights while training.
        seed: Of the initial weights; the global random state is left as it was.

    Returns:
        The model in fp32 on the CPU.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=160,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_length,
        attention_dropout=dropout,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
