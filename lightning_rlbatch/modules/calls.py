"""Call functions of the user's own: with the arguments that they take, and those that are to be awaited together."""

import asyncio
import atexit
import functools
import inspect
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def accepted(
    what: str, function: Callable[..., Any], arguments: Mapping[str, Any], named: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments that a function takes.

    Args:
        what: Names the function at the beginning of a sentence.
        function: Any callable.
        arguments: What it may take; all of them if it has ``**arguments``.
        named: What it may take besides, if it names it; ``arguments`` of the same name go first.

    Raises:
        TypeError: It needs something else.

    Example:
        >>> accepted("It", lambda a, c=0: a, {"a": 1, "b": 2})
        {'a': 1}
    """
    named = {name: value for name, value in (named or {}).items() if name not in arguments}
    parameters = inspect.signature(function).parameters
    required = [parameter for parameter in parameters.values() if parameter.default is parameter.empty]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        parameter.name
        for parameter in required
        if parameter.kind in by_keyword and parameter.name not in arguments and parameter.name not in named
    ]
    if missing:
        raise TypeError(
            f"{what} takes {', '.join(missing)}, but the prompts' rows have no such column. It may take:"
            f" {', '.join(sorted(arguments))}. Add the column to the rows, or give the argument a default."
        )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters} | {
        name: value for name, value in named.items() if name in parameters
    }


def call_together(calls: Mapping[str, Callable[[], Any]], *, what: str = "Function", items: Sequence[Any] = ()) -> dict[str, Any]:
    """Return what calls return, in their order; what is to be awaited waits together, behind the others, always in the same event loop.

    An error gets a note that says whose it is, in a sentence.

    Args:
        calls: By name.
        what: The functions are.
        items: What each was called for, to name some in a note.
    """
    returned: dict[str, Any] = {}
    try:
        for name, call in calls.items():
            with _noted(f"{what} {name!r}", items):
                returned[name] = call()
    except BaseException:
        for value in returned.values():
            if inspect.iscoroutine(value):
                value.close()  # it would complain that it was never awaited
        raise
    later = {name: _awaited(value, f"{what} {name!r}", items) for name, value in returned.items() if inspect.isawaitable(value)}
    if not later:
        return returned
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        results = _wait_for(later.values())
    else:  # a notebook runs a loop in this thread already
        with ThreadPoolExecutor(1) as executor:
            results = executor.submit(_wait_for, later.values()).result()
    return returned | dict(zip(later, results))


@contextmanager
def _noted(who: str, items: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if len(frames) > 1 else ""
        some = ", ".join(dict.fromkeys(repr(str(item)[:40]) for item in items[:40]))
        of = f", called for {len(items)} completions of {some[:160]}{'...' * (len(some) > 160)}" if items else ""
        advice = "Catch it in the function, and return None where there is no verdict."
        with suppress(Exception):  # a message that cannot be written
            error.add_note(f"{who} raised {type(error).__name__}: {error}{where}{of}. {advice}")
        raise


async def _awaited(value: Awaitable[Any], who: str, items: Sequence[Any]) -> Any:
    with _noted(who, items):
        return await value


def one_for_each(what: str, returned: Any, items: Sequence[Any], wanted: str, kind: str) -> list[Any]:
    """Return as a list what a function returned for several items.

    Args:
        what: Names the function at the beginning of a sentence.
        returned: Any iterable with an order.
        items: What it was called for.
        wanted: What it should return for each of them.
        kind: Plural of what it returns.

    Raises:
        TypeError: It returned something that has no items, or no order.
        ValueError: It returned too few or too many.
    """
    if isinstance(returned, (Mapping, Set, str)) or not isinstance(returned, Iterable):
        raise TypeError(f"{what} must return {wanted}, in order, but returned {repr(returned)[:80]}.")
    listed = list(returned)
    if len(listed) != len(items):
        raise ValueError(f"{what} returned {len(listed)} {kind} for {len(items)} completions. Return {wanted}, in order.")
    return listed


def _wait_for(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*awaitables)

    loop = _event_loop(os.getpid())
    try:
        return loop.run_until_complete(together())
    except BaseException:  # an error of one of them, or a stop of the run: the others must not go on in the next call
        loop.run_until_complete(_cancel_the_others())
        raise


async def _cancel_the_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process: semaphores and client sessions of functions belong to the loop that they were first used in."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop
