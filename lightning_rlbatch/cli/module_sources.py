"""The source text of modules, found without importing them: their trees, and what they import."""

import ast
import functools
from pathlib import Path

from lightning_rlbatch.cli.imports import find_part


@functools.cache
def imported_names(module: str) -> dict[str, tuple[str, str]]:
    """Map local names to (module, attribute); the attribute of an imported module is empty.

    Args:
        module: Whose imports are read.
    """
    tree = module_tree(module)
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
def module_tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module; None if there is no source, or it is not Python.

    Args:
        module: Absolute name.
    """
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
