"""The source text of modules, found and read without importing them."""

import ast
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_HOLD_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)
_NOT_THE_USERS = ("site-packages", str(Path(ast.__file__).parent), str(Path(__file__).parents[1]))

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Source:
    """What the text of a module says, each part worked out when it is first asked for.

    Attributes:
        module: Absolute name.
        file: That holds the text.
        content: Of the file.
    """

    module: str
    file: Path
    content: bytes

    @functools.cached_property
    def text(self) -> str:
        """The content, to search it."""
        return self.content.decode("utf-8", errors="replace")

    @property
    def body(self) -> list[ast.stmt]:
        """Statements of the module; none if it is not Python."""
        return [] if isinstance(self._parsed, Exception) else self._parsed.body

    @property
    def problem(self) -> str | None:
        """Why the text is not Python; None if it is."""
        error = self._parsed
        if not isinstance(error, Exception):
            return None
        return f"line {getattr(error, 'lineno', 1)} of {self.file} is not Python: {getattr(error, 'msg', error)}"

    @property
    def is_users_own(self) -> bool:
        """Whether it belongs neither to Python, nor to an installed package, nor to this one."""
        return not any(part in str(self.file) for part in _NOT_THE_USERS)

    @functools.cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local names of what is imported when the module is, to (module, attribute); the attribute of a module is empty."""
        names: dict[str, tuple[str, str]] = {}
        package = self.module if self.file.name == "__init__.py" else self.module.rpartition(".")[0]
        for node in statements(self.body):
            if isinstance(node, ast.Import):
                names |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
                source = ".".join(filter(None, [base, node.module or ""]))
                names |= {f"{source}.*" if alias.name == "*" else alias.asname or alias.name: (source, alias.name) for alias in node.names}
        return names

    @functools.cached_property
    def definitions(self) -> dict[str, Definition]:
        """The statement that defines each name of the module, the first if there are several."""
        found: dict[str, Definition] = {}
        for node in self.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, node)
        return found

    @functools.cached_property
    def _parsed(self) -> ast.Module | SyntaxError | ValueError:
        try:
            return ast.parse(self.content)
        except (SyntaxError, ValueError) as error:
            return error


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and those in their blocks, that run when a module is imported.

    Args:
        body: Of the module.
    """
    for node in body:
        yield node
        for block in ("body", "orelse", "handlers", "finalbody") if isinstance(node, _HOLD_BLOCKS) else ():
            yield from statements(getattr(node, block, []))


def module_source(module: str) -> Source | None:
    """Return the source of a module, as its file is now.

    Args:
        module: Absolute name.

    Returns:
        None if there is no such module, or it is not Python source.
    """
    spec = module_spec(module)
    if not isinstance(spec, ModuleSpec) or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    state = os.stat(spec.origin)
    return _read(module, spec.origin, state.st_mtime_ns, state.st_size)


@functools.cache
def _read(module: str, file: str, modified: int, size: int) -> Source:
    """Read a file once in each state."""
    return Source(module, Path(file), Path(file).read_bytes())


def module_spec(module: str) -> ModuleSpec | str | None:
    """Find a module by its files, without importing the packages around it.

    Args:
        module: Absolute name.

    Returns:
        Its spec; why there is none; or None if the outermost package is not found, or makes its modules by other means than files.
    """
    return _module_spec(module, os.getcwd(), tuple(sys.path))


@functools.cache
def _module_spec(module: str, folder: str, path: tuple[str, ...]) -> ModuleSpec | str | None:
    """Find a module once from each folder and search path."""
    search: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        found = _find_part(".".join(parts[:depth]), search)
        if found is None:
            return None if depth == 1 else f"`{'.'.join(parts[: depth - 1])}` has no module `{parts[depth - 1]}`"
        spec = found
        search = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if search is None and depth < len(parts):
            return None  # a module that makes its own submodules, such as os.path
    return spec


def _find_part(name: str, search: list[str] | None) -> ModuleSpec | None:
    """Find a module in the folders of the package around it; None there for a module without one."""
    try:
        return PathFinder.find_spec(name, search)
    except KeyError:  # a folder without `__init__.py` in another one: Python asks the outer one, imported
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(folder, name.rpartition(".")[2])) for folder in search or sys.path]
        return spec
