"""How mini-batches are formed and cut: the options of the update and of the forward-only passes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.planning import plan_mini_batch, recut
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT

Role = Literal["update", "log_prob", "critic"]
"""Whose token budget: the policy's update, forward-only passes, the critic's passes."""


@dataclasses.dataclass(frozen=True)
class BatchingOptions:
    """Options of planning, checked together so that none is silently without effect.

    Attributes:
        max_tokens_per_rank: Token budget of one GPU in a micro-batch of the update (dynamic).
        micro_batch_size: Samples of a micro-batch of the update (static); exactly one of the two is set.
        log_prob_max_tokens_per_rank: Budget of forward-only passes; None takes ``max_tokens_per_rank``.
        log_prob_micro_batch_size: Samples per micro-batch of forward-only passes; None takes ``micro_batch_size``.
        critic_max_tokens_per_rank: Budget of the critic's passes; None takes the policy's. Needs a critic with a trunk of its own.
        critic_micro_batch_size: Samples per micro-batch of the critic; None takes the policy's.
        balance: False keeps samples in contiguous blocks, one per rank; with ``per_rank`` each rank still cuts its block by load.
        equal_size: Numbers of samples per rank differ by at most one.
        planner: ``"global"``, or ``"per_rank"``, the two-layer baseline.
        oversize: ``"error"`` or ``"isolate"``: what to do with a sample above the budget.
        coefficient: Linear cost of a token relative to the quadratic one, see ``attention_workload``.
        padded: Micro-batches are padded to their longest sample (``remove_padding: false``): the budget counts
            samples x longest.
    """

    max_tokens_per_rank: int | None = None
    micro_batch_size: int | None = None
    log_prob_max_tokens_per_rank: int | None = None
    log_prob_micro_batch_size: int | None = None
    critic_max_tokens_per_rank: int | None = None
    critic_micro_batch_size: int | None = None
    balance: bool = True
    equal_size: bool = False
    planner: Literal["global", "per_rank"] = "global"
    oversize: Literal["error", "isolate"] = "error"
    coefficient: int = DEFAULT_COEFFICIENT
    padded: bool = False

    def __post_init__(self) -> None:
        """Refuse contradictory options.

        Raises:
            ValueError: Names the options and says which to keep.
        """
        if (self.max_tokens_per_rank is None) == (self.micro_batch_size is None):
            raise ValueError(
                f"Expected exactly one of max_tokens_per_rank and micro_batch_size but got {self.max_tokens_per_rank} and"
                f" {self.micro_batch_size}. Set max_tokens_per_rank for micro-batches of bounded tokens (recommended), or"
                " micro_batch_size for a fixed number of samples."
            )
        dynamic = ("max_tokens_per_rank", "log_prob_max_tokens_per_rank", "critic_max_tokens_per_rank")
        static = ("micro_batch_size", "log_prob_micro_batch_size", "critic_micro_batch_size")
        for name in (*dynamic, *static):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Expected {name} to be at least 1 but got {value}.")
        for refused, instead in zip(*((static, dynamic) if self.micro_batch_size is None else (dynamic, static))):
            if getattr(self, refused) is not None:
                mode = "max_tokens_per_rank" if self.micro_batch_size is None else "micro_batch_size"
                raise ValueError(f"{refused} has no effect with {mode}: set {instead} instead, or remove it.")

    def plan(self, lengths: Sequence[int], meshes: Meshes, *, role: Role = "update") -> BatchPlan:
        """Plan one optimizer step, or one forward-only pass over samples that may go anywhere.

        Args:
            lengths: Tokens of each sample, known on every rank.
            meshes: Numbers of data-parallel and sequence-parallel ranks.
            role: Whose budget.
        """
        return plan_mini_batch(lengths, **self.planner_arguments(meshes, role=role))

    def planner_arguments(self, meshes: Meshes, *, role: Role = "update") -> dict[str, Any]:
        """Return all arguments of ``plan_mini_batch`` but the lengths; :class:`TokenBudgetSampler` takes them too.

        Args:
            meshes: Numbers of data-parallel and sequence-parallel ranks.
            role: Whose budget.
        """
        ranks = {"dp_size": meshes.dp_size, "sp_size": meshes.sp_size}
        return ranks | {"balance": self.balance, "equal_size": self.equal_size, "planner": self.planner} | self._limits(role)

    def _limits(self, role: Role) -> dict[str, Any]:
        """Return what holds for every cut of a role's passes, as arguments of the planners."""
        return {
            "max_tokens_per_rank": self._cap("max_tokens_per_rank", role),
            "micro_batch_size": self._cap("micro_batch_size", role),
            "coefficient": self.coefficient,
            "oversize": self.oversize,
            "padded": self.padded,
        }

    def _cap(self, name: str, role: Role) -> int | None:
        own: int | None = None if role == "update" else getattr(self, f"{role}_{name}")
        common: int | None = getattr(self, name)
        return own if own is not None else common

    @property
    def cuts_critic(self) -> bool:
        """Whether the critic has a budget of its own."""
        return self.critic_max_tokens_per_rank is not None or self.critic_micro_batch_size is not None

    def check_longest_sample(self, max_prompt_length: int, max_response_length: int, *, sp_size: int, has_reward_model: bool) -> None:
        """Refuse budgets that a sample may exceed; whether one does would only show in the middle of training.

        Args:
            max_prompt_length: Most tokens of a prompt.
            max_response_length: Most tokens of a response.
            sp_size: Ranks that share a micro-batch.
            has_reward_model: Whether forward-only passes read one more token, behind the response.

        Raises:
            ValueError: Names the budget and the lengths.
        """
        # Forward-only passes have the update's budget unless they have their own.
        scored = "max_tokens_per_rank" if self.log_prob_max_tokens_per_rank is None else "log_prob_max_tokens_per_rank"
        for name in ("max_tokens_per_rank", "log_prob_max_tokens_per_rank", "critic_max_tokens_per_rank"):
            budget = getattr(self, name)
            one_more = has_reward_model and name == scored
            longest = max_prompt_length + max_response_length + one_more
            if budget is not None and self.oversize == "error" and budget * sp_size < longest:
                raise ValueError(
                    f"A sample may have {longest} tokens (max_prompt_length={max_prompt_length} + max_response_length="
                    f"{max_response_length}{' + 1 for the reward model' * one_more}) but a micro-batch holds {budget * sp_size}"
                    f" ({name}={budget} x sequence_parallel_size={sp_size}). Raise the budget or sequence_parallel_size, lower the"
                    " lengths, or set oversize='isolate'."
                )

    def recut(self, lengths: Sequence[int], samples_per_rank: list[list[int]], meshes: Meshes, *, role: Role) -> BatchPlan:
        """Cut samples that already lie on their ranks, under the budget of another pass.

        Args:
            lengths: Tokens of all samples.
            samples_per_rank: Samples that each data-parallel rank holds.
            meshes: Sizes of the mesh.
            role: Whose budget.
        """
        return recut(lengths, samples_per_rank, sp_size=meshes.sp_size, **self._limits(role))


def options_for(module: object, options: BatchingOptions) -> BatchingOptions:
    """Return the options as a module needs them: its ``remove_padding`` decides whether micro-batches are padded.

    Args:
        module: The module that trains; its ``critic_source`` is looked at too.
        options: Of the data module.

    Raises:
        ValueError: A budget of the critic, but the module has no critic, or one that shares the policy's trunk.
    """
    critic = getattr(module, "critic_source", None)
    if options.cuts_critic and critic in (None, "shared"):
        raise ValueError(
            "critic_max_tokens_per_rank and critic_micro_batch_size need a critic with a trunk of its own, but the module's critic is"
            f" {critic!r}. Set critic, or remove the option."
        )
    return dataclasses.replace(options, padded=not getattr(module, "remove_padding", True))


def mini_batch_members(num_prompts: int, mini_batch_size: int, *, seed: int, iteration: int, epoch: int) -> list[list[int]]:
    """Split an iteration's prompts into mini-batches: a seeded shuffle that never looks at lengths.

    Args:
        num_prompts: Prompts of the iteration.
        mini_batch_size: Prompts per optimizer step; the last mini-batch holds the rest.
        seed: Seed of the run.
        iteration: RL iteration.
        epoch: PPO epoch within the iteration.

    Returns:
        Prompt positions of each mini-batch; whole groups, because all rollouts of a prompt follow it.

    Example:
        >>> sorted(sum(mini_batch_members(5, 2, seed=0, iteration=0, epoch=0), []))
        [0, 1, 2, 3, 4]
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + iteration * 101 + epoch) % 2**63)
    order = torch.randperm(num_prompts, generator=generator).tolist()
    return [order[start : start + mini_batch_size] for start in range(0, num_prompts, mini_batch_size)]


def iteration_mini_batches(num_prompts: int, mini_batch_size: int, ppo_epochs: int, *, seed: int, iteration: int) -> list[list[int]]:
    """Return the mini-batches of all PPO epochs of an iteration, one epoch after the other; see :func:`mini_batch_members`.

    Args:
        num_prompts: Prompts of the iteration.
        mini_batch_size: Prompts per optimizer step.
        ppo_epochs: Passes over the iteration's rollouts.
        seed: Seed of the run.
        iteration: RL iteration.

    Example:
        >>> [len(part) for part in iteration_mini_batches(5, 2, 2, seed=0, iteration=0)]
        [2, 2, 1, 2, 2, 1]
    """
    epochs = (mini_batch_members(num_prompts, mini_batch_size, seed=seed, iteration=iteration, epoch=epoch) for epoch in range(ppo_epochs))
    return [part for epoch in epochs for part in epoch]
