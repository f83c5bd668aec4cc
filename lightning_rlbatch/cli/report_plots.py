"""The plots of a run report, in the order in which practitioners open them."""

from collections.abc import Iterable

from lightning_rlbatch.cli.charts import Chart, Series
from lightning_rlbatch.cli.run_metrics import RunMetrics

_MONITOR = "Add the callback lightning_rlbatch.callbacks.ThroughputMonitor."
_BY_PLAN = "Plans are logged by this package's data modules."
_PHASES = ("generation", "rewards", "exchange", "scoring", "sync_weights", "update")


def charts(run: RunMetrics, max_grad_norm: float | None) -> list[Chart]:
    """Return the sixteen plots.

    Args:
        run: What was logged.
        max_grad_norm: Where gradients are clipped, drawn as a line; None draws none.
    """
    return [*_learning(run), *_updates(run, max_grad_norm), *_speed(run), *_batches(run)]


def _learning(run: RunMetrics) -> list[Chart]:
    return [
        Chart(
            "Reward and held-out score",
            [
                Series("reward (training)", run.first_of_iterations("reward/mean"), 0, smooth=True),
                *(Series(label, run.points(name), 1 + index % 5, dots=True) for index, (label, name) in enumerate(held_out(run))),
            ],
            missing="Rewards are logged by PPOModule; set val_prompts for a held-out score.",
        ),
        Chart("Entropy of the policy", [Series("entropy", run.points("train/entropy"), 0, smooth=True)], "nats per token", _by_ppo()),
        Chart(
            "Response length and truncation",
            [
                Series("mean", run.first_of_iterations("length/mean"), 0, smooth=True),
                Series("95th percentile", run.first_of_iterations("length/p95"), 3),
                Series("longest", run.first_of_iterations("length/max"), 4),
                Series("truncated", run.first_of_iterations("length/truncated"), 1, right=True),
            ],
            "tokens",
            _by_ppo(),
        ),
        Chart(
            "Groups that teach nothing",
            [
                Series("all right", run.first_of_iterations("reward/zero_variance_all_right"), 2, smooth=True),
                Series("all wrong", run.first_of_iterations("reward/zero_variance_all_wrong"), 1, smooth=True),
            ],
            "share of groups",
            _by_ppo(),
        ),
    ]


def held_out(run: RunMetrics, *, of_several: bool = True) -> list[tuple[str, str]]:
    """Return (label, column) of the held-out rewards: the mean, and the functions whose rewards are not the mean itself.

    Args:
        run: What was logged.
        of_several: Whether scores of several answers to a prompt belong to them, each for its largest number of answers.
    """
    mean = "val/reward/mean"
    names = _starting(run, "val/reward/")
    counts: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = name.rpartition("_")
        if kind.endswith(("/best_of", "/majority_of")) and number.isdigit():
            counts.setdefault(kind, []).append(int(number))
    several = {f"{kind}_{number}": number == max(numbers) and of_several for kind, numbers in counts.items() for number in numbers}
    parts = [name for name in names if several.get(name, True) and name != mean and run.points(name) != run.points(mean)]
    whole = [("held-out", mean)] if mean in names else []
    return whole + [(f"held-out {_words(name)}", name) for name in parts]


def _words(name: str) -> str:
    last = name.rpartition("/")[2]
    return last.replace("_", " ") if last.startswith(("best_of_", "majority_of_")) else last


def _updates(run: RunMetrics, max_grad_norm: float | None) -> list[Chart]:
    roles = _starting(run, "train/grad_norm/")
    return [
        Chart(
            "KL divergences",
            [
                Series("of an update (k3)", run.points("train/approx_kl"), 0, smooth=True),
                Series("to the reference", run.points("kl/reference"), 1, smooth=True),
                Series("in the reward", run.first_of_iterations("kl/reward"), 2, smooth=True),
                Series("engine to trainer", run.first_of_iterations("kl/rollout_mismatch"), 3),
            ],
            "nats per token",
            _by_ppo(),
        ),
        Chart(
            "Clip fractions",
            [
                Series("below", run.points("train/clip_fraction_low"), 0, smooth=True),
                Series("above", run.points("train/clip_fraction_high"), 1, smooth=True),
            ],
            "share of tokens",
            "The policy loss of this run does not clip, or no PPOModule trained.",
        ),
        Chart(
            "Gradient norm before clipping",
            [Series(name.rpartition("/")[2], run.points(name), index % 6, smooth=True) for index, name in enumerate(roles)],
            missing="No module of this package trained.",
            lines=[] if max_grad_norm is None else [(f"clipped above {max_grad_norm:g}", max_grad_norm)],
        ),
        Chart(
            "Explained variance of the critic",
            [
                Series("explained variance", run.points("value/explained_variance"), 0, smooth=True),
                Series("value loss", run.points("value/loss"), 1, smooth=True),
            ],
            missing="This run has no critic.",
            lines=[("1", 1.0)] if run.points("value/explained_variance") else [],
        ),
    ]


def _speed(run: RunMetrics) -> list[Chart]:
    return [
        Chart(
            "Where an iteration's time goes",
            _phases(run),
            "seconds of an iteration",
            _by_ppo(),
            stacked=True,
            note=_phase_note(run),
            x_name="iteration",
        ),
        Chart(
            "Tokens per second, use of the hardware",
            [
                Series("trained, rollouts included", run.points("throughput/tokens_per_second"), 0, smooth=True),
                Series("within updates", run.points("throughput/update/tokens_per_second"), 3, smooth=True),
                Series("FLOPs utilisation", run.points("throughput/model_flops_utilization"), 1, right=True),
            ],
            "tokens per second, all ranks",
            _MONITOR,
        ),
        Chart("Peak memory of rank 0", [Series("peak", run.points("memory/peak_gib"), 0)], "GiB", _MONITOR),
    ]


def _batches(run: RunMetrics) -> list[Chart]:
    return [
        *_plans(run),
        _waiting(run),
        Chart(
            "Ratio of the first update",
            [Series("mean ratio", run.first_of_iterations("train/ratio"), 0)],
            missing=_by_ppo(),
            lines=[("1", 1.0)] if run.points("train/ratio") else [],
            from_zero=False,
            note="1 in exact arithmetic: anything else is a mismatch of log-probs",
        ),
    ]


def _plans(run: RunMetrics) -> list[Chart]:
    mean = dict(run.points("balance/global_workload/mean"))
    return [
        Chart(
            "Heaviest and lightest rank, before and after",
            [
                Series(label, _over(run.points(f"balance/global_workload/{name}"), mean), colour)
                for label, name, colour in (
                    ("heaviest, contiguous", "max", 1),
                    ("lightest, contiguous", "min", 5),
                    ("heaviest, planned", "balanced_max", 0),
                    ("lightest, planned", "balanced_min", 3),
                )
            ],
            "workload / mean workload of a rank",
            _BY_PLAN,
            from_zero=False,
        ),
        Chart(
            "Micro-batch fill and efficiency",
            [
                Series("tokens / budget", run.points("balance/plan/fill"), 0, smooth=True),
                Series("ideal / planned time", run.points("balance/plan/efficiency"), 2, smooth=True),
                Series("the same, contiguous", run.points("balance/before/efficiency"), 1, smooth=True),
            ],
            missing=_BY_PLAN,
        ),
        Chart(
            "Padding avoided",
            [Series("padding avoided", run.points("balance/plan/padding_avoided"), 0, smooth=True)],
            "share of what padding to the longest sample would compute",
            _BY_PLAN,
        ),
    ]


def _waiting(run: RunMetrics) -> Chart:
    """Return seconds of an update that ranks wait: measured where ThroughputMonitor did, else estimated, else as a share by the plan."""
    title, estimate = "Waiting at barriers", Series("average rank, estimated", run.points("time/waiting_estimate"), 4, smooth=True)
    measured = [
        Series(label, run.points(name), colour, dots=True)
        for label, name, colour in (
            ("average rank", "time/waiting", 0),
            ("rank that waits most", "time/waiting_most", 1),
            ("least", "time/waiting_least", 2),
        )
    ]
    if measured[0].points:
        return Chart(
            title,
            [*measured, estimate],
            "seconds per update",
            note="measured every n-th step; what even the least waiting rank waits is the cost of meeting",
        )
    if estimate.points:
        return Chart(title, [estimate], "seconds per update", note="by the plan's workloads: one rank, or no step was measured")
    share = [(x, 1 - y) for x, y in run.points("balance/plan/efficiency")]
    return Chart(title, [Series("share of the update", share, 0, smooth=True)], "share of the update, by workloads", _BY_PLAN)


def _by_ppo() -> str:
    return "Logged by PPOModule."


def _starting(run: RunMetrics, prefix: str) -> list[str]:
    return [name for name in run.names if name.startswith(prefix)]


def _over(points: Iterable[tuple[float, float]], mean: dict[float, float]) -> list[tuple[float, float]]:
    return [(x, y / mean[x]) for x, y in points if mean.get(x)]


def _phases(run: RunMetrics) -> list[Series]:
    """Return seconds per phase and iteration; a phase that an iteration lacks counts 0."""
    iterations = run.iterations()
    numbers = [row.get("epoch", float(index)) for index, row in enumerate(iterations)]
    num_updates: dict[float, int] = {}
    for row in run.rows:
        if "time/update" in row:
            num_updates[row.get("epoch", 0.0)] = num_updates.get(row.get("epoch", 0.0), 0) + 1
    series = []
    for colour, phase in enumerate(_PHASES):
        if any(f"time/{phase}" in row for row in iterations):
            factors = [num_updates.get(row.get("epoch", 0.0), 1) if phase == "update" else 1 for row in iterations]
            values = [row.get(f"time/{phase}", 0.0) * factor for row, factor in zip(iterations, factors)]
            series.append(Series(phase.replace("_", " "), list(zip(numbers, values)), colour))
    return series


def _phase_note(run: RunMetrics) -> str:
    return "" if "time/update" in run.names else "without the updates: add ThroughputMonitor to see them"
