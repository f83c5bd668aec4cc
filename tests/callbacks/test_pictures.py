import importlib
import random

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from lightning_rlbatch.callbacks.pictures import batch_plan_picture, contiguous_plan
from lightning_rlbatch.functional import plan_mini_batch


def lengths(count, seed=0, longest=4000):
    source = random.Random(seed)
    return [min(longest, int(source.lognormvariate(6, 1)) + 2) for _ in range(count)]


@pytest.fixture
def drawn(monkeypatch):
    """Collect the axes that are drawn, by their titles."""
    panels = {}
    original = Figure.savefig

    def savefig(figure, *args, **kwargs):
        panels.update({axes.get_title(loc="left"): axes for axes in figure.axes})
        return original(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return panels


def heights(axes: Axes):
    """Return the top of every box."""
    (boxes,) = [found for found in axes.collections if isinstance(found, PolyCollection)]
    return [path.vertices[:, 1].max() for path in boxes.get_paths()]


@pytest.mark.parametrize(("dp_size", "count"), [(2, 24), (64, 1024)])
def test_every_micro_batch_is_a_bar_as_high_as_its_tokens_before_and_after(dp_size, count, drawn, tmp_path):
    plan = plan_mini_batch(lengths(count), dp_size=dp_size, max_tokens_per_rank=4096)
    batch_plan_picture(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    for shown, word in ((contiguous_plan(plan), "before"), (plan, "after")):
        (axes,) = [axes for title, axes in drawn.items() if title.startswith(word)]
        expected = {shown.num_tokens(rank, step) for rank in range(dp_size) for step in range(shown.num_micro_steps)}
        assert expected - {0} <= {int(height) for height in heights(axes)}
        assert f"{100 * shown.efficiency():.1f}%" in axes.get_title(loc="left")
        assert any(list(line.get_ydata()) == [4096, 4096] for line in axes.lines)


def test_a_budget_far_above_the_bars_does_not_squeeze_them(drawn, tmp_path):
    plan = plan_mini_batch([50, 60, 70, 80], dp_size=2, max_tokens_per_rank=100_000)
    batch_plan_picture(plan, tmp_path / "plan.png")
    assert all(axes.get_ylim()[1] < 250 for title, axes in drawn.items() if title)


@pytest.mark.parametrize(
    "plan",
    [
        plan_mini_batch([3, 4, 5, 6], dp_size=2, micro_batch_size=1),
        plan_mini_batch([9], dp_size=4, max_tokens_per_rank=16),
        plan_mini_batch([3, 4, 5, 6], dp_size=1, sp_size=2, max_tokens_per_rank=8, group_size=2),
        plan_mini_batch([3, 4, 5, 6], dp_size=2, max_tokens_per_rank=12, padded=True),
    ],
    ids=["static", "fillers", "groups", "padded"],
)
def test_every_kind_of_plan_can_be_drawn(plan, tmp_path):
    batch_plan_picture(plan, tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_isolated_samples_are_drawn_without_a_second_warning(tmp_path):
    with pytest.warns(UserWarning, match="oversize"):
        plan = plan_mini_batch([9, 1, 2], dp_size=1, max_tokens_per_rank=8, oversize="isolate")
    batch_plan_picture(plan, tmp_path / "plan.png")


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    original = importlib.import_module

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", without)
    plan = plan_mini_batch([3, 4], dp_size=1, max_tokens_per_rank=8)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-rlbatch\[examples\]'"):
        batch_plan_picture(plan, tmp_path / "plan.png")


@pytest.mark.parametrize("padded", [False, True])
def test_the_gain_over_contiguous_blocks_is_measured_with_the_plans_own_workloads(padded):
    cut = {"dp_size": 4, "max_tokens_per_rank": 4096, "coefficient": 100, "padded": padded}  # long samples cost far more than by default
    blocks = plan_mini_batch(lengths(40), balance=False, **cut)
    before = contiguous_plan(plan_mini_batch(lengths(40), **cut))
    assert before.assignment == blocks.assignment
    assert before.step_workload() == blocks.step_workload()
    assert before.efficiency() == blocks.efficiency()
