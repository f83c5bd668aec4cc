"""Rules about names and types: misspelt keys, other trainers' names, values of the wrong type."""

import difflib
from typing import Any

from lightning_rlbatch.cli.findings import Findings, note, refused
from lightning_rlbatch.cli.run_config import RunConfig, Section
from lightning_rlbatch.cli.signatures import REQUIRED, Option, class_source

OTHER_NAMES = {
    # verl
    "train_files": "train_prompts",
    "val_files": "val_prompts",
    "ppo_mini_batch_size": "mini_batch_size",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "ppo_micro_batch_size": "micro_batch_size (samples of ONE rank, not of all)",
    "ppo_max_token_len_per_gpu": "max_tokens_per_rank",
    "log_prob_micro_batch_size_per_gpu": "log_prob_micro_batch_size",
    "log_prob_max_token_len_per_gpu": "log_prob_max_tokens_per_rank",
    "use_dynamic_bsz": "max_tokens_per_rank (dynamic) or micro_batch_size (static)",
    "balance_batch": "balance",
    "use_remove_padding": "remove_padding, an option of the model",
    "ulysses_sequence_parallel_size": "sequence_parallel_size, an option of trainer.strategy",
    "tensor_model_parallel_size": "rollout_tensor_parallel_size",
    "gpu_memory_utilization": "rollout_engine: VLLMEngineConfig with gpu_memory_utilization",
    "max_num_seqs": "rollout_engine: TransformersEngineConfig with max_batch_size, or VLLMEngineConfig with max_num_seqs",
    "n": "rollouts_per_prompt",
    "grad_clip": "max_grad_norm",
    "clip_ratio": "policy_loss: PPOClip with clip_low and clip_high",
    "clip_ratio_low": "policy_loss: PPOClip with clip_low",
    "clip_ratio_high": "policy_loss: PPOClip with clip_high",
    "loss_agg_mode": "loss_aggregation",
    "entropy_coeff": "entropy_coefficient",
    "kl_loss_coef": "kl_coefficient",
    "kl_loss_type": "kl_kind",
    "adv_estimator": "advantage",
    "cliprange_value": "value_clip",
    "custom_reward_function": "reward_functions",
    "enable_gradient_checkpointing": "activation_checkpointing, an option of trainer.strategy",
    # TRL
    "per_device_train_batch_size": "micro_batch_size, or rather max_tokens_per_rank",
    "gradient_accumulation_steps": "mini_batch_size: accumulation follows from it",
    "num_generations": "rollouts_per_prompt",
    "num_generations_eval": "val_rollouts_per_prompt",
    "max_completion_length": "max_response_length",
    "num_iterations": "ppo_epochs",
    "use_vllm": "rollout_engine: VLLMEngineConfig",
    "vllm_gpu_memory_utilization": "rollout_engine: VLLMEngineConfig with gpu_memory_utilization",
    "use_transformers_continuous_batching": "rollout_engine: TransformersEngineConfig with method: continuous_batching",
    "generation_batch_size": "train_batch_size (prompts, not rollouts)",
    "beta": "kl_coefficient",
    "epsilon": "policy_loss: PPOClip with clip_low and clip_high",
    "epsilon_high": "policy_loss: PPOClip with clip_high",
    "entropy_coef": "entropy_coefficient",
    "loss_type": "loss_aggregation or policy_loss",
    "reward_funcs": "reward_functions",
    "mask_truncated_completions": "drop_truncated",
    "learning_rate": "optimizer, with lr among its init_args",
    "gradient_checkpointing": "activation_checkpointing, an option of trainer.strategy",
    "num_train_epochs": "trainer.max_epochs, which counts iterations",
    # OpenRLHF
    "rollout_batch_size": "train_batch_size",
    "n_samples_per_prompt": "rollouts_per_prompt",
    "micro_train_batch_size": "micro_batch_size",
    "generate_max_len": "max_response_length",
    "packing_samples": "remove_padding, an option of the model",
    "init_kl_coef": "kl_reward",
}
_TOP_LEVEL = ("seed_everything", "ckpt_path", "config", "verbose", "weights_only", "dataloaders", "train_dataloaders", "val_dataloaders")


def check_names(run: RunConfig) -> Findings:
    """Find options that no class takes, required ones that are missing, and values of the wrong type."""
    for section in (run.model, run.data):
        if not section.class_path:
            yield refused(
                section.key, text=f"`{section.key}:` needs a `class_path`, for example lightning_rlbatch.{_example(section.key)}."
            )
    for key in run.others:
        if key in ("optimizer", "lr_scheduler"):
            yield refused(key, text=f"`{key}:` at top level is unknown: parameters are sharded first. Move it to model.init_args.{key}.")
        elif key not in _TOP_LEVEL:
            yield refused(key, text=f"There is no top-level key `{key}`.{_suggest(key, ['model', 'data', 'trainer', *_TOP_LEVEL])}")
    for section in (run.model, run.data, run.strategy, run.trainer, run.engine):
        if section.options is None:
            if section.class_path and section.key != "trainer.strategy":
                yield note(section.key, text=f"The source of {section.class_path} was not found: its options are not checked here.")
        else:
            yield from _check_section(section, section.options)


def _check_section(section: Section, options: dict[str, Option]) -> Findings:
    for name, value in section.given.items():
        if name not in options:
            yield refused(name, text=f"{section.name} has no option `{name}`.{_suggest(name, list(options))}")
        elif isinstance(value, dict | list) and name != "rollout_engine":  # a section of its own
            for part in value if isinstance(value, list) else [value]:
                yield from _check_part(part)
        elif (expected := _mismatch(options[name], value)) is not None:
            yield refused(name, text=f"`{name}` must be {expected} but is {value!r}.")
    for name, option in options.items():
        if option.default is REQUIRED and name not in section.given:
            yield refused(name, text=f"{section.name} needs `{name}`. Add it under {section.key}.init_args.")


def _check_part(value: Any) -> Findings:
    """Find misspelt options of a class of this package that an option holds, such as a policy loss or a callback."""
    path, given = (value.get("class_path"), value.get("init_args")) if isinstance(value, dict) else (None, None)
    if not isinstance(path, str) or not path.startswith("lightning_rlbatch.") or not isinstance(given, dict):
        return
    source = class_source(path)
    known = None if source is None else source.options
    for name in given:
        if known is not None and name not in known:
            yield refused(name, text=f"{path.rpartition('.')[2]} has no option `{name}`.{_suggest(name, list(known))}")


def _mismatch(option: Option, value: Any) -> str | None:
    """Return what is expected instead, None if the value fits or the annotation is beyond this check."""
    if option.choices is not None:
        return None if value in option.choices else "one of " + ", ".join(map(repr, option.choices))
    types = option.types
    if types is None:
        return None
    # YAML has no way to write an integer as text but quotes, which LightningCLI reads as a number where one is wanted.
    if isinstance(value, str) and str not in types:
        value = _unquoted(value)
    if str in types and isinstance(value, int | float):
        return None  # on the command line LightningCLI takes 2024 as text where text is wanted
    fits = isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    fits = fits or (float in types and isinstance(value, int) and not isinstance(value, bool))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return None if fits else " or ".join(words[kind] for kind in types)


def _unquoted(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _suggest(name: str, known: list[str]) -> str:
    if name in OTHER_NAMES:
        return f" It is called {OTHER_NAMES[name]}."
    close = difflib.get_close_matches(name, known, 1)
    return f" Did you mean `{close[0]}`?" if close else f" It has: {', '.join(known)}."


def _example(key: str) -> str:
    return "PPOModule" if key == "model" else "RolloutDataModule"
