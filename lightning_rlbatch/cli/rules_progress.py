"""Rules about where a run stops, what cuts an iteration, and when it validates: Lightning's options in terms of mini-batches."""

import math
from dataclasses import dataclass
from typing import Any

from lightning_rlbatch.cli.findings import Findings, note, refused, without_effect
from lightning_rlbatch.cli.prompt_files import count_rows
from lightning_rlbatch.cli.run_config import RunConfig

_SET_BY_FAST_DEV_RUN = (
    "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch",
    "num_sanity_val_steps",
)  # fmt: skip
_OF_VALIDATION = ("limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps")
_LIMITS = ("limit_train_batches", "limit_val_batches", "val_check_interval", "overfit_batches")
LIGHTNINGS_EPOCHS = 1000  # where neither max_epochs nor max_steps is set


@dataclass(frozen=True)
class Progress:
    """How far a run goes.

    Attributes:
        whole: Mini-batches of an iteration.
        taken: Of them, those that the Trainer takes.
    """

    whole: int
    taken: int


def check_progress(run: RunConfig) -> Findings:
    """Find what cuts iterations or the run, and validation that never comes.

    Args:
        run: The configuration.
    """
    trainer = run.trainer
    wrong = [name for name in _LIMITS if not _is_limit(trainer.get(name))]
    for name in wrong:
        yield refused(name, text=f"trainer.{name}={trainer.get(name)} must be a share of 0.0 to 1.0, or a whole number of mini-batches.")
    for name, least in (("max_steps", -1), ("max_epochs", -1), ("num_sanity_val_steps", -1), ("fast_dev_run", 0)):
        value = trainer.get(name)
        if isinstance(value, int) and value < least:
            wrong.append(name)
            yield refused(name, text=f"trainer.{name}={value} must be at least {least}.")
    if wrong:
        return
    if trainer.get("fast_dev_run"):
        yield from _check_fast_dev_run(run)
        return
    progress = None
    whole = mini_batches_of_an_iteration(run)
    overfits = bool(trainer.get("overfit_batches"))
    if overfits:
        for name in ("limit_train_batches", "limit_val_batches"):
            if trainer.get(name) is not None:
                yield without_effect(name, "overfit_batches takes its place.")
    if whole is not None:
        name = "overfit_batches" if overfits else "limit_train_batches"
        taken = taken_of(trainer.get(name), whole)
        progress = Progress(whole, taken) if taken else None
        yield from _check_cut(name, trainer.get(name), whole, taken)
    yield from _check_end(run, progress)
    yield from _check_validation(run, progress)
    if run.kind == "rollouts" and progress is not None:
        yield from _check_logging(run, progress.taken)


def mini_batches_of_an_iteration(run: RunConfig) -> int | None:
    """Return the optimizer steps of an iteration; None if they depend on data that is not read here.

    Args:
        run: The configuration.
    """
    prompts, mini, epochs = (run.data.number(name) for name in ("train_batch_size", "mini_batch_size", "ppo_epochs"))
    if run.kind != "rollouts" or prompts is None or mini is None or epochs is None:
        return None
    return -(-prompts // mini) * epochs


def taken_of(limit: Any, whole: int) -> int:
    """Return how many of a number of batches Lightning takes under a limit.

    Args:
        limit: Of the Trainer: a number, a share of 0.0 to 1.0, or None for all.
        whole: All of them.
    """
    if limit is None:
        return whole
    return min(whole, int(limit)) if isinstance(limit, int) or limit > 1 else int(whole * limit)


def _is_limit(value: Any) -> bool:
    if value is None or not isinstance(value, int | float):
        return True  # of another type, as another rule says
    return 0 <= value <= 1 or (value > 1 and value % 1 == 0)


def _check_fast_dev_run(run: RunConfig) -> Findings:
    number = int(run.trainer.get("fast_dev_run"))
    whole = mini_batches_of_an_iteration(run)
    of = "" if whole is None else f" of the {whole}"
    yield note(
        "fast_dev_run",
        text=f"fast_dev_run={run.trainer.get('fast_dev_run')} trains on {number}{of} mini-batch(es) of one iteration, validates as many"
        " steps, and writes neither logs nor checkpoints.",
    )
    for name in _SET_BY_FAST_DEV_RUN:
        if run.trainer.changed(name):
            yield without_effect(name, "fast_dev_run sets it.")


def _check_cut(name: str, limit: Any, whole: int, taken: int) -> Findings:
    if limit is None:
        return
    if not taken and limit:
        yield refused(
            name, text=f"trainer.{name}={limit} of {whole} mini-batches of an iteration is less than one. Use a whole number, or"
            f" {1 / whole:.2g} at least."
        )  # fmt: skip
    elif not taken:
        yield note(name, text=f"trainer.{name}=0: nothing is trained. Is that meant?")
    elif taken < whole:
        yield note(
            name,
            text=f"trainer.{name}={limit} cuts every iteration: it takes {taken} of {whole} mini-batches (train_batch_size /"
            " mini_batch_size x ppo_epochs). Prompts of the others are not rolled out.",
        )
    elif limit != 1.0 or isinstance(limit, int):
        yield without_effect(name, f"an iteration has {whole} mini-batches in all.")


def _check_end(run: RunConfig, progress: Progress | None) -> Findings:
    epochs, steps = run.trainer.get("max_epochs"), run.trainer.get("max_steps", -1)
    unit = "epochs" if run.kind == "samples" else "iterations"
    if epochs == 0 or steps == 0:
        yield note(
            "max_epochs" if epochs == 0 else "max_steps", text="Nothing is trained: the run ends before its first step. Is that meant?"
        )
        return
    if epochs is None and steps == -1 and run.trainer.get("max_time") is None:
        yield note("max_epochs", text=f"Neither max_epochs nor max_steps is set: Lightning stops after {LIGHTNINGS_EPOCHS} {unit}.")
    if progress is None or steps == -1:
        return
    of_epochs = epochs * progress.taken if isinstance(epochs, int) and epochs > 0 else None
    product = f"{epochs} iterations of {progress.taken} mini-batches"
    if of_epochs is not None and steps >= of_epochs:
        yield without_effect("max_steps", f"the run ends before: max_epochs={product} are {of_epochs} optimizer steps.")
        return
    iteration, rest = -(-steps // progress.taken), steps % progress.taken
    if of_epochs is not None:
        yield without_effect(
            "max_epochs", f"max_steps={steps} ends the run before, in iteration {iteration} (of {progress.taken} mini-batches)."
        )
    if rest:
        yield note(
            "max_steps",
            text=f"max_steps={steps} ends iteration {iteration} after {rest} of its {progress.taken} mini-batches: the other rollouts are"
            f" sampled and not trained on. A multiple of {progress.taken} ends between iterations.",
        )


def _check_validation(run: RunConfig, progress: Progress | None) -> Findings:
    trainer, option = run.trainer, "val_dataset" if run.kind == "samples" else "val_prompts"
    if not run.data.has(option):
        return
    if run.data.get(option) is None:
        for name in _OF_VALIDATION:
            if trainer.changed(name) and trainer.get(name) not in (0, None):
                yield without_effect(name, f"there are no {option}. Set them, or drop it.")
        return
    limit = trainer.get("overfit_batches") or trainer.get("limit_val_batches")
    if limit == 0:
        for section, name in ((run.data, option), *((trainer, name) for name in _OF_VALIDATION[1:])):
            if section.changed(name) and section.get(name) not in (0, None):
                yield without_effect(name, "limit_val_batches=0 switches validation off.")
        return
    steps = _validation_steps(run)
    if steps is not None and limit is not None and not taken_of(limit, steps):
        yield refused(
            "limit_val_batches",
            text=f"trainer.limit_val_batches={limit} of {steps} validation step(s) is less than one. Use a whole number, or set"
            " val_batch_size: without it all val_prompts are one step.",
        )
    elif steps is not None and isinstance(trainer.get("limit_val_batches"), int) and limit is not None and limit >= steps:
        yield without_effect("limit_val_batches", f"validation has {steps} step(s) in all.")
    yield from _check_intervals(run, progress)


def _check_intervals(run: RunConfig, progress: Progress | None) -> Findings:
    interval, every = run.trainer.get("val_check_interval"), run.trainer.get("check_val_every_n_epoch", 1)
    epochs = run.trainer.get("max_epochs")
    if isinstance(every, int) and isinstance(epochs, int) and 0 < epochs < every:
        yield without_effect(
            "check_val_every_n_epoch", f"the run has {epochs} iterations, and the first validation would come after {every}. Lower it."
        )
    if not isinstance(interval, int | float) or progress is None:
        return
    if isinstance(interval, int) and every is None:
        yield note(
            "val_check_interval", text=f"The run validates every {interval} mini-batches, an iteration has {progress.taken} of them."
        )
    elif isinstance(interval, int) and interval > progress.taken:
        yield refused(
            "val_check_interval",
            text=f"trainer.val_check_interval={interval} mini-batches are more than an iteration has, {progress.taken}. Set"
            " check_val_every_n_epoch to validate every so many iterations, or to null to count mini-batches across iterations.",
        )
    elif (count := interval if isinstance(interval, int) else max(1, int(progress.taken * interval))) < progress.taken:
        yield note(
            "val_check_interval", text=f"The run validates inside iterations, after every {count} of their {progress.taken} mini-batches."
        )


def _validation_steps(run: RunConfig) -> int | None:
    if run.kind != "rollouts":
        return None
    size, rows = run.data.number("val_batch_size"), count_rows(run.data.get("val_prompts"))
    if size is None:
        return 1
    return None if rows is None else -(-rows // size)


def _check_logging(run: RunConfig, taken: int) -> Findings:
    every = run.trainer.get("log_every_n_steps")
    every = 50 if every is None else every
    if not isinstance(every, int) or every < 2 or run.trainer.get("logger") is False:
        return
    seen = "never reach the logger" if math.gcd(every, taken) > 1 else f"reach the logger in one of {every} iterations"
    yield note(
        "log_every_n_steps",
        text=f"log_every_n_steps={every}: metrics of rollouts (reward, length, kl) come with the first of the {taken} optimizer steps of an"
        f" iteration, so that they {seen}. Set it to 1.",
    )
