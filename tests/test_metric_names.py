"""Every metric that is logged stands in a table of the documentation."""

import ast
import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("algorithms.md", "watching.md")]
PREFIXES = "train|perf|time|throughput|balance|reward|length|kl|value|doctor|memory|rollouts|rollout_correction|val"
NAME = re.compile(rf"({PREFIXES})/[\w*/.]*[\w*]")


def documented():
    """Return the names in the first cells of tables; ``*`` stands for any part."""
    names = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            base = None
            for code in re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else []:
                code = re.sub(r"<\w+>|\.\.\.", "*", code)
                if base is not None and code[0] in "_/":  # the same with another end
                    count = code.count(code[0])
                    code = code[0].join(base.split(code[0])[:-count]) + code
                base = code
                if NAME.fullmatch(code):
                    names.append(code)
    return names


def logged():
    """Return the names that the source logs; ``*`` stands for what is filled in."""
    found = set()
    for file in [*(ROOT / "lightning_rlbatch").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            else:
                text = str(node.value) if isinstance(node, ast.Constant) else ""
            if NAME.fullmatch(text):
                found.add(text)
    return found


def undocumented(names):
    patterns = documented()

    def is_known(name):
        beginning = name.partition("*")[0]
        if beginning != name or name.endswith("_"):  # completed when the program runs
            return any(pattern.startswith(beginning) for pattern in patterns)
        return any(fnmatch.fnmatch(name, pattern) or pattern.startswith(f"{name}/") for pattern in patterns)

    return sorted(name for name in names if not is_known(name))


def test_every_metric_in_the_source_is_in_a_table():
    names = logged()
    assert {"perf/exchange_bytes", "train/prompt_epoch", "value/explained_variance", "memory/peak_gib", "balance/speedup"} <= names
    assert undocumented(names) == []


def test_the_tables_are_read_with_their_abbreviations():
    assert {"train/clip_fraction_low", "train/clip_fraction_dual", "train/grad_norm/critic", "reward/zero_variance_all_wrong",
            "length/p95", "reward/*"} <= set(documented())  # fmt: skip
    assert undocumented(["time/nothing"]) == ["time/nothing"]
