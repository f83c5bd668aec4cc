"""The numbers that follow from a configuration: the whole iteration, the share of a rank, and what one GPU runs at once."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_rlbatch.cli.memory import tokens_per_gpu
from lightning_rlbatch.cli.run_config import RunConfig, load_pure

if TYPE_CHECKING:
    from lightning_rlbatch.functional.sizes import Share


@dataclass(frozen=True)
class GlobalBatch:
    """One iteration over all ranks; for supervised data one optimizer step.

    Attributes:
        unit: What a mini-batch is counted in: ``prompts`` or ``samples``.
        units_per_mini_batch: Of them in one optimizer step; the last step of an iteration may have fewer.
        prompts: Of an iteration; None without rollouts, as the following.
        rollouts_per_prompt: Responses.
        rollouts: Of an iteration.
        rollouts_per_mini_batch: Of one optimizer step.
        num_mini_batches: Of one PPO epoch.
        ppo_epochs: Passes over the rollouts.
        num_optimizer_steps: Of an iteration.
    """

    unit: str
    units_per_mini_batch: "Share"
    prompts: int | None = None
    rollouts_per_prompt: int | None = None
    rollouts: int | None = None
    rollouts_per_mini_batch: "Share | None" = None
    num_mini_batches: int | None = None
    ppo_epochs: int | None = None
    num_optimizer_steps: int | None = None


@dataclass(frozen=True)
class RankShare:
    """What one data-parallel rank has.

    Attributes:
        world_size: Ranks.
        sequence_parallel_size: Ranks that share each sample.
        data_parallel_size: Groups of such ranks.
        parameter_shards: Ranks over which parameters are sharded; 1 if they are not.
        generated_per_gpu: Rollouts of an iteration that a GPU generates; None without rollouts, as the next two.
        gpus_per_engine: GPUs that share a rollout engine.
        generated_per_engine: Rollouts that these generate together.
        rollouts: Of an iteration that a rank scores and trains on.
        samples_per_step: Of one optimizer step, by count: balancing by length moves it a little. None for recorded rollouts.
    """

    world_size: int
    sequence_parallel_size: int
    data_parallel_size: int
    parameter_shards: int
    generated_per_gpu: "Share | None" = None
    gpus_per_engine: int | None = None
    generated_per_engine: "Share | None" = None
    rollouts: "Share | None" = None
    samples_per_step: "Share | None" = None


@dataclass(frozen=True)
class MicroBatch:
    """What one rank, or one sequence-parallel group, runs forward and backward on at once.

    Attributes:
        max_tokens: Most tokens; None where only the data bounds them.
        max_tokens_per_gpu: Most of them on one GPU.
        num_samples: Samples of a static micro-batch; None under a token budget.
        longest_sample: Most tokens of a sample; None if only the data knows.
        longest_that_fit: Samples of that length in one micro-batch under a budget.
        num_micro_steps: Micro-batches of an optimizer step on a rank (gradient accumulation), from the fewest to the most by the
            lengths; None where they depend on lengths that are not bounded.
        padded: Whether padding counts as tokens.
        log_prob_max_tokens: Of the forward-only passes, where they have a budget of their own.
        log_prob_num_samples: The same as a number of samples.
        critic_max_tokens: Of the critic's passes, where they have a budget of their own.
        critic_num_samples: The same as a number of samples.
    """

    max_tokens: int | None
    max_tokens_per_gpu: int | None
    num_samples: int | None
    longest_sample: int | None
    longest_that_fit: int | None
    num_micro_steps: "Share | None"
    padded: bool
    log_prob_max_tokens: int | None
    log_prob_num_samples: int | None
    critic_max_tokens: int | None
    critic_num_samples: int | None


@dataclass(frozen=True)
class RunSizes:
    """All three.

    Attributes:
        global_batch: Over all ranks.
        rank: Of one data-parallel rank.
        micro_batch: At once.
    """

    global_batch: GlobalBatch
    rank: RankShare
    micro_batch: MicroBatch


def run_sizes(run: RunConfig) -> RunSizes | None:
    """Derive the numbers; None if they cannot be before something that is refused is corrected.

    Args:
        run: The configuration, with its number of ranks.
    """
    return _rollout_sizes(run) if run.kind == "rollouts" else _sample_sizes(run)


def _rollout_sizes(run: RunConfig) -> RunSizes | None:
    data = run.data
    names = ("train_batch_size", "rollouts_per_prompt", "mini_batch_size", "ppo_epochs", "micro_batch_size", "max_tokens_per_rank")
    given = {name: number for name in names if (number := data.number(name)) is not None}
    tensor_parallel = run.model.number("rollout_tensor_parallel_size") or 1
    if not {"train_batch_size", "rollouts_per_prompt", "mini_batch_size", "ppo_epochs"} <= given.keys():
        return None
    try:
        sizes = load_pure("functional.sizes").iteration_sizes(
            world_size=run.world_size,
            sequence_parallel_size=run.sp_size,
            rollout_tensor_parallel_size=tensor_parallel,
            **given,
        )
    except (TypeError, ValueError):  # the findings say why
        return None
    whole = GlobalBatch(
        unit="prompts",
        units_per_mini_batch=sizes.prompts_per_mini_batch,
        prompts=given["train_batch_size"],
        rollouts_per_prompt=given["rollouts_per_prompt"],
        rollouts=sizes.num_rollouts,
        rollouts_per_mini_batch=sizes.rollouts_per_mini_batch,
        num_mini_batches=sizes.num_mini_batches,
        ppo_epochs=given["ppo_epochs"],
        num_optimizer_steps=sizes.num_optimizer_steps,
    )
    rank = dataclasses.replace(
        _rank(run),
        generated_per_gpu=sizes.rollouts_per_worker,
        gpus_per_engine=tensor_parallel,
        generated_per_engine=sizes.rollouts_per_tp_group,
        rollouts=sizes.rollouts_per_dp_rank,
        samples_per_step=sizes.rollouts_per_mini_batch_and_dp_rank,
    )
    return RunSizes(whole, rank, micro_batch(run, rank.samples_per_step))


def _sample_sizes(run: RunConfig) -> RunSizes | None:
    mini = run.data.number("mini_batch_size")
    budgets = [run.data.number(name) for name in ("max_tokens_per_rank", "micro_batch_size")]
    assert run.world_size is not None
    if mini is None or run.world_size % run.sp_size or sum(budget is not None for budget in budgets) != 1:
        return None
    share, replay, rank = load_pure("functional.sizes").Share, run.kind == "replay", _rank(run)
    if not replay:
        rank = dataclasses.replace(rank, samples_per_step=share(mini // rank.data_parallel_size, -(-mini // rank.data_parallel_size)))
    whole = GlobalBatch("prompts" if replay else "samples", share(mini, mini))
    return RunSizes(whole, rank, micro_batch(run, rank.samples_per_step))


def _rank(run: RunConfig) -> RankShare:
    assert run.world_size is not None
    shards = run.world_size // run.replicate_size if run.sharded else 1
    return RankShare(run.world_size, run.sp_size, run.world_size // run.sp_size, shards)


def micro_batch(run: RunConfig, samples_per_step: "Share | None") -> MicroBatch:
    """Derive what runs at once.

    Args:
        run: The configuration.
        samples_per_step: Of one optimizer step on a rank; None if it is not known.
    """
    data, sp = run.data, run.sp_size
    budget, samples, longest = data.number("max_tokens_per_rank"), data.number("micro_batch_size"), run.longest_sample
    fitting = None if budget is None or longest is None else max(1, budget * sp // longest)
    share, steps = load_pure("functional.sizes").Share, None
    if samples_per_step is not None and samples is not None:
        steps = share(*(max(1, -(-size // samples)) for size in samples_per_step))
    elif samples_per_step is not None and fitting is not None:
        steps = share(1, max(1, -(-samples_per_step.largest // fitting)))
    own: dict[str, Any] = {}
    for role in ("log_prob", "critic"):
        tokens = data.number(f"{role}_max_tokens_per_rank")
        own[f"{role}_max_tokens"] = None if tokens is None else tokens * sp
        own[f"{role}_num_samples"] = data.number(f"{role}_micro_batch_size")
    bound = budget * sp if budget is not None else samples * longest if samples is not None and longest is not None else None
    return MicroBatch(
        max_tokens=bound,
        max_tokens_per_gpu=budget if budget is not None else tokens_per_gpu(run),
        num_samples=samples,
        longest_sample=longest,
        longest_that_fit=fitting,
        num_micro_steps=steps,
        padded=run.model.get("remove_padding") is False,
        **own,
    )


def sizes_json(sizes: RunSizes) -> dict[str, Any]:
    """Return the numbers as JSON-ready data; what differs by rank or step is ``{"smallest": ..., "largest": ...}``.

    Args:
        sizes: The numbers.
    """
    layers = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    return {
        layer: {field.name: _plain(getattr(numbers, field.name)) for field in dataclasses.fields(numbers)}
        for layer, numbers in layers.items()
    }


def _plain(value: Any) -> Any:
    return {"smallest": value.smallest, "largest": value.largest} if hasattr(value, "smallest") else value
