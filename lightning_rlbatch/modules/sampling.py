"""Sample and reward this rank's share of the rollouts of a prompt batch."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rlbatch.data.prompts import PromptBatch, contiguous_share
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.reductions import all_gather_rows
from lightning_rlbatch.functional.filters import should_resample, zero_variance_groups
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules.progress import rollout_progress
from lightning_rlbatch.modules.reward_log import RewardLog, logging_rewards
from lightning_rlbatch.modules.rewards import check_rewards
from lightning_rlbatch.modules.turns import Response, ResponseSampler, texts
from lightning_rlbatch.rollout.engine import Completion, SamplingParams, rollout_seed
from lightning_rlbatch.rollout.engine_output import check_vocabulary

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo_collection import PPOCollection

_GREEDY = 2**62  # separates the random numbers of greedy answers, which need none, from those of rollouts
_ROUND = 2**33  # separates the random numbers of sampling rounds, and the streams of training and validation


@dataclasses.dataclass
class Rollout:
    """One rewarded completion.

    Attributes:
        prompt_ids: Tokens of its prompt.
        completion: What followed it: what was sampled, and the turns of an environment in between.
        reward: Weighted sum of the reward functions; NaN without a verdict.
        components: Reward of each function, NaN without a verdict.
        baseline: Reward of the greedy answer to the same prompt; NaN if nothing needs it.
        sampled: True for each token of the completion that the policy sampled; None if it sampled all.
        answer: What it votes for in a majority vote; None for nothing.
        extra: What reward functions tell of it beside their rewards.
    """

    prompt_ids: list[int]
    completion: Completion
    reward: float
    components: list[float]
    baseline: float = math.nan
    sampled: list[bool] | None = None
    answer: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def response_mask(self) -> list[bool]:
        """Which tokens of the completion the policy sampled."""
        return [True] * len(self.completion.token_ids) if self.sampled is None else self.sampled


class RolloutSampler:
    """Samples the rollouts of one prompt batch; every method that communicates is called by every rank.

    Args:
        module: The PPO module.
        prompts: Prompts over all ranks.
        stream: Number that separates this batch's random numbers from those of all others.
        description: Name of the progress bar.
        find_answers: Finds the answers of completions, called like the module's ``compute_rewards``; None leaves them out.

    Attributes:
        reward_log: What reward functions told of all completions but greedy answers.
    """

    def __init__(
        self,
        module: "PPOCollection",
        prompts: PromptBatch,
        stream: int,
        description: str,
        *,
        find_answers: Callable[..., list[str | None]] | None = None,
    ) -> None:
        self.module = module
        self.prompts = prompts
        self.stream = stream
        self.description = description
        self.find_answers = find_answers
        self.group = module.meshes.world_group
        self.own = contiguous_share(prompts.num_samples, module.meshes.world_size, module.meshes.rank)
        self.seconds: dict[str, float] = {"generation": 0.0, "rewards": 0.0}
        self.num_resampled_groups = 0
        self.reward_log = self._new_log()

    def _new_log(self) -> RewardLog:
        trainer = self.module.trainer
        state = SimpleNamespace(global_step=trainer.global_step, max_steps=trainer.max_steps, epoch=trainer.current_epoch)
        return RewardLog(trainer_state=state)

    def sample(self, sampling: SamplingParams) -> list[Rollout]:
        """Return this rank's rollouts, in the order of its share."""
        return self._rollouts(self.own, sampling, self.stream)

    def sample_until_useful(self, sampling: SamplingParams, max_rounds: int) -> list[Rollout]:
        """Sample; replace prompts whose rollouts were all rewarded alike by others, up to a number of rounds.

        Source: Yu et al., "DAPO", 2025, section 3.2. The replacements come from the whole data set, by a rule that every rank
        computes alike; what is still without variance after the last round is kept (its advantages are 0).

        Args:
            sampling: How completions are drawn.
            max_rounds: Rounds of sampling, the first included.

        Raises:
            ValueError: Prompts have one rollout each, which can be compared with none.
        """
        if max_rounds > 1 and self.prompts.rollouts_per_prompt == 1:
            raise ValueError(
                f"max_sampling_rounds={max_rounds} looks for prompts whose rollouts are all rewarded alike, but rollouts_per_prompt is 1."
                " Raise rollouts_per_prompt, or set max_sampling_rounds to 1."
            )
        rollouts, attempt = dict(zip(self.own, self.sample(sampling))), 1
        size, wanted = self.prompts.rollouts_per_prompt, len(self.prompts)
        # The rewards are gathered only where they could matter: the last round is kept as it comes.
        while should_resample(0, wanted, attempt, max_rounds):
            useless = self._groups_without_variance([rollouts[index].reward for index in self.own])
            if not should_resample(wanted - len(useless), wanted, attempt, max_rounds):
                break
            self.num_resampled_groups += len(useless)
            self.prompts = self.prompts.replaced(useless, self.stream, attempt)
            again = [index for index in self.own if index // size in set(useless)]
            rollouts |= zip(again, self._rollouts(again, sampling, self.stream + attempt * _ROUND))
            attempt += 1
        return [rollouts[index] for index in self.own]

    def _groups_without_variance(self, own_rewards: Sequence[float]) -> list[int]:
        """Return the prompts whose rollouts were all rewarded alike, over all ranks."""
        rewards, _ = all_gather_rows(torch.tensor(own_rewards, dtype=torch.float64), self.group)
        size = self.prompts.rollouts_per_prompt
        groups = torch.arange(len(self.prompts)).repeat_interleave(size)
        useless: list[int] = zero_variance_groups(rewards, groups).samples.view(-1, size).all(1).nonzero().flatten().tolist()
        return useless

    def greedy_baselines(self, rollouts: list[Rollout], sampling: SamplingParams) -> None:
        """Give each rollout the reward of the greedy answer to its prompt, in place (Li et al., "ReMax", 2024).

        Args:
            rollouts: This rank's rollouts.
            sampling: How the rollouts were drawn; only the temperature is replaced.
        """
        size = self.prompts.rollouts_per_prompt
        asked = sorted({index // size for index in self.own})
        # The first rollout's place, on whichever rank that is, and a stream apart: an engine may look at the seed all the same.
        greedy, first = dataclasses.replace(sampling, temperature=0.0), [prompt * size for prompt in asked]
        answers = self._rollouts(first, greedy, self.stream + _GREEDY, self._new_log())
        baselines = dict(zip(asked, (answer.reward for answer in answers)))
        for index, rollout in zip(self.own, rollouts):
            rollout.baseline = baselines[index // size]

    def responses(self, indices: Iterable[int], sampling: SamplingParams, stream: int) -> list[Response]:
        """Return responses without rewards.

        Args:
            indices: Which rollouts of the batch.
            sampling: How they are drawn.
            stream: Of the random numbers.
        """
        module, prompts, size = self.module, self.prompts, self.prompts.rollouts_per_prompt
        responses = [
            Response(index // size, rollout_seed(prompts.seed, stream, prompts.positions[index // size], index % size)) for index in indices
        ]
        sampler = ResponseSampler(
            module.rollout_engine,
            prompts,
            sampling,
            group=module.rollout_group,
            environment=module.environment,
            max_turns=module.max_turns,
        )
        # What only this rank runs (its prompts, its reward calls) fails on every rank, or the others would wait for it. Collectives of
        # a tensor-parallel group within are safe: whatever is raised there is raised on all ranks of the group.
        progress = rollout_progress(module.trainer, len(responses), self.description)
        # The ranks of a tensor-parallel group communicate while they generate: a stop waits for the end of it.
        alone = module.interruptible() if module.rollout_group is None else nullcontext()
        with fail_together(self.group, "generation"), self._timed("generation"), progress as update, alone:
            sampler.sample(responses, update)
            self._check_vocabulary(responses)
        return responses

    def _check_vocabulary(self, responses: Sequence[Response]) -> None:
        embeddings = getattr(self.module.policy.model, "get_input_embeddings", lambda: None)()
        size: int | None = getattr(embeddings, "num_embeddings", None)
        if size is None:  # a model of the user's own, which may take anything
            return
        for response in responses:
            prompt = self.prompts.prompts[response.prompt][:80]
            check_vocabulary(self.prompts.prompt_ids[response.prompt], size, f"The prompt {prompt!r}")
            check_vocabulary(response.token_ids, size, f"A response to {prompt!r}")

    def _rollouts(self, indices: Iterable[int], sampling: SamplingParams, stream: int, log: RewardLog | None = None) -> list[Rollout]:
        module, prompts, log = self.module, self.prompts, log or self.reward_log
        responses = self.responses(indices, sampling, stream)
        with fail_together(self.group, "rewards"), self._timed("rewards"), module.interruptible():
            told = texts(prompts, responses)._asdict() | {"completion_ids": [response.token_ids for response in responses]}
            with logging_rewards(log):
                totals, by_name = module.compute_rewards(**told)
            check_rewards(totals, by_name, module.reward_names, len(responses))
            answers = [None] * len(responses) if self.find_answers is None else self.find_answers(**told)
            components = list(zip(*by_name.values())) or [()] * len(responses)  # no reward function beside a reward model
            extras = log.extra(len(responses))
            ids = [prompts.prompt_ids[response.prompt] for response in responses]
            return [
                Rollout(prompt, response.completion, reward, list(parts), sampled=response.sampled, answer=answer, extra=extra)
                for prompt, response, reward, parts, answer, extra in zip(ids, responses, totals, components, answers, extras)
            ]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def pack_rollouts(rollouts: list[Rollout], first_id: int, num_components: int) -> PackedBatch:
    """Pack rewarded completions; a rank without any gets an empty batch of the same schema.

    Args:
        rollouts: This rank's rollouts.
        first_id: Sample id of the first one; ids go on by one.
        num_components: Number of reward functions.
    """
    rows = [_row(rollout, first_id + offset) for offset, rollout in enumerate(rollouts)]
    if rows:
        return PackedBatch.from_samples(rows, per_sample=("component_rewards",))
    template = _row(Rollout([0], Completion([0], [0.0], "stop"), 0.0, [0.0] * num_components), 0)
    return PackedBatch.empty(PackedBatch.from_samples([template], per_sample=("component_rewards",)).schema)


def _row(rollout: Rollout, sample_id: int) -> dict[str, Tensor]:
    prompt, completion = rollout.prompt_ids, rollout.completion
    return {
        "input_ids": torch.tensor([*prompt, *completion.token_ids], dtype=torch.int64),
        "response_mask": torch.tensor([False] * len(prompt) + rollout.response_mask),
        "rollout_log_probs": torch.tensor([0.0] * len(prompt) + list(completion.log_probs), dtype=torch.float32),
        "reward": torch.tensor(rollout.reward, dtype=torch.float64),
        "component_rewards": torch.tensor(rollout.components, dtype=torch.float64),
        "baseline_reward": torch.tensor(rollout.baseline, dtype=torch.float64),
        "truncated": torch.tensor(completion.finish_reason == "length"),
        SAMPLE_ID: torch.tensor(sample_id, dtype=torch.int64),
    }
