"""Read the options of a class from its source text: no import, so that neither torch nor a user's module is executed."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_rlbatch.cli.definitions import definition, statement_of
from lightning_rlbatch.cli.module_sources import module_source

REQUIRED = object()
"""Default of an option that has none."""

UNKNOWN = object()
"""Default that is an expression, such as ``GRPO()``."""


_HOMES_OF_PARTS = ("functional", "rollout", "callbacks", "modules.correction")


@dataclass(frozen=True)
class Option:
    """One argument of a constructor.

    Attributes:
        name: Of the argument.
        default: Literal value, ``REQUIRED`` or ``UNKNOWN``.
        annotation: Type as written, for example ``int | None``; empty if there is none.
        module: In which that is written.
    """

    name: str
    default: Any
    annotation: str
    module: str


@dataclass(frozen=True)
class ClassSource:
    """What is known of a class from its text.

    Attributes:
        path: Canonical import path.
        ancestors: Names (without modules) of itself and of all bases that were found.
        options: Arguments of its constructor by name; None if they depend on a class whose source is not there.
    """

    path: str
    ancestors: frozenset[str]
    options: dict[str, Option] | None


def class_source(path: str) -> ClassSource | None:
    """Find a class.

    Args:
        path: Import path, such as ``lightning_rlbatch.PPOModule``, or the bare name of one of this package's public classes.

    Returns:
        None if there is no such class, or its source cannot be found.
    """
    if "." not in path:
        path = f"lightning_rlbatch.{path}"
    module, _, name = path.rpartition(".")
    return _class_named(module, name)


def part_source(path: str) -> ClassSource | None:
    """Find a class that an option holds: by its import path, or one of this package's by its name alone.

    Args:
        path: Such as ``torch.optim.AdamW`` or ``GSPO``.

    Returns:
        None if there is no such class, or its source cannot be found.
    """
    if "." in path:
        return class_source(path)
    return next(filter(None, (class_source(f"lightning_rlbatch.{home}.{path}") for home in _HOMES_OF_PARTS)), None)


def _class_named(module: str, name: str) -> ClassSource | None:
    found = statement_of(module, name)
    return None if found is None or not isinstance(found[1], ast.ClassDef) else _describe(found[0].module, found[1])


@functools.cache  # a node stands for the text of its file in one state
def _describe(module: str, node: ast.ClassDef) -> ClassSource:
    bases = [base for base in (_base(module, expression) for expression in node.bases) if base is not None]
    ancestors = frozenset([node.name]).union(*(base.ancestors for base in bases))
    return ClassSource(f"{module}.{node.name}", ancestors, _options(module, node, bases))


def _base(module: str, expression: ast.expr) -> ClassSource | None:
    name = ast.unparse(expression).partition("[")[0]
    alias, _, attribute = name.rpartition(".")
    if not alias:
        return _class_named(module, name)
    source = module_source(module)
    target = None if source is None else source.imports.get(alias)
    return _class_named(".".join(filter(None, target)), attribute) if target else None


def _options(module: str, node: ast.ClassDef, bases: list[ClassSource]) -> dict[str, Option] | None:
    inherited: dict[str, Option] | None = {} if len(bases) == len(node.bases) else None
    for base in reversed(bases):
        inherited = None if inherited is None or base.options is None else inherited | base.options
    init = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if init is None:
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return {**(inherited or {}), **dict(_fields(module, node))}
        return inherited
    own = dict(_arguments(module, init.args))
    if init.args.kwarg is None:
        return own
    return None if inherited is None or not _hands_on(init, init.args.kwarg.arg) else {**inherited, **own}


def _hands_on(init: ast.FunctionDef, kwargs: str) -> bool:
    """Whether a constructor gives its further arguments to that of a base, rather than to something else."""
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call)]
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "__init__"
        and any(word.arg is None and isinstance(word.value, ast.Name) and word.value.id == kwargs for word in call.keywords)
        for call in calls
    )


def _arguments(module: str, arguments: ast.arguments) -> Iterator[tuple[str, Option]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in [*list(zip(positional, defaults))[1:], *zip(arguments.kwonlyargs, arguments.kw_defaults)]:
        yield argument.arg, _option(module, argument.arg, argument.annotation, default)


def _fields(module: str, node: ast.ClassDef) -> Iterator[tuple[str, Option]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and "ClassVar" not in ast.unparse(item.annotation):
            yield item.target.id, _option(module, item.target.id, item.annotation, item.value)


def _option(module: str, name: str, annotation: ast.expr | None, default: ast.expr | None) -> Option:
    value = REQUIRED if default is None else _value(module, default)
    text = "" if annotation is None else ast.unparse(annotation).strip("'\"")
    base = text.removesuffix(" | None")
    choices = literal_values(module, base) if base.isidentifier() else None
    text = text if choices is None else f"Literal[{', '.join(map(repr, choices))}]{text.removeprefix(base)}"
    return Option(name, value, text, module)


def _value(module: str, expression: ast.expr) -> Any:
    """Return the value of a literal, or of a constant that is one; ``UNKNOWN`` for anything else."""
    try:
        return ast.literal_eval(expression)
    except ValueError:
        pass
    found = definition(module, expression.id) if isinstance(expression, ast.Name) else None
    return UNKNOWN if found is None or isinstance(found[1], ast.ClassDef) else _value(found[0], found[1])


def literal_values(module: str, name: str) -> tuple[Any, ...] | None:
    """Return the values of an alias ``name = Literal[...]``.

    Args:
        module: That defines or imports it.
        name: Of the alias.

    Returns:
        None if there is no such alias.
    """
    found = definition(module, name)
    value = None if found is None else found[1]
    if not isinstance(value, ast.Subscript) or not ast.unparse(value.value).endswith("Literal"):
        return None
    values = ast.literal_eval(value.slice)
    return values if isinstance(values, tuple) else (values,)
