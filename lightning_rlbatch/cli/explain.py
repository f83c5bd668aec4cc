"""``rlbatch explain``: say what a configuration does to batches, without a GPU, a model or a launch."""

import argparse
import json

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.digest import label, layers, memory_line, options_in_effect, size_lines, summary
from lightning_rlbatch.cli.explanation import Explanation, explain
from lightning_rlbatch.cli.memory import describe
from lightning_rlbatch.cli.model_facts import build_facts
from lightning_rlbatch.cli.numbers import binary_size
from lightning_rlbatch.cli.pretrained_names import hub_is_offline
from lightning_rlbatch.cli.run_config import run_config

_COLOURS = {"in effect": "green", "off": "dim", "without effect": "yellow", "refused": "bold red", "note": "cyan"}


def main(arguments: list[str]) -> int:
    """Run the subcommand.

    Args:
        arguments: After ``explain``.

    Returns:
        0, 1 if the configuration would be refused, 2 if it cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="rlbatch explain",
        description="Print what a configuration does to batches. Overrides are written as for fit: --data.init_args.mini_batch_size=8",
    )
    parser.add_argument("-c", "--config", action="append", default=[], help="configuration file; several are merged")
    parser.add_argument("--world-size", type=int, help="number of ranks; default: devices x num_nodes")
    parser.add_argument("--details", "-v", action="store_true", help="print every number, every option, and the parts of the memory")
    parser.add_argument("--build", action="store_true", help="make the policy, without weights, to estimate memory; imports its module")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, overrides = parser.parse_known_args(arguments)
    if options.world_size is not None and options.world_size < 1:
        parser.error(f"--world-size must be at least 1 but is {options.world_size}")
    try:
        files = [part for path in options.config for part in ("--config", path)]
        run = run_config(read_config([*files, *overrides]), options.world_size)
        explanation = explain(run, build_facts(run.model.get("policy")) if options.build else None, offline=hub_is_offline())
    except ConfigFileError as error:
        Console(stderr=True).print(Text(str(error), style="bold red"))
        return 2
    if options.json:
        print(json.dumps(explanation.to_json(), indent=2))
    else:
        show(explanation, Console(), details=options.details)
    return 1 if explanation.refused else 0


def show(explanation: Explanation, console: Console, *, details: bool = False) -> None:
    """Print an explanation: the answer first, then mistakes, then sizes.

    Args:
        explanation: What to print.
        console: Where.
        details: Print every derived number, every option and the parts of the memory too.
    """
    run = explanation.run
    ranks = f"{explanation.world_size} rank" + "s" * (explanation.world_size > 1)
    console.print(Text(f"{run.model.name or '?'} with {run.data.name or '?'} on {ranks}", style="bold"))
    console.print(Text(summary(explanation)))
    console.print()
    if explanation.refused:
        console.print(Text("This configuration would be refused.", style="bold red"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in explanation.findings:
        about = f"{label(finding)}: " if finding.level == "without effect" else ""
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), Text(about + finding.text))
    if explanation.findings:
        table.add_row("", "")
    for name, line in size_lines(explanation):
        table.add_row(Text(name, style="bold cyan"), Text(line))
    if explanation.sizes is None:
        table.add_row(Text("sizes", style="bold cyan"), Text("cannot be derived before what is refused is corrected"))
    table.add_row(Text("memory", style="bold cyan"), Text(memory_line(explanation)))
    table.add_row(Text("in effect", style=_COLOURS["in effect"]), Text(options_in_effect(explanation) or "no option of cutting is set"))
    console.print(table)
    if not details:
        console.print(Text("--details: every number, every option with its state and reason, the parts of the memory.", style="dim"))
        return
    console.print()
    console.print(_layers(explanation))
    console.print(_options(explanation))
    if explanation.memory is not None:
        console.print(_memory(explanation))
        for text in explanation.memory.notes:
            console.print(Text(text, style="dim"))


def _layers(explanation: Explanation) -> Tree:
    root = node = Tree("sizes" if explanation.sizes is not None else "sizes: cannot be derived, see below")
    for layer, numbers in ({} if explanation.sizes is None else layers(explanation.sizes)).items():
        node = node.add(Text(layer, style="bold cyan"))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        for name, number in numbers.items():
            table.add_row(name, Text(number, style="bold"))
        node.add(table)
    return root


def _options(explanation: Explanation) -> Table:
    table = Table(title="Options (dim: default)", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("option", "value", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("phase: what it does, or why not")
    for option in explanation.options:
        value = "-" if option.value is None else json.dumps(option.value)
        state = Text(option.state, style=_COLOURS[option.state])
        table.add_row(option.option, Text(value, style="" if option.given else "dim"), state, Text(f"{option.phase}: {option.why}"))
    return table


def _memory(explanation: Explanation) -> Table:
    memory = explanation.memory
    assert memory is not None
    source = {"files": "counted in the weight files", "config": "from config.json", "model": "counted in the model"}[memory.counted]
    table = Table(
        title=f"Memory of one rank ({memory.num_parameters:,} parameters, {source})", title_justify="left", box=box.SIMPLE, pad_edge=False
    )
    table.add_column("what")
    table.add_column("size", justify="right")
    for part in memory.parts:
        table.add_row(describe(part), binary_size(part.size))
    if not memory.bounded:
        table.add_row("activations: the configuration does not bound the tokens of a micro-batch", "not bounded")
    table.add_section()
    table.add_row("peak of an update on the device (without key/value cache and communication buffers)", binary_size(memory.total))
    return table
