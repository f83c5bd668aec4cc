"""``rlbatch plan``: plan real lengths, and compare with no balancing and with the two-layer baseline."""

import argparse
import functools
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.lengths import read_lengths
from lightning_rlbatch.cli.plan_numbers import make_plan, measure, sweep
from lightning_rlbatch.cli.plan_tables import show_iterations, show_methods, show_sweep
from lightning_rlbatch.cli.rules_names import refuse_unknown_names
from lightning_rlbatch.cli.run_config import RunConfig, run_config
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT

METHODS: dict[str, dict[str, Any]] = {
    "before (contiguous)": {"balance": False},
    "two-layer (per_rank)": {"planner": "per_rank"},
    "ours (global)": {},
}
_SHARED_WITH_DATA = ("max_tokens_per_rank", "micro_batch_size", "mini_batch_size", "ppo_epochs", "equal_size", "oversize", "seed")
_DEFAULTS = {
    "dp": 1,
    "sp": 1,
    "equal_size": False,
    "oversize": "error",
    "coefficient": DEFAULT_COEFFICIENT,
    "padded": False,
    "ppo_epochs": 1,
}


def main(arguments: list[str]) -> int:
    """Run the subcommand.

    Args:
        arguments: After ``plan``.

    Returns:
        0, 1 if the lengths cannot be planned this way, 2 if the configuration cannot be read.
    """
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.config:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        complete(options, overrides)
        mini_batches, iterations = _mini_batches(options)
        if options.sweep:
            settings = sweep(mini_batches, options)
            _print_json({"settings": settings}) if options.json else show_sweep(settings, Console(), options)
        else:
            _compare(mini_batches, iterations, options)
    except ConfigFileError as error:
        Console(stderr=True).print(Text(str(error), style="bold red"))
        return 2
    except (ValueError, TypeError) as error:
        Console(stderr=True).print(Text(str(error), style="bold red"))
        return 1
    return 0


def _compare(mini_batches: list[list[int]], iterations: list[int], options: argparse.Namespace) -> None:
    plans = {name: [make_plan(part, options, **method) for part in mini_batches] for name, method in METHODS.items()}
    rows: list[dict[str, Any]] = [{"method": name, **measure(found)} for name, found in plans.items()]
    before, ours = plans["before (contiguous)"], plans["ours (global)"]
    per_iteration = []
    for number in dict.fromkeys(iterations):
        steps = [index for index, iteration in enumerate(iterations) if iteration == number]
        lengths = [length for index in steps for length in mini_batches[index]]
        numbers = {name: measure([found[index] for index in steps]) for name, found in (("before", before), ("planned", ours))}
        sizes = {"num_samples": len(lengths), "num_tokens": sum(lengths), "longest": max(lengths)}
        per_step = [measure([ours[index]]) for index in steps]
        per_iteration.append({"iteration": number, **sizes, **numbers, "mini_batches": per_step})
    if options.json:
        total = {"num_samples": sum(map(len, mini_batches)), "num_tokens": sum(map(sum, mini_batches))}
        _print_json(total | {"methods": rows} | ({"iterations": per_iteration} if iterations else {}))
    else:
        console = Console()
        show_methods(rows, ours, mini_batches, console)
        show_iterations(per_iteration, console)
    if options.picture:
        from lightning_rlbatch.callbacks.pictures import batch_plan_picture

        batch_plan_picture(ours[0], options.picture)
        Console(stderr=True).print(Text(f"Wrote {options.picture}" + (" (the first mini-batch)." if len(mini_batches) > 1 else ".")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlbatch plan",
        description="Plan real sample lengths over ranks and micro-steps. With --config, what is not given here is the run's.",
    )
    add = parser.add_argument
    add("lengths", nargs="?", help="JSONL of numbers or objects with a length, or plain numbers")
    add("--field", help="field of the objects that holds the length")
    add("--from-rollouts", metavar="DIR", help="rollouts in place of lengths: folder of RolloutRecorder, RolloutLogger, or a JSONL dump")
    add("--iteration", type=int, action="append", help="take only this iteration of the rollouts; may be repeated")
    add("--tokenizer", help="counts the tokens of texts in a JSONL dump: folder, hub name or import path")
    add("-c", "--config", action="append", default=[], help="configuration of a run; overrides are written as for fit")
    add("--dp", type=int, help="data-parallel ranks (default 1)")
    add("--sp", type=int, help="sequence-parallel size (default 1)")
    add("--max-tokens-per-rank", type=int, help="token budget of one GPU")
    add("--micro-batch-size", type=int, help="samples per micro-batch instead of a budget")
    add("--mini-batch-size", type=int, help="prompts of one optimizer step with --from-rollouts, else samples in the file's order"
        " (default: all; with --config its mini_batch_size x rollouts_per_prompt)")  # fmt: skip
    add("--ppo-epochs", type=int, help="passes over an iteration's rollouts, with --from-rollouts (default 1)")
    add("--seed", type=int, help="of mini-batch membership, with --from-rollouts (default: the recorded one, else 0)")
    add("--equal-size", action="store_true", default=None, help="as many samples on every rank, plus or minus one")
    add("--oversize", choices=("error", "isolate"), help="what to do with a sample above the budget (default error)")
    add("--coefficient", type=int, help=f"linear cost of a token (default {DEFAULT_COEFFICIENT})")
    add("--padded", action="store_true", default=None, help="micro-batches are padded to their longest sample")
    add("--sweep", action="store_true", help="try budgets and sequence-parallel sizes on the same dp x sp GPUs")
    add("--picture", metavar="FILE", help="draw the first mini-batch, before and after: .png, .svg, .pdf or .html")
    add("--json", action="store_true", help="print JSON")
    return parser


def complete(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Fill in what the command line leaves open, from the run's configuration if there is one, else with the defaults.

    Args:
        options: As parsed; changed in place.
        overrides: Overrides of the configuration.
    """
    if (options.lengths is None) == (options.from_rollouts is None):
        raise ValueError("Pass a file of lengths, or --from-rollouts DIR: exactly one of the two.")
    if options.from_rollouts is None:
        for name in ("iteration", "tokenizer", "ppo_epochs", "seed"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --from-rollouts. Drop it.")
    elif options.field is not None:
        raise ValueError("--field names a field of a file of lengths. Drop it with --from-rollouts.")
    known: dict[str, Any] = {}
    if options.config:
        files = [part for path in options.config for part in ("--config", path)]
        config = read_config([*files, *overrides])
        run = run_config(config)
        refuse_unknown_names(run)
        known = _of_run(run)
        if options.from_rollouts is None and run.kind == "rollouts":  # the lengths are those of samples
            known["mini_batch_size"] = samples_per_mini_batch(run)
        elif options.from_rollouts is None and run.kind == "replay" and options.mini_batch_size is None:
            raise ValueError(
                "mini_batch_size of a replay counts prompts, and a file of lengths has samples. Pass --mini-batch-size, in samples."
            )
        if known["seed"] is None and isinstance(config.get("seed_everything"), int):
            known["seed"] = config["seed_everything"]
    # A cap on the command line replaces the configuration's, whichever of the two that sets.
    if options.max_tokens_per_rank is not None or options.micro_batch_size is not None:
        known = {name: value for name, value in known.items() if name not in ("max_tokens_per_rank", "micro_batch_size")}
    for name, value in {**_DEFAULTS, **{name: value for name, value in known.items() if value is not None}}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _of_run(run: RunConfig) -> dict[str, Any]:
    if run.world_size is None:
        raise ConfigFileError("The number of ranks depends on the machine. Set trainer.devices, for example --trainer.devices=8.")
    return {
        **{name: run.data.get(name) for name in _SHARED_WITH_DATA},
        "dp": max(1, run.world_size // run.sp_size),
        "sp": run.sp_size,
        "coefficient": run.data.get("workload_coefficient"),
        "padded": run.model.get("remove_padding") is False,
        "tokenizer": run.data.get("tokenizer"),
    }


def samples_per_mini_batch(run: RunConfig) -> int | None:
    """Return the samples of an optimizer step: ``mini_batch_size`` prompts with all of their rollouts.

    Args:
        run: A configuration that samples rollouts.
    """
    prompts, group = run.data.number("mini_batch_size"), run.data.number("rollouts_per_prompt")
    return None if prompts is None or group is None else prompts * group


def _mini_batches(options: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Return the lengths of each mini-batch, and which iteration each belongs to (nothing for a file of lengths)."""
    size = options.mini_batch_size
    if size is not None and size < 1:
        raise ValueError(f"--mini-batch-size must be at least 1 but is {size}.")
    if options.from_rollouts is None:
        lengths = read_lengths(options.lengths, options.field)
        step = size or len(lengths)
        return [lengths[start : start + step] for start in range(0, len(lengths), step)], []
    from lightning_rlbatch.cli.rollout_lengths import read_iterations

    found = read_iterations(options.from_rollouts, _tokenizer_maker(options.tokenizer))
    if options.iteration is not None:
        missing = sorted(set(options.iteration) - {iteration.number for iteration in found})
        if missing:
            there = ", ".join(str(iteration.number) for iteration in found)
            raise ValueError(f"{options.from_rollouts} has no iteration {missing[0]}; it has {there}.")
        found = [iteration for iteration in found if iteration.number in options.iteration]
    steps = [
        (part, iteration.number)
        for iteration in found
        for part in iteration.mini_batches(size, ppo_epochs=options.ppo_epochs, seed=options.seed)
    ]
    if not steps:
        raise ValueError(f"{options.from_rollouts} has no rollout with a reward.")
    return [part for part, _ in steps], [number for _, number in steps]


def _tokenizer_maker(source: Any) -> Any:
    """Return what makes the tokenizer when it is first asked for; None without one."""

    @functools.cache
    def make() -> Any:
        from lightning_rlbatch.cli.made import callable_of
        from lightning_rlbatch.data.prompt_reading import load_tokenizer

        return load_tokenizer(callable_of(source, "tokenizer") if isinstance(source, dict) else source)

    return None if source is None else make


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))
