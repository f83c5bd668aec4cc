"""Read the options of a class from its source text: no import, so that neither torch nor a user's module is executed."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning_rlbatch
from lightning_rlbatch.cli.imports import find_part

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


@functools.cache
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
    found = _find(module, name, frozenset())
    return None if found is None else _describe(*found)


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


def _describe(module: str, node: ast.ClassDef) -> ClassSource:
    bases = [base for base in (_base(module, expression) for expression in node.bases) if base is not None]
    ancestors = frozenset([node.name]).union(*(base.ancestors for base in bases))
    return ClassSource(f"{module}.{node.name}", ancestors, _options(module, node, bases))


def _base(module: str, expression: ast.expr) -> ClassSource | None:
    name = ast.unparse(expression).partition("[")[0]
    alias, _, attribute = name.rpartition(".")
    if alias:
        target = _imports(module).get(alias)
        found = _find(".".join(filter(None, target)), attribute, frozenset()) if target else None
    else:
        found = _find(module, name, frozenset())
    return None if found is None else _describe(*found)


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
    if not isinstance(expression, ast.Name):
        return UNKNOWN
    for node in getattr(_tree(module), "body", []):
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == expression.id for target in node.targets):
            return _value(module, node.value)
    target = _imports(module).get(expression.id)
    return UNKNOWN if target is None or not target[1] or target[0] == module else _value(target[0], ast.Name(target[1]))


def literal_values(module: str, name: str) -> tuple[Any, ...] | None:
    """Return the values of an alias ``name = Literal[...]``.

    Args:
        module: That defines or imports it.
        name: Of the alias.

    Returns:
        None if there is no such alias.
    """
    tree = _tree(module)
    for node in [] if tree is None else tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            if not isinstance(value, ast.Subscript) or not ast.unparse(value.value).endswith("Literal"):
                return None
            found = ast.literal_eval(value.slice)
            return found if isinstance(found, tuple) else (found,)
    target = _imports(module).get(name)
    return None if target is None or not target[1] or target[0] == module else literal_values(*target)


def definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.expr] | None:
    """Return what a name of an annotation stands for, and the module that says so: a class, or the right side of an alias.

    Args:
        module: In which the name is used.
        name: Without its module.

    Returns:
        None if the source does not tell, as for names of ``typing``.
    """
    tree = _tree(module)
    if tree is None or module.partition(".")[0] in ("typing", "typing_extensions", "collections"):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            return None if value is None else (module, value)
    target = _imports(module).get(name)
    return None if target is None or not target[1] or target[0] == module else definition(*target)


@dataclass(frozen=True)
class FunctionSource:
    """What is known of a function from its text.

    Attributes:
        required: Arguments without a default.
        takes_any: Whether it takes arguments of any name.
    """

    required: tuple[str, ...]
    takes_any: bool


def function_source(path: str) -> FunctionSource | None:
    """Find a function.

    Args:
        path: Import path.

    Returns:
        None if it is none, or not written as one, or its source cannot be found.
    """
    module, _, name = path.rpartition(".")
    for _ in range(5):  # re-exports
        tree = _tree(module)
        for node in [] if tree is None else tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.decorator_list:
                arguments = node.args
                positional = [*arguments.posonlyargs, *arguments.args]
                required = positional[: len(positional) - len(arguments.defaults)]
                required += [argument for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default is None]
                return FunctionSource(tuple(argument.arg for argument in required), arguments.kwarg is not None)
        target = _imports(module).get(name) if tree is not None else None
        if target is None or not target[1] or target[0] == module:
            return None
        module, name = target
    return None


# -- modules -----------------------------------------------------------------------------------------------------------------------


def _find(module: str, name: str, seen: frozenset[str]) -> tuple[str, ast.ClassDef] | None:
    """Return the module that defines a class, and its node; follows re-exports."""
    tree = _tree(module)
    if tree is None or f"{module}.{name}" in seen:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    if module == "lightning_rlbatch" and lightning_rlbatch._HOMES.get(name):
        return _find(f"{module}.{lightning_rlbatch._HOMES[name]}", name, seen | {f"{module}.{name}"})
    target = _imports(module).get(name)
    if target is None or not target[1]:
        return None
    return _find(target[0], target[1], seen | {f"{module}.{name}"})


@functools.cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Map local names to (module, attribute); the attribute of an imported module is empty."""
    tree = _tree(module)
    file = module_file(module)
    names: dict[str, tuple[str, str]] = {}
    if tree is None or file is None:
        return names
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module or ""]))
            names |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return names


@functools.cache
def _tree(module: str) -> ast.Module | None:
    file = module_file(module)
    try:
        return None if file is None else ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # the run says so when it imports the module; so does `import_problem`
        return None


@functools.cache
def module_file(module: str) -> Path | None:
    """Return the source file of a module without importing it or its packages.

    Args:
        module: Absolute name.

    Returns:
        None if there is no such module, or it is not Python source.
    """
    search: list[str] | None = None
    origin = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = find_part(".".join(parts[: depth + 1]), search)
        if spec is None:
            return None
        origin = spec.origin
        search = list(spec.submodule_search_locations or [])
        if depth < len(parts) - 1 and not search:
            return None
    return Path(origin) if origin is not None and origin.endswith(".py") else None
