"""``rlbatch verify``: check on the configured policy that packing, padding and sequence parallelism change no number."""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.made import build_policy
from lightning_rlbatch.cli.rules_names import refuse_unknown_names
from lightning_rlbatch.cli.run_config import RunConfig, run_config

if TYPE_CHECKING:
    from lightning_rlbatch.testing.parity import ParityReport

MOST_RANKS = 8  # to fork on one machine: each computes in one thread
ADVICE = {
    "padded": "Does the model use its attention mask, and its position_ids?",
    "packed": "Set remove_padding: false to train it padded.",
    "ranks": "Set sequence_parallel_size: 1, or remove_padding: false if `packed` differs too.",
}


def main(arguments: list[str]) -> int:
    """Run the subcommand.

    Args:
        arguments: After ``verify``.

    Returns:
        0, 1 if a layout differs beyond the tolerance or cannot run, 2 if the configuration cannot be read or has no policy.
    """
    options, overrides = _parser().parse_known_args(arguments)
    errors = Console(stderr=True)
    try:
        files = [part for path in options.config for part in ("--config", path)]
        run = run_config(read_config([*files, *overrides]))
        refuse_unknown_names(run)
        if run.model.get("policy") is None:
            raise ConfigFileError("The configuration has no model.init_args.policy to verify.")
        report, layout = verify(run, options)
    except ConfigFileError as error:
        errors.print(Text(str(error), style="bold red"))
        return 2
    except (ValueError, RuntimeError, AssertionError) as error:  # a layout that cannot run at all
        errors.print(Text(str(error), style="bold red"))
        return 1
    if options.json:
        print(json.dumps(report_json(report) | {"tested": layout.tested, "not_tested": list(layout.left_out)}, indent=2))
    else:
        show(report, Console())
        Console().print(Text(layout.sentence, style="dim"))
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlbatch verify",
        description="Compare log-probs, entropies and gradients of the configured policy: each sample alone, padded, packed, and shared by"
        " sequence-parallel ranks, on the CPU. Overrides are written as for fit. In float64, where rounding cannot be mistaken for a"
        " fault.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], help="configuration file; several are merged")
    parser.add_argument("--sp", type=_ranks, help="sequence-parallel size (default: the configuration's, as far as this machine goes)")
    parser.add_argument("--dp", type=_ranks, help="data-parallel ranks (default: the configuration's, as far as this machine goes)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="float32 halves the memory (default float64)")
    parser.add_argument("--lengths", default="13,1,6,2,9", help="tokens of the random samples (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.add_argument(
        "--tolerance", type=float, help="largest relative error (default 1e-5; in float32 that or 5 x the measured rounding)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the ranks may take")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks is at least 1, not {text}")
    return int(text)


@dataclass(frozen=True)
class Layout:
    """What is compared with each sample alone, beside padding.

    Attributes:
        dp: Data-parallel ranks.
        sp: Sequence-parallel size.
        packed: Whether samples are packed; without it no ranks share them.
        left_out: What the run has and the comparison has not.
    """

    dp: int
    sp: int
    packed: bool
    left_out: tuple[str, ...]

    @property
    def tested(self) -> str:
        """What was compared, in words."""
        ranks = f" and on {self.dp * self.sp} CPU ranks (dp={self.dp}, sp={self.sp})" if self.dp * self.sp > 1 and self.packed else ""
        return f"padded{', packed' * self.packed}{ranks}"

    @property
    def sentence(self) -> str:
        """What was tested, and what was not, in a line."""
        return f"Tested: {self.tested}. Not tested: {'; '.join(self.left_out)}."


def layout_of(run: RunConfig, *, dp: int | None, sp: int | None, size: int) -> Layout:
    """Return the configuration's own layout, as far as this machine can fork it.

    Args:
        run: The configuration.
        dp: Data-parallel ranks that were asked for; None for the run's.
        sp: Sequence-parallel size that was asked for; None for the run's.
        size: Bytes of the model's parameters, of which each rank holds gradients.
    """
    packed = run.model.get("remove_padding") is not False
    left_out = ["kernels and precision of a GPU"] if run.trainer.get("accelerator") != "cpu" else []
    most = max(2, min(MOST_RANKS, _free_memory() // (3 * size + 1)))
    world = run.world_size
    wanted_dp = None if world is None else max(1, world // run.sp_size)
    tested_sp = sp if sp is not None else run.sp_size if run.sp_size <= most else 1
    if not packed:
        tested_dp = 1
        if world != 1:
            left_out.append("ranks, since remove_padding is false")
    elif dp is not None:
        tested_dp = dp
    else:
        tested_dp = max(1, min(wanted_dp or 1, most // tested_sp))
    if tested_sp < run.sp_size:
        left_out.append(f"sequence_parallel_size={run.sp_size} (this machine can fork {most} ranks; --sp {run.sp_size} tries)")
    if packed and wanted_dp is None:
        left_out.append("data-parallel ranks, whose number depends on the machine (--dp 2)")
    elif packed and wanted_dp is not None and tested_dp < wanted_dp:
        left_out.append(f"more than {tested_dp} of the run's {wanted_dp} data-parallel ranks")
    if run.sharded and (world is None or world > 1):
        left_out.append("the gathering of parameters by FSDP, which changes no number")
    return Layout(tested_dp, tested_sp, packed, tuple(left_out) or ("nothing of this configuration",))


def _free_memory() -> int:
    """Return the bytes of memory that are free, or a guess where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


def verify(run: RunConfig, options: argparse.Namespace) -> tuple["ParityReport", Layout]:
    """Run the comparison on the CPU, with forked ranks.

    Args:
        run: The configuration.
        options: As parsed.

    Returns:
        The comparison, and what it covers.

    Raises:
        ValueError: The lengths are no numbers, or the model cannot be run in one of the layouts.
    """
    import torch

    from lightning_rlbatch.testing.parity import compare_layouts, random_batch

    if not all(part.strip().isdigit() for part in options.lengths.split(",")):
        raise ValueError(f"--lengths must be whole numbers with commas between them but is {options.lengths!r}.")
    torch.set_num_threads(1)  # before the first computation: forked ranks of a multi-threaded parent hang in OpenMP
    model = build_policy(run.model.get("policy"))
    if options.dtype == "float64":
        cast(Any, model).double()
    temperature = run.model.get("temperature", 1.0)
    batch = random_batch(model.config.get_text_config().vocab_size, [int(part) for part in options.lengths.split(",")], options.seed)
    number = sum(parameter.numel() for parameter in model.parameters())
    print(f"Verifying {type(model).__name__}, {number:,} parameters in {options.dtype} ...", file=sys.stderr)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    layout = layout_of(run, dp=options.dp, sp=options.sp, size=size)
    report = compare_layouts(
        model,
        batch,
        layout.sp,
        dp_size=layout.dp,
        temperature=float(temperature),
        tolerance=options.tolerance,
        timeout=options.timeout,
        remove_padding=layout.packed,
    )
    return report, layout


def report_json(report: "ParityReport") -> dict[str, Any]:
    """Return a report as JSON-ready data.

    Args:
        report: Of the comparison.
    """
    names = ("layout", "log_probs", "entropy", "gradient", "parameter", "norm", "worst")
    rows = [{name: getattr(row, name) for name in names} | {"passed": report.passes(row)} for row in report.rows]
    rounding = None if report.rounding is None else {name: getattr(report.rounding, name) for name in names[1:]}
    return {
        "passed": report.passed,
        "tolerance": dict(zip(("scores", "gradients"), report.limits)),
        "rounding": rounding,
        "layouts": rows,
    }


def show(report: "ParityReport", console: Console) -> None:
    """Print a report: the table, then what it means.

    Args:
        report: Of the comparison.
        console: Where.
    """
    table = Table(title="Largest relative difference from each sample run alone", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for name in ("log-probs", "entropy", "gradient", "grad norm", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        good = report.passes(row)
        verdict = Text("same" if good else "DIFFERS", style="green" if good else "bold red")
        numbers = [f"{value:.1e}" for value in (row.log_probs, row.entropy, row.gradient, row.norm)]
        table.add_row(row.layout, *numbers, verdict)
    console.print(table)
    wrong = [row for row in report.rows if not report.passes(row)]
    if not wrong:
        worst = max(row.worst for row in report.rows)
        text = (
            f"This model may be trained in any of these layouts: they give the same log-probs, entropies and gradients (largest relative"
            f" difference {worst:.0e}, which is rounding). {report.explanation}"
        )
        console.print(Text(text, style="green"))
    for row in wrong:
        text = (
            f"{row.layout}: differs by up to {row.worst:.1e}, most in the gradient of {row.parameter}. Do not train this model in this"
            f" layout: its gradients would be wrong. {ADVICE.get(row.layout, ADVICE['ranks'])}"
        )
        console.print(Text(text, style="bold red"))
