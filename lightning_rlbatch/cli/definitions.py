"""What names of annotations, of classes and of functions stand for, from source text: nothing is imported."""

import ast
from dataclasses import dataclass

import lightning_rlbatch
from lightning_rlbatch.cli.module_sources import Definition, Source, module_source

_WITHOUT_MEANING_HERE = ("typing", "typing_extensions", "collections")  # their names say themselves what they are


def statement_of(module: str, name: str) -> tuple[Source, Definition] | None:
    """Return the statement that defines a name, and the source that holds it; follows re-exports.

    Args:
        module: In which the name is used.
        name: Without its module.

    Returns:
        None if the source does not tell.
    """
    seen = set()
    while (module, name) not in seen:
        seen.add((module, name))
        source = module_source(module)
        if source is None:
            return None
        if name in source.definitions:
            return source, source.definitions[name]
        if module == lightning_rlbatch.__name__ and name in lightning_rlbatch._HOMES:  # imported when it is first used
            module = f"{module}.{lightning_rlbatch._HOMES[name]}"
        else:
            module, name = source.imports.get(name, ("", ""))
        if not name:  # nothing, or a module
            return None
    return None


def definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.expr] | None:
    """Return what a name of an annotation stands for, and the module that says so: a class, or the right side of an alias.

    Args:
        module: In which the name is used.
        name: Without its module.

    Returns:
        None if the source does not tell, as for names of ``typing``.
    """
    found = statement_of(module, name)
    if found is None or found[0].module.partition(".")[0] in _WITHOUT_MEANING_HERE:
        return None
    source, node = found
    meaning = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else node
    return (source.module, meaning) if isinstance(meaning, ast.ClassDef | ast.expr) else None


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
    found = statement_of(module, name)
    node = None if found is None else found[1]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [argument for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default is None]
    return FunctionSource(tuple(argument.arg for argument in required), arguments.kwarg is not None)
