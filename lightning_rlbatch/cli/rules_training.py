"""Rules about models, losses, validation and the strategy: options that need another option, or have nothing to act on."""

import json
from pathlib import Path
from typing import Any

from lightning_rlbatch.cli.findings import Findings, note, refused, without_effect
from lightning_rlbatch.cli.run_config import RunConfig, load_pure
from lightning_rlbatch.cli.signatures import part_source

_NEEDS_GROUPS = ("GRPO", "DrGRPO", "RLOO", "GPG", "PassAtK", "OPO", "ReinforcePlusPlusBaseline", "GDPO")


def check_training(run: RunConfig) -> Findings:
    """Find options that contradict each other or have nothing to act on."""
    yield from _check_pair(run)
    yield from _check_scheduler(run)
    yield from _check_heads(run)
    if "PPOModule" in run.model.ancestors:
        problems = load_pure("modules.ppo_problems")
        given = {name: value for name in problems.OPTIONS if (value := run.model.get(name)) is not None}
        for option, text in problems.ppo_problems(given, problems.Estimator(*_estimator(run))):
            yield refused(option, text=text)
        yield from _check_critic(run)
        yield from _check_losses(run)
        yield from _check_sampling(run)
    if run.kind == "replay":
        yield from _check_replay(run)
    yield from _check_validation(run)
    if run.sharded:
        yield from _check_strategy_options(run)


def _check_pair(run: RunConfig) -> Findings:
    """Find a module and a data module that do not go together."""
    rolls = "PPOModule" in run.model.ancestors
    if rolls and run.kind == "samples":
        yield refused(
            "data", text=f"{run.model.name} trains on rollouts, but {run.data.name} has samples. Use RolloutDataModule, or SFTModule."
        )
    elif "SFTModule" in run.model.ancestors and run.kind in ("rollouts", "replay"):
        yield refused("data", text=f"{run.data.name} needs a module that rolls out, such as PPOModule, but got {run.model.name}.")


def _check_scheduler(run: RunConfig) -> Findings:
    value = run.model.given.get("lr_scheduler")
    path = value.get("class_path") if isinstance(value, dict) else value
    given = value.get("init_args") if isinstance(value, dict) else None
    if isinstance(path, str) and path.endswith("ReduceLROnPlateau") and not (isinstance(given, dict) and "monitor" in given):
        yield refused(
            "lr_scheduler",
            text="ReduceLROnPlateau needs the name of a metric to watch. Use class_path: lightning.pytorch.cli.ReduceLROnPlateau with"
            " init_args: {monitor: val/reward/mean}.",
        )


def _check_heads(run: RunConfig) -> Findings:
    config = model_config(run.model.get("policy"))
    if config is None or run.sp_size == 1:
        return
    heads = config.get("num_attention_heads")
    if isinstance(heads, int):
        try:
            load_pure("distributed.heads").HeadPlan.build(heads, config.get("num_key_value_heads") or heads, run.sp_size)
        except ValueError as error:
            yield refused("sequence_parallel_size", text=str(error))
        else:
            if heads % run.sp_size:
                share = -(-heads // run.sp_size)
                yield note(
                    "sequence_parallel_size",
                    text=f"{heads} attention heads on {run.sp_size} ranks: the busiest has {share}, so"
                    f" attention runs at {100 * heads / (share * run.sp_size):.0f}% of what an even split would give.",
                )


def model_config(source: Any) -> dict[str, Any] | None:
    """Return ``config.json`` of a model folder (of its text part, for a model of several), None if it is no local folder.

    Args:
        source: The model as configured.
    """
    path = Path(source) / "config.json" if isinstance(source, str) else None
    if path is None or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def class_name(value: Any) -> str:
    """Return the name of a configured class without its module; empty if it is none."""
    return str(value["class_path"]).rpartition(".")[2] if isinstance(value, dict) and "class_path" in value else ""


def _estimator(run: RunConfig) -> tuple[str, bool, bool, bool]:
    """Return the name of the advantage estimator, and whether it needs values, single rewards, or weighs these itself."""
    value = run.model.get("advantage")
    path = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(path, str):
        return "GRPO", False, False, False
    source, settings = part_source(path), value.get("init_args") if isinstance(value, dict) else None
    name = path.rpartition(".")[2]
    names = {name} if source is None else source.ancestors
    return name, "GAE" in names, "GDPO" in names, "GDPO" in names and (settings or {}).get("weights") is None


def _check_critic(run: RunConfig) -> Findings:
    model, estimator = run.model, _estimator(run)[0]
    if model.get("critic") is None and model.changed("value_coefficient"):
        yield without_effect("value_coefficient", "there is no critic. Set `critic`, or drop it.")
    if model.get("critic") is not None and estimator in _NEEDS_GROUPS:
        yield note("critic", text=f"{estimator} does not use values: the critic is trained and paid for, but does not change the policy.")
    if estimator in _NEEDS_GROUPS and run.data.has("rollouts_per_prompt") and run.data.get("rollouts_per_prompt") == 1:
        yield note(
            "rollouts_per_prompt",
            text=f"{estimator} compares the rollouts of a prompt, and there is one each: every advantage is 0 or undefined. Set"
            " rollouts_per_prompt to 2 or more.",
        )


def _check_losses(run: RunConfig) -> Findings:
    model, data = run.model, run.data
    if not model.get("kl_coefficient") and model.changed("kl_kind"):
        yield without_effect("kl_kind", "kl_coefficient is 0, so there is no KL penalty in the loss. Raise it, or drop kl_kind.")
    if model.get("kl_reward") is None and model.changed("kl_reward_kind"):
        yield without_effect("kl_reward_kind", "kl_reward is not set, so there is no KL penalty in the reward.")
    if model.get("overlong_buffer") is None and model.changed("overlong_factor"):
        yield without_effect("overlong_factor", "overlong_buffer is not set, so there is no overlong penalty.")
    buffer, longest = model.number("overlong_buffer"), data.number("max_response_length")
    if buffer is not None and longest is not None and buffer > longest and run.kind == "rollouts":
        yield refused(
            "overlong_buffer",
            text=f"overlong_buffer={buffer} tokens before the end of a response are more than it may have, max_response_length={longest}."
            " Lower the buffer.",
        )
    one_step = data.number("ppo_epochs") == 1 and data.get("train_batch_size") == data.get("mini_batch_size") is not None
    loss = model.given.get("policy_loss")
    clips = sorted(name for name in (loss.get("init_args") or {} if isinstance(loss, dict) else {}) if name.startswith("clip_"))
    if run.kind == "rollouts" and one_step and clips:
        yield without_effect(
            clips[0],
            f"one mini-batch and one PPO epoch per iteration: every step is on-policy, the ratio is 1 and {', '.join(clips)} never clips."
            " Lower mini_batch_size or raise ppo_epochs to reuse rollouts.",
        )


def _check_sampling(run: RunConfig) -> Findings:
    model = run.model
    rounds = model.number("max_sampling_rounds") or 1
    if rounds > 1 and run.data.get("rollouts_per_prompt") == 1:
        yield refused(
            "max_sampling_rounds",
            "rollouts_per_prompt",
            text=f"max_sampling_rounds={rounds} looks for prompts whose rollouts are all rewarded alike, but rollouts_per_prompt is 1."
            " Raise it, or set max_sampling_rounds to 1.",
        )


def _check_replay(run: RunConfig) -> Findings:
    data = run.data
    has_tokenizer = data.get("tokenizer") is not None
    if has_tokenizer and data.get("rescore") is False:
        yield refused("rescore", text="A text dump has no log-probs, so rescore: false is impossible with a tokenizer. Drop one of them.")
    if not has_tokenizer and (data.get("reward_columns") is not None or data.get("append_eos") is False):
        yield refused("reward_columns", "append_eos", text="reward_columns and append_eos are for text dumps. Set tokenizer, or drop them.")
    scores = has_tokenizer if data.get("rescore") is None else data.get("rescore")
    for name in ("log_prob_max_tokens_per_rank", "log_prob_micro_batch_size"):
        if data.get(name) is not None and not scores:
            yield without_effect(name, "the recorded log-probs are used (rescore), so there is no forward-only pass.")


def _check_validation(run: RunConfig) -> Findings:
    data, model = run.data, run.model
    if run.kind == "rollouts" and data.get("val_prompts") is None:
        for section, name in (
            (data, "val_batch_size"),
            (data, "val_rollouts_per_prompt"),
            (model, "validation_temperature"),
            (model, "answer_function"),
        ):
            if section.changed(name):
                yield without_effect(name, "there are no val_prompts. Set them, or drop it.")
    elif data.get("val_rollouts_per_prompt", 1) != 1 and model.get("validation_temperature") == 0:
        yield without_effect("val_rollouts_per_prompt", "validation_temperature is 0: all responses of a prompt are the same greedy one.")
    elif run.kind == "rollouts" and model.changed("answer_function") and data.get("val_rollouts_per_prompt", 1) == 1:
        yield without_effect("answer_function", "val_rollouts_per_prompt is 1: there is no majority to find. Raise it, or drop it.")


def _check_strategy_options(run: RunConfig) -> Findings:
    """Find options of the strategy that have nothing to act on."""
    strategy = run.strategy
    frozen = run.model.get("kl_coefficient") or run.model.get("kl_reward") is not None or run.model.get("reward_model") is not None
    if strategy.get("reference_cpu_offload") is True and not frozen:
        yield without_effect("reference_cpu_offload", "there is no frozen model: no kl_coefficient, kl_reward or reward_model is set.")
    for name in ("cpu_offload", "reference_cpu_offload"):
        if strategy.get(name) is True and run.trainer.get("accelerator") == "cpu":
            yield without_effect(name, "on the CPU everything lies in host memory.")
    if run.world_size == 1:
        for name in ("grad_sync", "check_collectives", "start_method"):
            if strategy.changed(name):
                yield without_effect(name, "there is one rank, which communicates with nobody.")
