"""The documentation holds: snippets compile and run, configurations are accepted, links lead somewhere, names exist."""

import ast
import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import lightning.pytorch as pl
import pytest
import yaml

import lightning_rlbatch
from lightning_rlbatch import rollout
from lightning_rlbatch.callbacks import BalanceMonitor, RolloutLogger
from lightning_rlbatch.cli import RLBatchCLI
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.main import main
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.functional import GAE, GRPO, PPOClip

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<marks>(?:<!--[^\n]*-->\n)*)```(?P<language>[a-z]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {"fit", "validate", "predict", "explain", "plan", "verify", "report"}

NOT_OURS = {"peft"}  # what a page uses that is no dependency of this package


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    runs: bool  # marked with a comment before it

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(language, page=None):
    found = []
    for path in PAGES if page is None else [page]:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match["language"] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Snippet(path, line, language, match["code"], "<!-- runs -->" in match["marks"]))
    return found


def text_without_code(page):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


# -- Python ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_python_compiles_and_what_it_imports_exists(snippet):
    tree = ast.parse(snippet.code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        if getattr(node, "module", None) in NOT_OURS and importlib.util.find_spec(node.module) is None:
            continue
        exec(compile(ast.Module([node], []), str(snippet), "exec"), {})
    compile(tree, str(snippet), "exec")


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")  # Lightning, of a data module that may have validation data
@pytest.mark.parametrize("snippet", [snippet for snippet in snippets("python") if snippet.runs], ids=str)
def test_python_that_says_so_runs(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.code, str(snippet), "exec"), {"__name__": "__main__"})


def test_keyword_arguments_of_our_classes_exist():
    for snippet in snippets("python"):
        for node in ast.walk(ast.parse(snippet.code)):
            known = getattr(lightning_rlbatch, node.func.id, None) if called_by_name(node) else None
            if inspect.isclass(known):
                parameters = inspect.signature(known).parameters
                assert {keyword.arg for keyword in node.keywords} <= parameters.keys(), f"{snippet}: {node.func.id}"


def called_by_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in lightning_rlbatch.__all__


# -- YAML --------------------------------------------------------------------------------------------------------------------------

BASE = yaml.safe_load(
    """
    trainer: {accelerator: cpu, devices: 8, strategy: rlbatch_fsdp}
    model:
      class_path: lightning_rlbatch.PPOModule
      init_args: {policy: my/model, reward_functions: [my_project.reward]}
    data:
      class_path: lightning_rlbatch.RolloutDataModule
      init_args:
        train_prompts: prompts.jsonl
        tokenizer: my/model
        train_batch_size: 64
        mini_batch_size: 16
        rollouts_per_prompt: 8
        max_tokens_per_rank: 4096
    """
)


def completed(snippet):
    """Fill up what a snippet leaves out, option by option; a class of its own is left as it is."""
    content = yaml.safe_load(snippet.code)
    if not content.keys() & BASE.keys():  # options of the model alone
        content = {"model": {"init_args": content}}
    for section, default in BASE.items():
        given = content.setdefault(section, {})
        if section == "trainer":
            content[section] = {**default, **given}
        elif given.get("class_path", default["class_path"]) == default["class_path"]:
            content[section] = {**default, "init_args": {**default["init_args"], **given.get("init_args", {})}}
    return content


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_explain_finds_nothing_wrong_with_a_configuration(snippet, my_project, monkeypatch):
    monkeypatch.chdir(my_project)
    if "VLLMEngineConfig" in snippet.code:  # as if it were installed
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    findings = explain(run_config(completed(snippet), world_size=32 if "num_nodes: 4" in snippet.code else 16)).findings
    assert [finding.text for finding in findings if finding.level != "note"] == []


class ParsingCLI(RLBatchCLI):
    """Reads and checks a command line; makes and runs nothing."""

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass


@pytest.fixture(scope="module")
def my_project(tmp_path_factory):
    """The user's modules that the pages talk about: snippets that begin with a file name, and those of the page on one's own parts."""
    folder = tmp_path_factory.mktemp("project")
    parts = [snippet.code for snippet in snippets("python", ROOT / "docs" / "customizing.md") if snippet.runs]
    reward = "def reward(prompts, completions, **columns):\n    return [0.0] * len(completions)\n"
    (folder / "my_project.py").write_text("\n\n".join([*parts, reward]))
    (folder / "prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (folder / "outputs" / "recorded").mkdir(parents=True)
    for snippet in snippets("python"):
        name = re.match(r"# (\w+\.py)$", snippet.code.splitlines()[0])
        if name:
            (folder / name[1]).write_text(snippet.code)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("my_project", None)


def parse(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rlbatch", *arguments])
    lightning_rlbatch.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Lightning's calls of jsonargparse
        return ParsingCLI()


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_the_command_line_interface_accepts_a_configuration(snippet, my_project, tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(completed(snippet)))
    assert parse(["fit", "--config", str(path)], monkeypatch).config.fit.model is not None


def test_the_command_line_interface_of_this_test_refuses_what_is_wrong(my_project, tmp_path, monkeypatch):
    content = copy.deepcopy(BASE)
    content["data"]["init_args"]["mini_batch"] = 4
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        parse(["fit", "--config", str(path)], monkeypatch)


def test_configurations_of_the_examples_are_accepted(my_project, monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        findings = explain(run_config(yaml.safe_load(path.read_text()))).findings
        # Policies that an earlier phase of an example writes are not there yet.
        wrong = [finding.text for finding in findings if finding.level == "refused" and "there is no folder outputs/" not in finding.text]
        assert wrong == [], path


# -- commands ----------------------------------------------------------------------------------------------------------------------


def commands():
    blocks = [*snippets("bash"), *[snippet for snippet in snippets("") if "rlbatch " in snippet.code]]
    return [(snippet, line.partition("#")[0].split()) for snippet in blocks for line in snippet.code.splitlines() if line.strip()]


def test_commands_exist_with_their_options_and_files(capsys):
    helps = {}
    for snippet, words in commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), snippet
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(f"{words[2]}.__main__") or importlib.util.find_spec(words[2]), snippet
        elif words[0] == "rlbatch":
            command = words[1]
            assert command in COMMANDS, snippet
            if command not in ("fit", "validate", "predict"):
                if command not in helps:
                    with contextlib.suppress(SystemExit):
                        main([command, "--help"])
                    helps[command] = capsys.readouterr().out
                options = {
                    word.partition("=")[0] for word in words if word.startswith("--") and not re.match(r"--(data|model|trainer)\.", word)
                }
                assert all(option in helps[command] for option in options), f"{snippet}: {options}"
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), f"{snippet}: {word}"


# -- links and names ---------------------------------------------------------------------------------------------------------------


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_without_code(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), target


def test_pages_and_navigation_hold_each_other_and_no_picture_is_left_over():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])
    shown = {name for page in PAGES for name in re.findall(r"images/([\w.]+)\)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_every_name_of_the_reference_exists_and_every_public_class_is_in_it():
    referenced = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            found = getattr(importlib.import_module(module), name)
            assert inspect.getdoc(found), path
            referenced.add(found)
    layers = [lightning_rlbatch.callbacks, importlib.import_module("lightning_rlbatch.strategies")]
    public = {getattr(lightning_rlbatch, name) for name in lightning_rlbatch.__all__}
    public |= {getattr(layer, name) for layer in layers for name in layer.__all__}
    missing = {found.__name__ for found in public - referenced if inspect.isclass(found)}
    assert missing <= {"RLBatchCLI", "UnhealthyTraining", "Diagnosis"}


def test_our_names_in_the_tables_of_migration_exist():
    classes = [
        lightning_rlbatch.PPOModule, lightning_rlbatch.RolloutDataModule, lightning_rlbatch.RLBatchFSDPStrategy, pl.Trainer, PPOClip,
        pl.callbacks.ModelCheckpoint, RolloutLogger, BalanceMonitor, GRPO, GAE, rollout.TransformersEngineConfig, rollout.VLLMEngineConfig,
    ]  # fmt: skip
    ours = [base for cls in classes for base in cls.__mro__ if base is cls or base.__module__.startswith("lightning_rlbatch.")]
    known = {name for cls in ours for name in [*inspect.signature(cls).parameters, *vars(cls)]}
    known |= {"init_args", "class_path", "my_project", "chat_template_kwargs", "ckpt_path", "rlbatch_fsdp", "seed_everything"}
    known |= {"continuous_batching"}  # a value
    functional = importlib.import_module("lightning_rlbatch.functional").__all__
    for row in (ROOT / "docs" / "migration.md").read_text().splitlines():
        cells = row.split("|")
        if len(cells) != 5 or "---" in row or cells[2].strip() == "here":
            continue
        for code in re.findall(r"`([^`]+)`", cells[2]):
            assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", code)) <= known, code
            classes_named = {word for word in re.findall(r"\b[A-Z][A-Za-z]+\b", code)}
            assert all(
                word in functional or hasattr(lightning_rlbatch, word) or hasattr(rollout, word) or word in EXTERNAL
                for word in classes_named
            ), code


EXTERNAL = {"ModelCheckpoint", "RolloutCorrection", "RolloutLogger", "ThroughputMonitor"}
