"""What names of annotations and of functions stand for, from source text: nothing is imported."""

import ast
from dataclasses import dataclass

from lightning_rlbatch.cli.module_sources import imported_names, module_tree


def definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.expr] | None:
    """Return what a name of an annotation stands for, and the module that says so: a class, or the right side of an alias.

    Args:
        module: In which the name is used.
        name: Without its module.

    Returns:
        None if the source does not tell, as for names of ``typing``.
    """
    tree = module_tree(module)
    if tree is None or module.partition(".")[0] in ("typing", "typing_extensions", "collections"):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            return None if value is None else (module, value)
    target = imported_names(module).get(name)
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
        tree = module_tree(module)
        for node in [] if tree is None else tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.decorator_list:
                arguments = node.args
                positional = [*arguments.posonlyargs, *arguments.args]
                required = positional[: len(positional) - len(arguments.defaults)]
                required += [argument for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default is None]
                return FunctionSource(tuple(argument.arg for argument in required), arguments.kwarg is not None)
        target = imported_names(module).get(name) if tree is not None else None
        if target is None or not target[1] or target[0] == module:
            return None
        module, name = target
    return None
