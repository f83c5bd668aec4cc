"""Say what is wrong with the import path of a function, from source text alone: nothing is imported."""

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_rlbatch.cli.module_sources import Source, module_source, module_spec, statements

# What lets a module find others, or have names, that its text does not show.
_CHANGES_IMPORTS = re.compile(r"\bsys\.(path|modules|meta_path|path_hooks)\b|\bfrom sys import|\baddsitedir\b|__path__")
_CHANGES_NAMES = re.compile(r"\bglobals\(\)|\bvars\(\)|\bexec\(|\bsetattr\(|\bsys\.modules\b|__path__")
NO_MODULE = "there is no module"
"""Beginning of a problem that another module may solve by changing where modules are found."""

_LITERALS = (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set, ast.JoinedStr)


def is_import_path(text: str) -> bool:
    """Say whether a text has the form of an import path, such as ``my_project.rewards.exact_match``.

    Args:
        text: As configured.
    """
    parts = text.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def module_exists(name: str) -> bool:
    """Say whether the first package of an import path can be found.

    Args:
        name: Import path or module.
    """
    top = name.partition(".")[0]
    try:  # a package that is installed for development may be found by a finder of its own
        return top in sys.modules or importlib.util.find_spec(top) is not None
    except ValueError:  # a module without a specification
        return True


def import_problem(path: str) -> str | None:
    """Return why an import path names no function or class, None if it does or if the source cannot tell.

    Args:
        path: Such as ``my_project.rewards.exact_match``.
    """
    if not is_import_path(path):
        return f"{path!r} is no import path. Write module.function, for example my_project.reward"
    module, _, name = path.rpartition(".")
    if Path(path).is_file():
        return f"{path} is a file, not the import path of a function"
    if not module_exists(module):
        return f"{NO_MODULE} `{module.partition('.')[0]}`, neither in {Path.cwd()} nor installed"
    spec = module_spec(module)
    if isinstance(spec, str):
        return spec
    source = module_source(module)
    if source is None or source.problem is not None:
        return None if source is None else source.problem
    missing = None if changes_imports(module) else _missing_import(source)
    return missing or (None if _CHANGES_NAMES.search(source.text) else _binding_problem(source, name))


def changes_imports(module: str, seen: frozenset[str] = frozenset()) -> bool:
    """Say whether a module, a package around it or what it imports of the user's own may change where modules are found.

    Args:
        module: Absolute name.
        seen: Modules that were looked at.
    """
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        source = module_source(name)
        if source is None or name in seen or not source.is_users_own:
            continue
        seen |= {name}
        if _CHANGES_IMPORTS.search(source.text):
            return True
        imported = {part for origin, attribute in source.imports.values() for part in (origin, f"{origin}.{attribute}".rstrip("."))}
        if any(changes_imports(part, seen) for part in imported):
            return True
    return False


def _missing_import(source: Source) -> str | None:
    for node in source.body:  # imports inside `try` and `if` are allowed to fail
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for name in names:
            if not module_exists(name):
                return f"`{source.module}` imports `{name}`, which is not installed"
    return None


def _binding_problem(source: Source, name: str) -> str | None:
    module = source.module
    bound = dict(_bindings(source.body))
    if name in bound:
        value = bound[name]
        return f"`{module}.{name}` is a value ({ast.unparse(value)[:40]}), not a function" if isinstance(value, _LITERALS) else None
    if "*" in bound or "__getattr__" in bound:
        return None
    close = difflib.get_close_matches(name, [known for known in bound if not known.startswith("_")], 1)
    return f"`{module}` has no `{name}`" + (f". Did you mean `{module}.{close[0]}`?" if close else "")


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that statements bind, with the value where it is an assigned one."""
    for node in statements(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, None) for alias in node.names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                value = node.value if isinstance(target, ast.Name) else None
                yield from ((part.id, value) for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        if isinstance(node, ast.For):
            yield from ((part.id, None) for part in ast.walk(node.target) if isinstance(part, ast.Name))
