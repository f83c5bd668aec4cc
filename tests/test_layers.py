"""The package's layers: a module imports from its own layer or from lower ones only."""

import ast
import pathlib
import subprocess
import sys

import pytest

import lightning_rlbatch

ROOT = pathlib.Path(lightning_rlbatch.__file__).parent
# Each layer with the layers below it that it may import, and the third-party packages that come in with it (at module level or inside
# functions). `lightning` is allowed in four sister layers.
LAYERS = {
    "functional": (set(), {"torch", "numpy", "numba"}),
    "distributed": ({"functional"}, set()),
    "models": ({"functional", "distributed"}, {"transformers", "flash_attn", "liger_kernel", "safetensors"}),
    "rollout": ({"functional", "distributed", "models"}, {"vllm", "safetensors", "pyarrow"}),
    "host": (
        {"functional", "distributed", "models", "rollout"},
        {"lightning", "torchmetrics", "rich", "tqdm", "matplotlib", "pyarrow", "datasets", "yaml", "jsonargparse", "safetensors"},
    ),
    "cli": ({"functional", "distributed", "models", "rollout", "host"}, {"jsonargparse", "yaml", "rich"}),
}
HOST = ("strategies", "data", "modules", "callbacks")  # built on Lightning; they may import each other
EVERYWHERE = set(sys.stdlib_module_names) | {"typing_extensions"}


def layer_of(path):
    """Return the layer of a file in the package: "root" for lazy exports, None for a place that nobody has declared."""
    first = path.relative_to(ROOT).parts[0]
    if first == "__init__.py":
        return "root"
    if first == "__main__.py":
        return "cli"
    if first in HOST:
        return "host"
    name = first.removesuffix(".py")
    return name if name in (*LAYERS, "testing") else None


def imported_modules(path, under_type_checking=False):
    """Return the absolute names that a file imports anywhere, leaving out imports for type checkers unless they are asked for."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not under_type_checking:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["lightning_rlbatch", *path.relative_to(ROOT).parent.parts]
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            # `from package import submodule` imports the submodule.
            found.extend(f"{module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def package_files():
    return sorted(ROOT.rglob("*.py"))


def violations(path, modules, layer):
    """Return the imports that a file of this layer may not have."""
    allowed_layers = {layer, *LAYERS[layer][0]}
    third_party = set().union(*(LAYERS[name][1] for name in allowed_layers))
    wrong = []
    for module in modules:
        top, *rest = module.split(".")
        if top == "lightning_rlbatch":
            target = "host" if rest and rest[0] in HOST else rest[0] if rest else "root"
            # What is neither a layer nor `__version__` is one of the root's lazy exports, which come from any layer.
            if target not in allowed_layers and target != "__version__" and layer != "cli":
                wrong.append(module)
        elif top not in EVERYWHERE | third_party:
            wrong.append(module)
    return wrong


def test_every_module_is_in_a_known_layer():
    assert [str(path) for path in package_files() if layer_of(path) is None] == []


@pytest.mark.parametrize("path", package_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_imports_only_from_its_own_layer_or_below(path):
    layer = layer_of(path)
    if layer in LAYERS:
        assert violations(path, imported_modules(path), layer) == []
    else:  # lazy exports of the root import nothing; `testing` may import anything
        assert layer == "testing" or violations(path, imported_modules(path), "cli") == []


@pytest.mark.parametrize("path", [path for path in package_files() if layer_of(path) == "functional"], ids=lambda path: path.name)
def test_pure_functions_do_not_communicate(path):
    assert [module for module in imported_modules(path) if module.startswith("torch.distributed")] == []
    used = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute) and node.attr == "distributed"]
    assert [node.lineno for node in used] == []


@pytest.mark.parametrize(
    ("layer", "source", "wrong"),
    [
        ("functional", "import lightning", ["lightning"]),
        ("functional", "def f():\n    from lightning_rlbatch.distributed import mesh", ["lightning_rlbatch.distributed.mesh"]),
        ("functional", "from ..models.scorer import x", ["lightning_rlbatch.models.scorer.x"]),
        ("distributed", "from lightning_rlbatch import models", ["lightning_rlbatch.models"]),
        ("distributed", "from lightning_rlbatch import PPOModule, __version__", ["lightning_rlbatch.PPOModule"]),
        ("functional", "import lightning_rlbatch", ["lightning_rlbatch"]),
        ("models", "import transformers, torch.nn\nfrom .attention import x", []),
        ("host", "from lightning_rlbatch.cli import main", ["lightning_rlbatch.cli.main"]),
        ("host", "from lightning_rlbatch.data import x\nimport lightning.pytorch as pl", []),
        ("rollout", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lightning\nelse:\n    import vllm", []),
    ],
)
def test_the_check_finds_an_import_upwards(layer, source, wrong, tmp_path, monkeypatch):
    folder = "data" if layer == "host" else layer
    file = tmp_path / folder / "module.py"
    file.parent.mkdir()
    file.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert violations(file, imported_modules(file), layer_of(file)) == wrong


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_importing_the_package_imports_neither_lightning_nor_transformers_nor_torch():
    code = "import lightning_rlbatch, sys; print(*(m for m in ('lightning', 'transformers', 'torch') if m in sys.modules))"
    assert run_python(code) == []


def test_the_lower_layers_import_without_lightning_and_transformers():
    code = (
        "import lightning_rlbatch.functional, lightning_rlbatch.distributed, sys\n"
        "print(*(m for m in ('lightning', 'transformers', 'torchmetrics') if m in sys.modules))"
    )
    assert run_python(code) == []
