"""Models on packed samples: attention registered with transformers, the tiled scoring head, the scorer that holds both."""

from lightning_rlbatch.models.attention import PackedAttention, attach_packed_attention
from lightning_rlbatch.models.attention_backends import select_attention
from lightning_rlbatch.models.output_heads import ValueHead
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs
from lightning_rlbatch.models.probe import check_heads, check_model
from lightning_rlbatch.models.scorer import TokenScorer, TokenScores
from lightning_rlbatch.models.scoring import token_log_probs
from lightning_rlbatch.models.workload import model_workload_coefficient

__all__ = [
    "PackedAttention",
    "TokenScorer",
    "TokenScores",
    "ValueHead",
    "attach_packed_attention",
    "check_heads",
    "check_model",
    "model_workload_coefficient",
    "packed_model_kwargs",
    "select_attention",
    "token_log_probs",
]
