"""Everything that ``rlbatch explain`` says, as data."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_rlbatch.cli.findings import Finding
from lightning_rlbatch.cli.memory import MemoryEstimate, ModelFacts, estimate_memory, model_facts, tokens_per_gpu
from lightning_rlbatch.cli.option_states import OptionState, option_states
from lightning_rlbatch.cli.rules_batching import check_batching
from lightning_rlbatch.cli.rules_engine import check_engine
from lightning_rlbatch.cli.rules_names import check_names
from lightning_rlbatch.cli.rules_sources import check_sources
from lightning_rlbatch.cli.rules_training import check_training
from lightning_rlbatch.cli.run_config import RunConfig, load_pure


@dataclass(frozen=True)
class Explanation:
    """The whole answer.

    Attributes:
        run: The configuration.
        world_size: Ranks that the numbers are for.
        sizes: Layer -> name -> number; empty if they cannot be derived.
        summary: What one GPU runs at once, in a sentence.
        options: Fate of every option of cutting and spreading.
        findings: Everything worth saying; refused ones first.
        memory: Of one rank; None if nothing is known of the policy.
    """

    run: RunConfig
    world_size: int
    sizes: dict[str, dict[str, str]]
    summary: str
    options: tuple[OptionState, ...]
    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None

    @property
    def refused(self) -> bool:
        """Whether a run with this configuration would not start."""
        return any(finding.level == "refused" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON-ready data."""
        memory = None if self.memory is None else {**dataclasses.asdict(self.memory), "total": self.memory.total}
        return {
            "ok": not self.refused,
            "world_size": self.world_size,
            "data_parallel_size": self.world_size // self.run.sp_size,
            "sequence_parallel_size": self.run.sp_size,
            "summary": self.summary,
            "sizes": self.sizes,
            "options": [dataclasses.asdict(option) for option in self.options],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "memory": memory,
        }


def check(run: RunConfig, *, offline: bool = False) -> tuple[Finding, ...]:
    """Return all findings about a configuration, refused ones first.

    Args:
        run: The configuration.
        offline: True refuses pretrained models that would have to be downloaded.
    """
    sources = check_sources(run, offline=offline)
    found = [*check_names(run), *check_batching(run), *check_training(run), *check_engine(run), *sources]
    order = {"refused": 0, "without effect": 1, "note": 2}
    return tuple(sorted(found, key=lambda finding: order[finding.level]))


def explain(run: RunConfig, facts: ModelFacts | None = None, *, offline: bool = False) -> Explanation:
    """Derive every number and judge every option.

    Args:
        run: The configuration; where only the machine knows the number of ranks, the numbers are for one sequence-parallel group.
        facts: Of the policy; None takes what its files say.
        offline: True refuses pretrained models that would have to be downloaded.
    """
    findings = check(run, offline=offline)
    if run.world_size is None:
        run = dataclasses.replace(run, world_size=run.sp_size)
    assert run.world_size is not None
    sizes = _rollout_sizes(run) if run.kind == "rollouts" else _sample_sizes(run)
    memory = estimate_memory(run, model_facts(run) if facts is None else facts)
    return Explanation(run, run.world_size, sizes, _summary(run), option_states(run, findings), findings, memory)


def _rollout_sizes(run: RunConfig) -> dict[str, dict[str, str]]:
    data = run.data
    names = ("train_batch_size", "rollouts_per_prompt", "mini_batch_size", "ppo_epochs", "micro_batch_size", "max_tokens_per_rank")
    given = {name: data.number(name) for name in names}
    tensor_parallel = run.model.number("rollout_tensor_parallel_size") or 1
    try:
        sizes = load_pure("functional.sizes").iteration_sizes(
            world_size=run.world_size,
            sequence_parallel_size=run.sp_size,
            rollout_tensor_parallel_size=tensor_parallel,
            **{name: value for name, value in given.items() if value},
        )
    except (TypeError, ValueError):  # the findings say why
        return {}
    per_step = sizes.rollouts_per_mini_batch_and_dp_rank
    return {
        "global batch": {
            "prompts per iteration": f"{given['train_batch_size']}",
            "rollouts per iteration": f"{sizes.num_rollouts} = {given['train_batch_size']} prompts x"
            f" {given['rollouts_per_prompt']} responses",
            "mini-batches per pass": f"{sizes.num_mini_batches} of {sizes.prompts_per_mini_batch} prompts",
            "rollouts per mini-batch (optimizer step)": str(sizes.rollouts_per_mini_batch),
            "optimizer steps per iteration": f"{sizes.num_optimizer_steps} = {sizes.num_mini_batches} mini-batches x "
            f"{given['ppo_epochs']} PPO epoch{'s' * ((given['ppo_epochs'] or 1) > 1)}",
        },
        "data-parallel rank": _rank_sizes(run)
        | {
            "rollouts generated by each GPU": str(sizes.rollouts_per_worker),
            **(
                {f"rollouts of {tensor_parallel} GPUs that share an engine": str(sizes.rollouts_per_tp_group)}
                if tensor_parallel > 1
                else {}
            ),
            "rollouts scored and trained per iteration": str(sizes.rollouts_per_dp_rank),
            "rollouts of one optimizer step": f"{per_step} by count (balancing by length moves it a little)",
        },
        "micro-batch": _micro_sizes(run, per_step.largest, sizes.num_micro_steps),
    }


def _sample_sizes(run: RunConfig) -> dict[str, dict[str, str]]:
    mini = run.data.number("mini_batch_size")
    budgets = [run.data.number(name) for name in ("max_tokens_per_rank", "micro_batch_size")]
    assert run.world_size is not None
    if mini is None or run.world_size % run.sp_size or sum(budget is not None for budget in budgets) != 1:
        return {}
    dp = run.world_size // run.sp_size
    replay = run.kind == "replay"
    unit = "prompts" if replay else "samples"
    least, most = mini // dp, -(-mini // dp)
    rank = {"samples of one optimizer step": f"{least}" if least == most else f"{least} to {most}"}
    micro = run.data.number("micro_batch_size")
    steps = None if micro is None or replay else -(-most // micro)
    return {
        "global batch": {f"{unit} per mini-batch (optimizer step)": str(mini)},
        "data-parallel rank": _rank_sizes(run) | ({} if replay else rank),
        "micro-batch": _micro_sizes(run, None if replay else most, steps),
    }


def _rank_sizes(run: RunConfig) -> dict[str, str]:
    assert run.world_size is not None
    dp = run.world_size // run.sp_size
    shards = run.world_size // run.replicate_size if run.sharded else 1
    return {
        "data-parallel ranks": f"{dp} = {run.world_size} ranks / {run.sp_size} per sequence-parallel group",
        "parameters sharded over": f"{shards} ranks" if shards > 1 else "not sharded",
    }


def _micro_sizes(run: RunConfig, samples_per_rank: int | None, num_micro_steps: Any) -> dict[str, str]:
    budget, micro, longest, sp = (
        run.data.number("max_tokens_per_rank"),
        run.data.number("micro_batch_size"),
        run.longest_sample,
        run.sp_size,
    )
    sizes: dict[str, str] = {}
    if budget is not None:
        sizes["tokens of a micro-batch, at most"] = f"{budget * sp}" + (f" = {budget} x {sp} GPUs" if sp > 1 else "")
        sizes["tokens on one GPU, at most"] = str(budget)
        if longest is not None:
            fitting = max(1, budget * sp // longest)
            sizes["samples of a micro-batch"] = f"as many as fit: {fitting} of the longest ({longest} tokens), more of shorter ones"
        if longest is not None and samples_per_rank is not None:
            worst = -(-samples_per_rank // max(1, budget * sp // longest))
            sizes["gradient accumulation (micro-steps)"] = "1" if worst == 1 else f"1 to {worst}, by the lengths; the same on all ranks"
        else:
            sizes["gradient accumulation (micro-steps)"] = "by the lengths; the same on all ranks"
    elif micro is not None:
        sizes["samples of a micro-batch"] = str(micro)
        if longest is not None:
            sizes["tokens of a micro-batch, at most"] = f"{micro * longest} = {micro} x {longest}"
            sizes["tokens on one GPU, at most"] = str(-(-micro * longest // sp))
        sizes["gradient accumulation (micro-steps)"] = "by the rollouts" if num_micro_steps is None else str(num_micro_steps)
    for role, name in (("log-prob", "log_prob"), ("critic", "critic")):
        tokens, samples = run.data.number(f"{name}_max_tokens_per_rank"), run.data.number(f"{name}_micro_batch_size")
        if tokens is not None:
            sizes[f"tokens of a {role} micro-batch, at most"] = str(tokens * sp)
        if samples is not None:
            sizes[f"samples of a {role} micro-batch"] = str(samples)
    return sizes


def _summary(run: RunConfig) -> str:
    tokens, longest, sp = tokens_per_gpu(run), run.longest_sample, run.sp_size
    budget, micro = run.data.number("max_tokens_per_rank"), run.data.number("micro_batch_size")
    shared = f" (1/{sp} of a micro-batch of its sequence-parallel group)" if sp > 1 else ""
    padded = ", padding to the longest sample included" if run.model.get("remove_padding") is False else ""
    if budget is not None and longest is not None:
        fitting = max(1, budget * sp // longest)
        kind = f"sample of the longest {longest}" if fitting == 1 else f"samples of the longest {longest}"
        return (
            f"One GPU runs at most {tokens} tokens at once{shared}{padded}: {fitting} {kind} tokens per micro-batch, or more shorter ones."
        )
    if budget is not None:
        return f"One GPU runs at most {tokens} tokens at once{shared}{padded}, as whole samples."
    if micro is not None:
        bound = (
            "with no bound on their tokens" if tokens is None else f"of at most {longest} tokens each: {tokens} tokens on one GPU{shared}"
        )
        return f"One GPU runs {micro} sample{'s' * (micro > 1)} at once{padded}, {bound}."
    return "How much one GPU runs at once is not configured."
