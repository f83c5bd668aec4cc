"""End a run that failed with one readable sentence, from one rank, below its traceback."""

import linecache
import re
import site
import sys
import time
import traceback
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from lightning_rlbatch.distributed.failure import PeerFailedError

_OWN = Path(__file__).parents[1]
_FAILED = re.compile(r"Rank (\d+) failed")


def report_failure(error: Exception, command: str) -> None:
    """Print what a run failed of, if this is the rank to do so: the first of those that failed by themselves.

    The others have nothing to add: their error is that of the first one, or says that it came. Where a rank was lost without a word, each
    of the others says so.

    Args:
        error: What this rank raised.
        command: That the user gave, for the beginning of the sentence.
    """
    rank: int = getattr(rank_zero_only, "rank", 0)
    error = _of_constructor(error)
    if isinstance(error, PeerFailedError):
        if not _FAILED.match(str(error)):
            print(f"{command}: {error}", file=sys.stderr, flush=True)
        return
    if getattr(error, "first_failed_rank", rank) != rank:
        return
    if rank > 0:
        time.sleep(1.0)  # rank 0's progress bar goes first
    print("".join(traceback.format_exception(error)), file=sys.stderr)
    print(f"{command} failed{f' on rank {rank}' * (rank > 0)}. {sentence(error)}", file=sys.stderr, flush=True)


def _of_constructor(error: Exception) -> Exception:
    """Return what a class of the configuration raised when it was made: jsonargparse lists every type that its value might have been."""
    inner: BaseException | None = error
    while inner is not None and f"{inner}".startswith("Does not validate against any of the Union subtypes"):
        inner = inner.__cause__
    frames = [] if inner is None else traceback.extract_tb(inner.__traceback__)
    is_of_a_class = bool(frames) and Path(frames[-1].filename).name != "_typehints.py"  # of jsonargparse, which found no class to make
    return inner if isinstance(inner, Exception) and is_of_a_class else error


def sentence(error: BaseException) -> str:
    """Return what went wrong, where in the user's own code, and what to do where that is known.

    Args:
        error: With its traceback.
    """
    notes = getattr(error, "__notes__", [])
    if notes:
        return str(notes[-1])
    text = f"{error}".strip() or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if frames and Path(frames[-1].filename).is_relative_to(_OWN):
        return text  # written for users
    where = place(error)
    return f"{type(error).__name__}: {text}" + (f" ({where})" if where else "")


def place(error: BaseException) -> str:
    """Return the last line of the user's own code in a traceback, in words; empty if there is none.

    Args:
        error: With its traceback.
    """
    installed = [*map(Path, site.getsitepackages()), Path(sys.base_prefix), _OWN]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in installed):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{file.name}, line {frame.lineno}: {code}"
    return ""
