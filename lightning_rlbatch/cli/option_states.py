"""What becomes of each option of cutting and spreading."""

from dataclasses import dataclass
from typing import Any

from lightning_rlbatch.cli.findings import Finding
from lightning_rlbatch.cli.run_config import RunConfig

# (option, section, phase, meaning)
OPTIONS = (
    ("train_batch_size", "data", "rollout", "prompts per iteration, over all ranks"),
    ("rollouts_per_prompt", "data", "rollout", "responses per prompt"),
    ("max_prompt_length", "data", "rollout", "longer prompts are left out"),
    ("max_response_length", "data", "rollout", "most tokens of a response"),
    ("rollout_tensor_parallel_size", "model", "rollout", "GPUs that share a rollout engine"),
    ("max_batch_size", "model.rollout_engine", "rollout", "sequences that decode together; nothing to do with cutting"),
    ("max_num_seqs", "model.rollout_engine", "rollout", "sequences that decode together; nothing to do with cutting"),
    ("max_model_len", "model.rollout_engine", "rollout", "most tokens of a prompt with its response in the engine"),
    ("max_num_batched_tokens", "model.rollout_engine", "rollout", "most tokens of one step of the engine"),
    ("mini_batch_size", "data", "update", "one optimizer step, over all ranks"),
    ("ppo_epochs", "data", "update", "passes over an iteration's rollouts"),
    ("max_tokens_per_rank", "data", "update", "most tokens one GPU holds in a micro-batch (dynamic)"),
    ("micro_batch_size", "data", "update", "samples of a micro-batch (static)"),
    ("log_prob_max_tokens_per_rank", "data", "log-probs", "budget of forward-only passes"),
    ("log_prob_micro_batch_size", "data", "log-probs", "samples per micro-batch of forward-only passes"),
    ("critic_max_tokens_per_rank", "data", "critic", "budget of the critic's passes"),
    ("critic_micro_batch_size", "data", "critic", "samples per micro-batch of the critic's passes"),
    ("balance", "data", "all", "which rank gets which samples"),
    ("equal_size", "data", "all", "every rank gets as many samples, plus or minus one"),
    ("planner", "data", "all", "global plan, or the two-layer baseline"),
    ("oversize", "data", "all", "what to do with a sample above the budget"),
    ("workload_coefficient", "data", "all", "linear cost of a token relative to the quadratic one"),
    ("remove_padding", "model", "every forward", "compute real tokens only"),
    ("sequence_parallel_size", "trainer.strategy", "every forward", "GPUs that share each sample"),
    ("data_parallel_replicate_size", "trainer.strategy", "every forward", "copies of the sharded parameters"),
)


@dataclass(frozen=True)
class OptionState:
    """What became of one option.

    Attributes:
        option: Its name.
        phase: Where it acts.
        value: In force (given or default); None if it is off.
        given: Whether the configuration sets it.
        state: ``in effect``, ``off``, ``without effect`` or ``refused``.
        why: A reason, or what the option means.
    """

    option: str
    phase: str
    value: Any
    given: bool
    state: str
    why: str


def option_states(run: RunConfig, findings: tuple[Finding, ...]) -> tuple[OptionState, ...]:
    """Judge every option that the configured classes take.

    Args:
        run: The configuration.
        findings: About it.
    """
    sections = {"data": run.data, "model": run.model, "model.rollout_engine": run.engine, "trainer.strategy": run.strategy}
    states = []
    for option, key, phase, meaning in OPTIONS:
        section = sections[key]
        if not section.has(option) and option not in section.given:
            continue
        value, given = section.get(option), option in section.given
        about = [finding for finding in findings if option in finding.options and finding.level != "note"]
        if about and given:
            states.append(OptionState(option, phase, value, given, about[0].level, about[0].text))
        elif value is None:
            states.append(OptionState(option, phase, None, given, "off", _stand_in(run, option) or meaning))
        else:
            states.append(OptionState(option, phase, value, given, "in effect", meaning))
    return tuple(states)


def _stand_in(run: RunConfig, option: str) -> str | None:
    """Say which other option decides where this one is not set."""
    other = {
        "log_prob_max_tokens_per_rank": "max_tokens_per_rank",
        "log_prob_micro_batch_size": "micro_batch_size",
        "critic_max_tokens_per_rank": "max_tokens_per_rank",
        "critic_micro_batch_size": "micro_batch_size",
        "max_tokens_per_rank": "micro_batch_size",
        "micro_batch_size": "max_tokens_per_rank",
    }.get(option)
    value = None if other is None else run.data.get(other)
    return None if value is None else f"{other}={value} decides"
