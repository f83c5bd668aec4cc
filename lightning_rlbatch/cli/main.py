"""The ``rlbatch`` command: each subcommand loads only what it needs."""

import importlib
import os
import sys

from lightning_rlbatch.cli.config_file import SUBCOMMANDS, ConfigFileError, read_config, refuse_missing_files
from lightning_rlbatch.cli.explanation import check
from lightning_rlbatch.cli.pipes import until_closed
from lightning_rlbatch.cli.pretrained_names import hub_is_offline
from lightning_rlbatch.cli.run_config import run_config

USAGE = """usage: rlbatch COMMAND [options]

  fit       train: rlbatch fit --config run.yaml
  validate  roll out and reward the validation prompts
  predict   write completions of the validation prompts as JSON lines
  explain   sizes, options in effect, memory and mistakes of a configuration, without a GPU and without loading anything
  verify    is the gradient the same padded, packed, sharded?
  plan      cut real lengths into micro-batches, and compare methods
  report    one HTML page with the plots of a run
  export    write the policy of a checkpoint as a transformers folder

`rlbatch COMMAND --help` has the options of each."""

_OWN = {"explain": "explain", "export": "export", "plan": "plan_command", "verify": "verify", "report": "report"}
_NOT_A_RUN = {"-h", "--help", "--print_config", "--print_shtab"}


def main(args: list[str] | None = None) -> None:
    """Run ``rlbatch fit|validate|predict|explain|export|plan|verify|report ...``.

    Args:
        args: Command line without the program's name; None reads ``sys.argv``.

    Raises:
        SystemExit: With the exit code of the subcommand, if that is not 0; 1 for a configuration that is refused.
    """
    # Like `python -m`: configurations name the user's own modules, which lie in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    arguments = sys.argv[1:] if args is None else args
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] not in (*_OWN, *SUBCOMMANDS) and not arguments[0].startswith("-"):
        print(f"There is no command {arguments[0]!r}.\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    if arguments[0] in _OWN:
        command = importlib.import_module(f"lightning_rlbatch.cli.{_OWN[arguments[0]]}")
        code = until_closed(command.main)(arguments[1:])
        if code:
            raise SystemExit(code)
        return
    try:
        refuse_missing_files(arguments)
        if arguments[0] in SUBCOMMANDS and not any(map(_only_asks, arguments)) and not _reads_environment():
            _refuse_before_loading(arguments[1:])
    except ConfigFileError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    importlib.import_module("lightning_rlbatch.cli.lightning_cli").run(args)


def _only_asks(argument: str) -> bool:
    """Whether an argument makes LightningCLI print something instead of running (``--help``, ``--model.help``, ``--print_config``)."""
    name = argument.partition("=")[0]
    return name in _NOT_A_RUN or (name.startswith("--") and name.endswith(".help"))


def _reads_environment() -> bool:
    """Whether LightningCLI takes options from environment variables too, which only it can name."""
    return os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() == "true"


def _refuse_before_loading(arguments: list[str]) -> None:
    """Report all errors of a configuration at once, before a class is imported or a model loaded."""
    findings = check(run_config(read_config(arguments)), offline=hub_is_offline())
    errors = [finding.text for finding in findings if finding.level == "refused"]
    if errors:
        print(
            f"The configuration has {len(errors)} error{'s' * (len(errors) > 1)}:",
            *(f"  - {text}" for text in errors),
            sep="\n",
            file=sys.stderr,
        )
        print("`rlbatch explain` with the same arguments shows what each option does.", file=sys.stderr)
        raise SystemExit(1)
    ignored = [f"{finding.options[0]}: {finding.text}" for finding in findings if finding.level == "without effect"]
    doubtful = [finding.text for finding in findings if finding.level == "note" and finding.text.endswith("?")]
    if ignored or doubtful:
        from lightning.pytorch.utilities import rank_zero_warn

        rank_zero_warn(" | ".join([*(["Options without effect: " + " | ".join(ignored)] if ignored else []), *doubtful]))


if __name__ == "__main__":
    main()
