"""Commands whose output somebody stops reading, as ``rlbatch explain --json | head`` does."""

import functools
import os
import sys
from collections.abc import Callable

CLOSED_PIPE = 141
"""Exit code of a command whose reader went away, as shells report it (128 + SIGPIPE)."""


def until_closed(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Make a subcommand end quietly when nobody reads its output any more.

    Args:
        command: Takes arguments, returns an exit code.
    """

    @functools.wraps(command)
    def run(arguments: list[str]) -> int:
        try:
            code = command(arguments)
            sys.stdout.flush()  # here and not at exit, where Python would print the error
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has somewhere to go
            return CLOSED_PIPE
        return code

    return run
