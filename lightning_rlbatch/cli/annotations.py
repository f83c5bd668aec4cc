"""Say whether a value of a configuration fits the annotation of an option, from source text: nothing is imported.

Judged as LightningCLI judges: where a class or function is wanted, its import path or ``class_path`` with ``init_args`` will do. What an
annotation says that cannot be told from text is taken to fit.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

from lightning_rlbatch.cli.definitions import definition
from lightning_rlbatch.cli.imports import is_import_path
from lightning_rlbatch.cli.signatures import class_source

_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}
_LISTS = ("list", "List", "Sequence", "Iterable", "Collection", "set", "tuple", "Tuple")
_MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")
_MADE_BY_NOBODY = ("torch.Tensor", "torch._tensor.Tensor")  # an alternative to a number, whose name would be a misspelt number
_DURATION = re.compile(r"(-?\d+ days?, )?\d+:\d\d:\d\d(\.\d+)?")


def misfit(annotation: str, module: str, value: Any) -> str | None:
    """Return what is expected in place of a value; None if it fits.

    Args:
        annotation: As written.
        module: In which it stands, to look its names up.
        value: Of the configuration.
    """
    try:
        node = ast.parse(annotation, mode="eval").body
    except SyntaxError:  # none at all
        return None
    if _fits(node, module, value):
        return None
    # On the command line LightningCLI takes 2024 as text where text, and nothing else, is wanted.
    if set(annotation.split(" | ")) <= {"str", "None"} and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return None
    return " or ".join(dict.fromkeys(_words(node, module)))


def is_known(path: str) -> bool:
    """Say whether a class is made of its arguments alone, as those of this package, Lightning and torch are.

    Others may read what stands for them in ways of their own: paths, enumerations, validated models.

    Args:
        path: Of the class or its module.
    """
    return path.partition(".")[0] in ("lightning_rlbatch", "lightning", "torch")


def _fits(node: ast.expr, module: str, value: Any) -> bool:
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else _fits(ast.parse(str(node.value), mode="eval").body, module, value)
    if isinstance(node, ast.BinOp):
        return _fits(node.left, module, value) or _fits(node.right, module, value)
    if isinstance(node, ast.Subscript):
        return _fits_generic(_name(node.value), _parameters(node), module, value)
    name = _name(node)
    if name in _WORDS:
        return _fits_builtin(name, value)
    if name in _LISTS or name in _MAPPINGS or name == "Callable":
        return _fits_generic(name, [], module, value)
    if name == "timedelta":
        return isinstance(value, str) and _DURATION.fullmatch(value) is not None
    found = definition(module, name)
    if found is None:
        return True
    if isinstance(found[1], ast.ClassDef):
        return not is_known(found[0]) or _names_an_object(value, f"{found[0]}.{found[1].name}")
    return _fits(found[1], found[0], value)


def _fits_builtin(name: str, value: Any) -> bool:
    if name == "str":
        return isinstance(value, str)
    if isinstance(value, str):  # YAML has no other way to write a number as text, and LightningCLI reads it
        value = _unquoted(value)
    if name in ("int", "float"):
        return isinstance(value, int if name == "int" else int | float) and not isinstance(value, bool)
    return value is None if name == "None" else isinstance(value, bool)


def _fits_generic(name: str, parameters: list[ast.expr], module: str, value: Any) -> bool:
    if name == "Literal":
        choices = [ast.literal_eval(parameter) for parameter in parameters]
        return any(type(choice) is type(value) and choice == value for choice in choices)
    if name in ("Optional", "Union"):
        return (name == "Optional" and value is None) or any(_fits(parameter, module, value) for parameter in parameters)
    if name in _LISTS:
        inner = [parameter for parameter in parameters if not (isinstance(parameter, ast.Constant) and parameter.value is ...)]
        if not isinstance(value, list | tuple):
            return False
        if name.lower() == "tuple" and len(inner) == len(parameters) > 1:
            return len(value) == len(inner) and all(_fits(*pair) for pair in zip(inner, [module] * len(inner), value))
        return all(_fits(parameter, module, item) for parameter in inner[:1] for item in value)
    if name in _MAPPINGS:
        return isinstance(value, dict)
    if name == "Callable":
        returned = parameters[1] if len(parameters) == 2 else None
        makes_a_class = returned is not None and _is_class(returned, module)
        return _names_an_object(value, None) and (makes_a_class or not isinstance(value, str) or is_import_path(value))
    return _fits(parameters[0], module, value) if name == "Annotated" else True


def _names_an_object(value: Any, path: str | None) -> bool:
    """Say whether a value can name an object: by a class or function, or by the options of the class of that path."""
    if isinstance(value, str):
        return is_import_path(value) or (value.isidentifier() and path not in _MADE_BY_NOBODY)
    if not isinstance(value, dict) or "class_path" in value:
        return isinstance(value, dict)
    source = None if path is None else class_source(path)
    return path is not None and ("init_args" in value or set(value) <= set((source.options if source is not None else None) or ()))


def _is_class(node: ast.expr, module: str) -> bool:
    found = definition(module, _name(node))
    return found is not None and isinstance(found[1], ast.ClassDef)


def _words(node: ast.expr, module: str) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _words(node.left, module)
        yield from _words(node.right, module)
    elif isinstance(node, ast.Constant):
        yield "null" if node.value is None else str(node.value)
    elif isinstance(node, ast.Subscript):
        yield from _words_of_generic(_name(node.value), _parameters(node), module)
    else:
        name = _name(node)
        found = None if name in _WORDS else definition(module, name)
        if found is not None and not isinstance(found[1], ast.ClassDef):
            yield from _words(found[1], found[0])
        elif name == "timedelta":
            yield "a duration such as 0:30:00"
        elif found is not None:
            yield f"{'an' if name[0] in 'AEIOU' else 'a'} {name} (its class_path, with init_args)"
        elif name != "Any":
            yield _WORDS.get(name, name)


def _words_of_generic(name: str, parameters: list[ast.expr], module: str) -> Iterator[str]:
    if name == "Literal":
        yield "one of " + ", ".join(map(ast.unparse, parameters))
    elif name in ("Optional", "Union"):
        for parameter in parameters:
            yield from _words(parameter, module)
        if name == "Optional":
            yield "null"
    elif name in _LISTS:
        yield "a list of " + " or ".join(word.removeprefix("a ").removeprefix("an ") for word in _words(parameters[0], module))
    elif name in _MAPPINGS:
        yield "a mapping"
    else:
        yield "the import path of a function or class"


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _parameters(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _unquoted(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
