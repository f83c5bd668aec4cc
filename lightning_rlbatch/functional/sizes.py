"""How many prompts, rollouts and steps one iteration has, in every phase and on every rank.

Nothing is rounded away: what does not divide evenly is distributed, so that a share is "4 or 5", never 4 with a rest lost.
"""

import dataclasses
from typing import NamedTuple


class Share(NamedTuple):
    """A size that differs by rank or by mini-batch when things do not divide evenly.

    Example:
        >>> str(Share(8, 8)), str(Share(4, 5))
        ('8', '4 to 5')
    """

    smallest: int
    largest: int

    def __str__(self) -> str:
        return str(self.smallest) if self.smallest == self.largest else f"{self.smallest} to {self.largest}"


@dataclasses.dataclass(frozen=True)
class IterationSizes:
    """Every number that follows from the sizes a user sets; letters as in `iteration_sizes`.

    Attributes:
        dp_size: Data-parallel ranks, W / P.
        num_rollouts: Rollouts of an iteration over all ranks, B n.
        rollouts_per_worker: Rollouts that one GPU owns while generating, B n / W.
        rollouts_per_tp_group: Rollouts that the GPUs of a tensor-parallel group gather and generate together, B n t / W.
        rollouts_per_dp_rank: Rollouts of an iteration that a data-parallel rank computes on, B n P / W.
        num_mini_batches: Mini-batches of one PPO epoch, B / m; the last one is short if m does not divide B.
        prompts_per_mini_batch: m, or what is left for the last one.
        rollouts_per_mini_batch: Over all ranks, m n.
        rollouts_per_mini_batch_and_dp_rank: m n P / W, the share by count; ``balance`` without ``equal_size`` gives a rank fewer but
            longer samples, or more but shorter ones.
        num_micro_steps: Gradient accumulation with a static micro-batch size, m n P / (W b), for shares by count; None under a token
            budget, where it depends on the lengths.
        num_optimizer_steps: Optimizer steps of an iteration, (B / m) `ppo_epochs`: also Lightning's ``global_step`` per epoch.
        max_tokens_per_micro_batch: Tokens that a micro-batch may hold, ``max_tokens_per_rank`` P; None with a static size.
    """

    dp_size: int
    num_rollouts: int
    rollouts_per_worker: Share
    rollouts_per_tp_group: Share
    rollouts_per_dp_rank: Share
    num_mini_batches: int
    prompts_per_mini_batch: Share
    rollouts_per_mini_batch: Share
    rollouts_per_mini_batch_and_dp_rank: Share
    num_micro_steps: Share | None
    num_optimizer_steps: int
    max_tokens_per_micro_batch: int | None

    def __str__(self) -> str:
        """Return one line per number."""
        entries = [(field.name.replace("_", " "), getattr(self, field.name)) for field in dataclasses.fields(self)]
        width = max(len(name) for name, _ in entries)
        return "\n".join(f"{name:{width}}  {'depends on the lengths' if value is None else value}" for name, value in entries)


def share_sizes(total: int, num_parts: int) -> list[int]:
    """Return the sizes of contiguous shares that differ by at most 1, larger shares first.

    Args:
        total: Number of things to share, 0 or more.
        num_parts: Number of shares, at least 1.

    Returns:
        ``[num_parts]`` sizes whose sum is ``total``.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> share_sizes(7, 4), share_sizes(3, 4)
        ([2, 2, 2, 1], [1, 1, 1, 0])
    """
    if total < 0 or num_parts < 1:
        raise ValueError(f"Expected a total of 0 or more and at least 1 part, got total={total} and num_parts={num_parts}.")
    least, rest = divmod(total, num_parts)
    return [least + (part < rest) for part in range(num_parts)]


def iteration_sizes(
    *,
    world_size: int,
    train_batch_size: int,
    rollouts_per_prompt: int,
    mini_batch_size: int,
    ppo_epochs: int = 1,
    micro_batch_size: int | None = None,
    max_tokens_per_rank: int | None = None,
    sequence_parallel_size: int = 1,
    rollout_tensor_parallel_size: int = 1,
) -> IterationSizes:
    """Derive every size of one RL iteration.

    Args:
        world_size: W, GPUs (or CPU processes).
        train_batch_size: B, prompts of an iteration, over all ranks.
        rollouts_per_prompt: n.
        mini_batch_size: m, prompts of one optimizer step, over all ranks.
        ppo_epochs: Passes over the rollouts of an iteration.
        micro_batch_size: b, samples of a micro-batch on one data-parallel rank (static). Set this or ``max_tokens_per_rank``.
        max_tokens_per_rank: Tokens of a micro-batch on one GPU (dynamic).
        sequence_parallel_size: P, GPUs that share each sample in training.
        rollout_tensor_parallel_size: t, GPUs that generate together.

    Returns:
        The derived sizes.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size below 1, P or t that does not divide W, m above B, or not exactly one of b and the token budget.

    Example:
        >>> sizes = iteration_sizes(world_size=16, train_batch_size=128, rollouts_per_prompt=8, mini_batch_size=32, ppo_epochs=2,
        ...     micro_batch_size=4, sequence_parallel_size=2, rollout_tensor_parallel_size=4)
        >>> str(sizes.rollouts_per_worker), str(sizes.rollouts_per_tp_group), str(sizes.rollouts_per_dp_rank)
        ('64', '256', '128')
        >>> str(sizes.rollouts_per_mini_batch_and_dp_rank), str(sizes.num_micro_steps), sizes.num_optimizer_steps
        ('32', '8', 8)
    """
    given = {name: value for name, value in locals().items() if value is not None}
    _check(given)
    dp_size = world_size // sequence_parallel_size
    num_rollouts = train_batch_size * rollouts_per_prompt
    workers = share_sizes(num_rollouts, world_size)
    tp = rollout_tensor_parallel_size
    num_mini_batches = -(-train_batch_size // mini_batch_size)
    prompts = Share(train_batch_size - (num_mini_batches - 1) * mini_batch_size, mini_batch_size)
    rollouts = Share(prompts.smallest * rollouts_per_prompt, prompts.largest * rollouts_per_prompt)
    per_rank = Share(rollouts.smallest // dp_size, -(-rollouts.largest // dp_size))
    # The rank with the most samples of a mini-batch sets the number of micro-steps for all.
    slowest = [-(-size // dp_size) for size in rollouts]
    return IterationSizes(
        dp_size=dp_size,
        num_rollouts=num_rollouts,
        rollouts_per_worker=Share(workers[-1], workers[0]),
        rollouts_per_tp_group=Share(sum(workers[-tp:]), sum(workers[:tp])),
        rollouts_per_dp_rank=Share(num_rollouts // dp_size, -(-num_rollouts // dp_size)),
        num_mini_batches=num_mini_batches,
        prompts_per_mini_batch=prompts,
        rollouts_per_mini_batch=rollouts,
        rollouts_per_mini_batch_and_dp_rank=per_rank,
        num_micro_steps=Share(*(-(-size // micro_batch_size) for size in slowest)) if micro_batch_size else None,
        num_optimizer_steps=num_mini_batches * ppo_epochs,
        max_tokens_per_micro_batch=max_tokens_per_rank * sequence_parallel_size if max_tokens_per_rank else None,
    )


def _check(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"`{name}` must be an integer, got {size!r}.")
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    budgets = [name for name in ("micro_batch_size", "max_tokens_per_rank") if name in sizes]
    if len(budgets) != 1:
        raise ValueError(
            "Set exactly one of `micro_batch_size` (samples, static) and `max_tokens_per_rank` (tokens, dynamic), got "
            f"{' and '.join(f'{name}={sizes[name]}' for name in budgets) or 'neither'}."
        )
    for name in ("sequence_parallel_size", "rollout_tensor_parallel_size"):
        if sizes["world_size"] % sizes[name]:
            raise ValueError(
                f"`{name}`={sizes[name]} must divide the number of ranks, {sizes['world_size']} (devices x num_nodes). "
                f"Use a divisor of {sizes['world_size']}, or a multiple of {sizes[name]} ranks."
            )
    if sizes["mini_batch_size"] > sizes["train_batch_size"]:
        raise ValueError(
            f"A mini-batch of {sizes['mini_batch_size']} prompts (`mini_batch_size`) cannot be filled by an iteration of "
            f"{sizes['train_batch_size']} (`train_batch_size`). Lower the first or raise the second."
        )
