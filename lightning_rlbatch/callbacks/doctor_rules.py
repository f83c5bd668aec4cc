"""What goes wrong in RL runs, as rules over the metrics of past iterations; no Trainer, no torch."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `rlbatch report` reads this file alone, without the package around it
    from lightning_rlbatch.callbacks.doctor_history import History


@dataclass(frozen=True)
class Thresholds:
    """When a number is alarming.

    Values without another source are the red flags of axolotl's guide to training stability of GRPO (``docs/training_stability``, 2025).

    Attributes:
        window: Iterations that are averaged, to pass over noise.
        ratio_error: Largest distance from 1 of the first ratio of an iteration. In exact arithmetic it is 0; bf16 gives up to 5e-4.
        entropy_floor: Entropy in nats per token below which a policy samples one answer only.
        entropy_speed: Share of its entropy that a policy may lose per iteration at the start: at 0.25 more than half of it is gone after
            three. Measured on the Tower of Hanoi example: 10 to 15% in nine sound runs and 14 to 19% in eight that collapsed later,
            so a lower value would not tell them apart.
        entropy_spent: KL of an update as a share of the entropy that is left, once half of it is gone: how much of what it does not know
            yet the policy decides in one step. Median of two windows. Measured on the same runs: at most 0.04 in the sound ones, 0.18 to
            0.87 in those that collapsed (own choice between the two, made before the last six of them were run).
        entropy_share: Share of its first entropy that must be left while rewards rise no more (own choice).
        approx_kl: Mean KL between the policies before and after an update; early stopping in PPO code sits near 0.015 (Achiam, "Spinning
            Up in Deep RL", 2018), and several times that is a step too far.
        reference_kl: KL to the reference model that means the policy has left it.
        mismatch_kl: KL between the engine's and the trainer's log-probs; below 1e-3 is what NeMo-RL calls acceptable (2025).
        clip_fraction: Share of tokens outside the clip range.
        zero_variance: Share of groups whose rollouts all got the same reward, which teach nothing.
        truncated: Share of responses cut at ``max_response_length``.
        length_change: Factor by which the mean response length shrinks or grows while rewards rise (own choice).
        skipped_steps: Share of optimizer steps that were skipped (own choice).
    """

    window: int = 3
    ratio_error: float = 1e-3
    entropy_floor: float = 0.01
    entropy_speed: float = 0.25
    entropy_spent: float = 0.08
    entropy_share: float = 0.1
    approx_kl: float = 0.1
    reference_kl: float = 2.0
    mismatch_kl: float = 1e-3
    clip_fraction: float = 0.3
    zero_variance: float = 0.8
    truncated: float = 0.3
    length_change: float = 2.0
    skipped_steps: float = 0.5


@dataclass(frozen=True)
class Diagnosis:
    """Something that a rule saw.

    Attributes:
        name: Of the rule.
        iteration: When.
        seen: What was seen, with numbers.
        advice: What to try.
    """

    name: str
    iteration: int
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name.replace('_', ' ')} at iteration {self.iteration}: {self.seen} {self.advice}"


Finding = tuple[str, str]
"""What was seen, and what to try."""

Rule = Callable[["History", Thresholds], Finding | None]


def first_ratio(history: "History", limits: Thresholds) -> Finding | None:
    """The first update of an iteration sees other log-probs than the rollouts' scoring."""
    values = history.series("first_ratio").last
    if not values or abs(values[-1] - 1) <= limits.ratio_error:
        return None
    return (
        f"the mean ratio of the first update is {values[-1]:.5f}, not 1.",
        "Old log-probs and those of the update differ: run `rlbatch verify`; look for dropout, another temperature or precision.",
    )


def entropy_collapse(history: "History", limits: Thresholds) -> Finding | None:
    """The policy has become certain before it has become right."""
    first, now = history.first("train/entropy", limits.window), history.recent("train/entropy", limits.window)
    if now is None:
        return None
    advice = "Lower the learning rate or ppo_epochs, raise clip_high, or add entropy_coefficient."
    if now < limits.entropy_floor:
        return f"entropy is {now:.4f} nats per token (below {limits.entropy_floor:g}): every prompt gets one answer.", advice
    values, window = history.series("train/entropy"), limits.window
    early = statistics.fmean(values.first[window : 2 * window]) if values.count >= 2 * window else None
    if first is not None and early is not None and values.count <= 4 * window:
        speed = 1 - (early / first) ** (1 / window) if first > 0 else 0.0
        if speed > limits.entropy_speed:
            return f"entropy falls by {100 * speed:.0f}% per iteration, from {first:.3f} to {early:.3f} nats in {window}.", advice
    ratios = list(history.spent.last)
    spent = statistics.median(ratios[-2 * window :]) if len(ratios) >= 2 * window else None
    if first is not None and spent is not None and now < first / 2 and spent > limits.entropy_spent:
        return (
            f"entropy went from {first:.3f} to {now:.3f} nats, and the KL of an update is {100 * spent:.0f}% of what is left: the policy"
            " makes up its mind before it has seen what pays.",
            advice,
        )
    if first is not None and now < limits.entropy_share * first and not _rising(history, limits):
        return f"entropy is {now:.4f} nats, {100 * now / first:.0f}% of what it began with, and rewards rise no more.", advice
    return None


def reward_hacking_by_length(history: "History", limits: Thresholds) -> Finding | None:
    """Responses shrink, or grow without better rewards: the policy plays on their length instead of the task.

    Growth with rising rewards is how reasoning is learnt, and no finding.
    """
    first, now = history.first("length/mean", limits.window), history.recent("length/mean", limits.window)
    before, after = history.first("reward/mean", limits.window), history.recent("reward/mean", limits.window)
    if first is None or now is None or before is None or after is None or min(first, now) <= 0:
        return None
    shrunk, grown = now < first / limits.length_change, now > first * limits.length_change
    if not shrunk and not (grown and not _rose(history, limits)):
        return None
    seen = f"responses went from {first:.0f} to {now:.0f} tokens, rewards from {before:.3f} to {after:.3f}."
    if shrunk:
        return seen, "Read some rollouts (RolloutLogger) and compare with a held-out score: partial credit may pay for stopping early."
    return seen, "Read some rollouts (RolloutLogger): something may pay for writing more. Try overlong_buffer."


def kl_blow_up(history: "History", limits: Thresholds) -> Finding | None:
    """Updates are too large, or the policy has left its reference."""
    update, reference = history.recent("train/approx_kl", limits.window), history.recent("kl/reference", limits.window)
    if update is not None and update > limits.approx_kl:
        return (
            f"the KL of an update is {update:.3f} (above {limits.approx_kl:g}).",
            "Lower the learning rate, ppo_epochs or max_grad_norm, or use larger mini-batches.",
        )
    if reference is not None and reference > limits.reference_kl:
        return (
            f"the KL to the reference model is {reference:.2f} (above {limits.reference_kl:g}).",
            "Raise kl_coefficient or lower the learning rate, and read some rollouts.",
        )
    return None


def engine_mismatch(history: "History", limits: Thresholds) -> Finding | None:
    """The engine that samples computes other log-probs than the trainer."""
    now = history.recent("kl/rollout_mismatch", limits.window)
    if now is None or now <= limits.mismatch_kl:
        return None
    return (
        f"the KL between engine and trainer is {now:.2g} (above {limits.mismatch_kl:g}).",
        "Check that both have the same precision, temperature, top_k and top_p, or set rollout_correction.",
    )


def clip_fraction(history: "History", limits: Thresholds) -> Finding | None:
    """Too many tokens are outside the clip range, so the update ignores them."""
    low, high = (history.recent(f"train/clip_fraction_{side}", limits.window) for side in ("low", "high"))
    total = (low or 0.0) + (high or 0.0)
    if total <= limits.clip_fraction:
        return None
    return (
        f"{100 * total:.0f}% of the tokens are clipped (above {100 * limits.clip_fraction:.0f}%).",
        "Rollouts are too old for these updates: lower the learning rate, ppo_epochs or the number of mini-batches per iteration.",
    )


def zero_variance_groups(history: "History", limits: Thresholds) -> Finding | None:
    """Most groups teach nothing, since all of their rollouts got the same reward."""
    right, wrong = (history.recent(f"reward/zero_variance_all_{kind}", limits.window) for kind in ("right", "wrong"))
    if right is None or wrong is None or right + wrong <= limits.zero_variance:
        return None
    seen = f"{100 * (right + wrong):.0f}% of the groups have one reward ({100 * right:.0f}% all right, {100 * wrong:.0f}% all wrong)."
    if wrong > right:
        return seen, "The prompts are too hard: warm up by SFT, add easier ones, raise rollouts_per_prompt, or set max_sampling_rounds."
    return seen, "The prompts are too easy or exploration is gone: add harder ones, set max_sampling_rounds, or stop here."


def truncation(history: "History", limits: Thresholds) -> Finding | None:
    """Responses hit the length limit, so their rewards say little."""
    now = history.recent("length/truncated", limits.window)
    if now is None or now <= limits.truncated:
        return None
    return (
        f"{100 * now:.0f}% of the responses are cut at max_response_length (above {100 * limits.truncated:.0f}%).",
        "Raise max_response_length, set overlong_buffer, or leave them out with drop_truncated; check that the policy knows the end token.",
    )


def starving_prompts(history: "History", limits: Thresholds) -> Finding | None:
    """Rewards stopped rising while the gradient grows from a few lucky groups."""
    first, now = history.first("train/grad_norm/policy", limits.window), history.recent("train/grad_norm/policy", limits.window)
    right, wrong = (history.recent(f"reward/zero_variance_all_{kind}", limits.window) for kind in ("right", "wrong"))
    if first is None or now is None or right is None or wrong is None or _rising(history, limits):
        return None
    if now < 2 * first or right + wrong < limits.zero_variance / 2:
        return None
    return (
        f"rewards rise no more, {100 * (right + wrong):.0f}% of the groups teach nothing, and the gradient norm went from {first:.2f} to"
        f" {now:.2f}: few groups make the whole update.",
        "Raise rollouts_per_prompt or train_batch_size, set max_sampling_rounds, or lower the learning rate.",
    )


def skipped_steps(history: "History", limits: Thresholds) -> Finding | None:
    """Optimizer steps are skipped."""
    now = history.recent("train/skipped_steps", limits.window)
    if now is None or now <= limits.skipped_steps:
        return None
    return (
        f"{100 * now:.0f}% of the optimizer steps are skipped: gradients are not finite, or there is nothing to train on.",
        "Check the rewards for NaN, lower the learning rate, or use bf16 instead of fp16.",
    )


def useless_critic(history: "History", limits: Thresholds) -> Finding | None:
    """The critic predicts worse than the mean return."""
    count, now = history.series("value/explained_variance").count, history.recent("value/explained_variance", limits.window)
    if count < 10 or now is None or now >= 0:
        return None
    return (
        f"after {count} iterations the critic explains {now:.2f} of the variance of returns.",
        "Raise critic_lr, raise value_clip (or drop it), or use an estimator without values.",
    )


def _rose(history: "History", limits: Thresholds) -> bool:
    """Say whether rewards are higher than at the start, by more than their noise from iteration to iteration."""
    rewards, before, now = (
        history.series("reward/mean"),
        history.first("reward/mean", limits.window),
        history.recent("reward/mean", limits.window),
    )
    if before is None or now is None:
        return False
    return now - before > max(0.0, 0.05 * (rewards.high - rewards.low))


def _rising(history: "History", limits: Thresholds) -> bool:
    """Say whether the mean reward of the last iterations is higher than that of as many before."""
    values, span = list(history.series("reward/mean").last), 4 * limits.window
    if len(values) < 2 * span:
        return True
    recent, before = values[-span:], values[-2 * span : -span]
    noise = statistics.stdev(recent + before) / math.sqrt(span)
    return statistics.fmean(recent) - statistics.fmean(before) > 0.5 * noise


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        first_ratio,
        entropy_collapse,
        reward_hacking_by_length,
        kl_blow_up,
        engine_mismatch,
        clip_fraction,
        zero_variance_groups,
        truncation,
        starving_prompts,
        skipped_steps,
        useless_critic,
    )
}


def diagnose(history: "History", limits: Thresholds) -> list[Diagnosis]:
    """Return everything that the rules see after the last iteration.

    Args:
        history: Of all iterations so far.
        limits: When a number is alarming.
    """
    iteration = history.num_iterations - 1
    found = ((name, rule(history, limits)) for name, rule in RULES.items())
    return [Diagnosis(name, iteration, *finding) for name, finding in found if finding is not None]
