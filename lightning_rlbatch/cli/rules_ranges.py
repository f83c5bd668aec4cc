"""Rules about the range of single numbers, of every class of this package that a configuration may name."""

import math
from collections.abc import Callable
from typing import Any

from lightning_rlbatch.cli.findings import Findings, refused
from lightning_rlbatch.cli.run_config import RunConfig
from lightning_rlbatch.cli.signatures import part_source

_Range = tuple[str, Callable[[float], bool]]
_AT_LEAST_ONE: _Range = ("at least 1", lambda value: value >= 1)
_NOT_NEGATIVE: _Range = ("at least 0", lambda value: 0 <= value < math.inf)
_POSITIVE: _Range = ("positive", lambda value: 0 < value < math.inf)
_FINITE: _Range = ("a finite number", math.isfinite)
_RANGES: dict[str, _Range] = {
    **dict.fromkeys(
        ("train_batch_size", "mini_batch_size", "rollouts_per_prompt", "ppo_epochs", "max_tokens_per_rank", "micro_batch_size",
         "log_prob_max_tokens_per_rank", "log_prob_micro_batch_size", "critic_max_tokens_per_rank", "critic_micro_batch_size",
         "max_prompt_length", "max_response_length", "val_batch_size", "val_rollouts_per_prompt", "sequence_parallel_size",
         "data_parallel_replicate_size", "rollout_tensor_parallel_size", "max_turns", "max_sampling_rounds", "max_batch_size",
         "every_n_steps", "every_n_iterations", "max_text_length", "num_bins", "waiting_every_n_steps", "lengths"),
        _AT_LEAST_ONE,
    ),
    **dict.fromkeys(("window_size", "max_sample_length"), ("at least 2", lambda value: value >= 2)),
    **dict.fromkeys(
        ("kl_coefficient", "value_coefficient", "overlong_factor", "validation_temperature", "head_memory_mib", "top_k", "max_rows",
         "num_workers", "workload_coefficient", "every_n_epochs", "every_n_train_steps"),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("loss_norm_constant", "value_clip", "critic_lr", "overlong_buffer", "temperature"), _POSITIVE),
    **dict.fromkeys(("entropy_coefficient", "reward_model_weight", "reward_weights"), _FINITE),
    "top_p": ("in (0, 1] (1 is off)", lambda value: 0 < value <= 1),
    "max_grad_norm": ("positive", lambda value: value > 0),
}  # fmt: skip
_ADVICE = {"temperature": ": rollouts to learn from must be sampled", "max_grad_norm": ". Pass null to switch clipping off"}


def check_ranges(run: RunConfig) -> Findings:
    """Find numbers out of range.

    Args:
        run: The configuration.
    """
    for section in (run.data, run.model, run.strategy, run.engine):
        if section.options is not None:
            known = {name: value for name, value in section.given.items() if section.has(name)}
            yield from _check(known, "")
    for path, given in run.callbacks:
        source = part_source(path)
        if source is not None and source.path.startswith("lightning_rlbatch."):
            yield from _check(given, f" of {path.rpartition('.')[2]}")


def _check(given: dict[str, Any], owner: str) -> Findings:
    for name, value in given.items():
        if name not in _RANGES:
            continue
        words, fits = _RANGES[name]
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool) and not fits(number):
                yield refused(name, text=f"`{name}`{owner} must be {words} but is {number}{_ADVICE.get(name, '')}.")
