"""Say what is wrong with the import path of a function, from source text alone: nothing is imported."""

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

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
    spec = _spec(module)
    if isinstance(spec, str):
        return spec
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno} of {spec.origin} is not Python: {error.msg}"
    missing = None if changes_imports(module) else _missing_import(tree, module)
    return missing or (None if _CHANGES_NAMES.search(text) else _binding_problem(tree, module, name))


def changes_imports(module: str, seen: frozenset[str] = frozenset()) -> bool:
    """Say whether a module, a package around it or what it imports of the user's own may change where modules are found.

    Args:
        module: Absolute name.
        seen: Files that were looked at.
    """
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:depth]))
        origin = None if spec is None or isinstance(spec, str) else spec.origin
        if origin is None or not origin.endswith(".py") or origin in seen or _is_installed(origin):
            continue
        seen |= {origin}
        text = Path(origin).read_text(encoding="utf-8")
        if _CHANGES_IMPORTS.search(text):
            return True
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        if any(changes_imports(name, seen) for name in _imported_names(tree, ".".join(parts[: depth - 1]))):
            return True
    return False


def _is_installed(origin: str) -> bool:
    """Whether a file belongs to Python or to an installed package, rather than to the user's own code."""
    return "site-packages" in origin or origin.startswith((str(Path(ast.__file__).parent), str(Path(__file__).parents[1])))


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the modules that a module imports when it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = ".".join(filter(None, [outer if node.level else "", node.module or ""]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec(module: str) -> ModuleSpec | str | None:
    """Return the spec of a module, why there is none, or None if it is found by other means than files."""
    search: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        found = find_part(".".join(parts[:depth]), search)
        if found is None:
            return None if depth == 1 else f"`{'.'.join(parts[: depth - 1])}` has no module `{parts[depth - 1]}`"
        spec = found
        search = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if search is None and depth < len(parts):
            return None  # a module that makes its own submodules, such as os.path
    return spec


def find_part(name: str, search: list[str] | None) -> ModuleSpec | None:
    """Find a module by its files, without importing the packages around it.

    Args:
        name: Absolute name.
        search: Folders of the package around it; None for a module without one.

    Returns:
        None if there is no such module.
    """
    try:
        return PathFinder.find_spec(name, search)
    except KeyError:  # a folder without `__init__.py` in another one: Python asks the outer one, imported
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(folder, name.rpartition(".")[2])) for folder in search or sys.path]
        return spec


def _missing_import(tree: ast.Module, module: str) -> str | None:
    for node in tree.body:  # imports inside `try` and `if` are allowed to fail
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for name in names:
            if not module_exists(name):
                return f"`{module}` imports `{name}`, which is not installed"
    return None


def _binding_problem(tree: ast.Module, module: str, name: str) -> str | None:
    bound = dict(_bindings(tree.body))
    if name in bound:
        value = bound[name]
        return f"`{module}.{name}` is a value ({ast.unparse(value)[:40]}), not a function" if isinstance(value, _LITERALS) else None
    if "*" in bound or "__getattr__" in bound:
        return None
    close = difflib.get_close_matches(name, [known for known in bound if not known.startswith("_")], 1)
    return f"`{module}` has no `{name}`" + (f". Did you mean `{module}.{close[0]}`?" if close else "")


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that statements bind, with the value where it is an assigned one."""
    for node in body:
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
        for block in ("body", "orelse", "handlers", "finalbody"):
            for part in getattr(node, block, []) if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) else []:
                yield from _bindings(part.body if isinstance(part, ast.ExceptHandler) else [part])
