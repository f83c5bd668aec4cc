import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.charts import running_mean, ticks
from lightning_rlbatch.cli.numbers import short
from lightning_rlbatch.cli.run_metrics import RunMetrics

TITLES = [
    "Reward and held-out score",
    "Entropy of the policy",
    "Response length and truncation",
    "Groups that teach nothing",
    "KL divergences",
    "Clip fractions",
    "Gradient norm before clipping",
    "Explained variance of the critic",
    "Where an iteration's time goes",
    "Tokens per second, use of the hardware",
    "Peak memory of rank 0",
    "Heaviest and lightest rank, before and after",
    "Micro-batch fill and efficiency",
    "Padding avoided",
    "Waiting at barriers",
    "Ratio of the first update",
]
PER_STEP = {
    "train/entropy": lambda step: 0.3 * 0.97**step,
    "train/grad_norm/policy": lambda step: 0.4 + 0.01 * (step % 7),
    "train/approx_kl": lambda step: 0.001 * (step % 4),
    "train/clip_fraction_low": lambda step: 0.01,
    "train/clip_fraction_high": lambda step: 0.02,
    "train/ratio": lambda step: 1.0 + 0.001 * (step % 4),
    "value/explained_variance": lambda step: 0.5,
    "reward/mean": lambda step: 0.4 + 0.005 * (step // 4),
    "reward/zero_variance_all_right": lambda step: 0.1,
    "reward/zero_variance_all_wrong": lambda step: 0.1,
    "length/mean": lambda step: 25.0,
    "length/truncated": lambda step: 0.45,
    "time/generation": lambda step: 1.0,
    "time/update": lambda step: 0.5,
    "throughput/tokens_per_second": lambda step: 5000.0,
    "memory/peak_gib": lambda step: 3.0,
    "balance/plan/efficiency": lambda step: 0.99,
    "balance/plan/fill": lambda step: 0.8,
    "balance/plan/padding_avoided": lambda step: 0.4,
    **{f"balance/global_workload/{name}": lambda step: 100.0 for name in ("min", "max", "balanced_min", "balanced_max", "mean")},
}


class Page(HTMLParser):
    """Collects what a page shows, and checks that its tags are closed."""

    VOID = frozenset({"meta", "img", "circle", "line", "polyline", "polygon"})

    def __init__(self, text):
        super().__init__()
        self.titles, self.plots, self.images, self.links, self.open = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]
        self.plots += [json.loads(attributes["data-series"])] if "data-series" in attributes else []
        self.images += [attributes["src"]] if tag == "img" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


def write_run(folder: Path, columns=PER_STEP, num_steps=40):
    folder.mkdir(parents=True)
    names = ["epoch", "step", *columns, "val/reward/score"]
    with (folder / "metrics.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        for step in range(num_steps):
            writer.writerow({"epoch": step // 4, "step": step} | {name: value(step) for name, value in columns.items()})
        writer.writerow({"epoch": num_steps // 4 - 1, "step": num_steps - 1, "val/reward/score": 0.75})
    return folder


def report(folder, *arguments):
    main(["report", str(folder), *arguments])
    return (folder / "report.html").read_text()


def test_the_page_holds_the_sixteen_plots_in_order_and_loads_nothing(tmp_path):
    page = Page(report(write_run(tmp_path / "run")))
    assert page.titles == TITLES
    assert len(page.plots) == 16
    assert page.links == []


def test_the_curves_are_the_logged_values(tmp_path):
    page = Page(report(write_run(tmp_path / "run")))
    curves = {curve["label"]: curve["points"] for plot in page.plots for curve in plot}
    assert curves["entropy"][10] == pytest.approx([10, 0.3 * 0.97**10], rel=1e-4)
    assert curves["held-out score"] == [[39, 0.75]]
    assert [x for x, _ in curves["mean ratio"]] == list(range(0, 40, 4))  # once per iteration
    assert {y for _, y in curves["mean ratio"]} == {1.0}
    assert curves["update"] == [[iteration, 2.0] for iteration in range(10)]  # four updates of each


def test_the_title_names_the_run_and_the_line_below_says_what_was_trained_on_what(tmp_path):
    folder = write_run(tmp_path / "hanoi" / "grpo" / "version_1")
    model = {"class_path": "lightning_rlbatch.PPOModule", "init_args": {"policy": "my/model"}}
    data = {"class_path": "lightning_rlbatch.RolloutDataModule", "init_args": {"train_prompts": "prompts.jsonl"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    text = report(folder)
    assert text.count("hanoi / grpo, version 1") == 2  # of the browser's tab, and on the page
    assert "PPOModule of my/model | RolloutDataModule of prompts.jsonl | last logged 2" in text


def test_times_of_the_only_iteration_are_a_bar_that_can_be_seen(tmp_path):
    text = report(write_run(tmp_path / "run", {"time/generation": lambda step: 1.0}, num_steps=4))
    (corners,) = re.findall(r'<polygon class="a0" points="([^"]+)"', text)
    xs, ys = zip(*(map(float, corner.split(",")) for corner in corners.split()))
    assert max(xs) - min(xs) > 300
    assert max(ys) - min(ys) > 100


def test_what_was_not_logged_says_how_to_get_it(tmp_path):
    text = report(write_run(tmp_path / "run", {"train/entropy": PER_STEP["train/entropy"]}))
    page = Page(text)
    assert page.titles == TITLES
    assert len(page.plots) == 2  # entropy and held-out score
    assert "lightning_rlbatch.callbacks.ThroughputMonitor" in text


def test_the_doctor_judges_the_run_and_the_clip_limit_comes_from_its_configuration(tmp_path):
    folder = write_run(tmp_path / "run")
    configuration = {"model": {"class_path": "lightning_rlbatch.PPOModule", "init_args": {"max_grad_norm": 0.25}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration))
    text = report(folder)
    assert "<b>truncation</b> (iteration 2, last at 9)" in text
    assert "clipped above 0.25" in text


def test_the_newest_picture_of_a_plan_is_embedded_and_text_is_escaped(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "plans").mkdir()
    for step in (0, 20):
        (folder / "plans" / f"step_{step:06d}.png").write_bytes(b"picture" + bytes([step]))
    text = report(folder, "--title", "a <b> & c")
    assert "a &lt;b&gt; &amp; c" in text
    assert "step 000020" in text
    assert Page(text).images[0].startswith("data:image/png;base64,")


def test_measured_waiting_is_drawn_in_place_of_the_estimate_and_told_per_rank_and_micro_step(tmp_path):
    waiting = {"time/waiting": 0.2, "time/waiting_most": 0.3, "time/waiting_least": 0.1, "time/waiting_estimate": 0.15}
    folder = write_run(tmp_path / "run", {name: lambda step, value=value: value for name, value in waiting.items()})
    rows = [f"{step},{rank},{micro},{0.1 * rank + 0.01 * micro}" for step in (3, 7) for rank in range(2) for micro in range(3)]
    (folder / "waiting.csv").write_text("\n".join(["step,rank,micro_step,seconds", *rows]))
    text = report(folder)
    curves = {curve["label"]: curve["points"][0][1] for plot in Page(text).plots for curve in plot}
    assert {curves[name] for name in ("average rank", "rank that waits most", "least", "average rank, estimated")} == {0.2, 0.3, 0.1, 0.15}
    assert "optimizer step 7" in text
    assert ">120</td>" in text  # rank 1, micro-step 2
    assert ">330</td>" in text  # rank 1, sum


def test_a_held_out_reward_that_is_the_mean_itself_is_drawn_once(tmp_path):
    def value(step):
        return 0.5 + step

    same = write_run(tmp_path / "same", {"val/reward/mean": value, "val/reward/exact": value})
    other = write_run(tmp_path / "other", {"val/reward/mean": value, "val/reward/exact": lambda step: 0.0})
    curves = [[curve["label"] for plot in Page(report(folder)).plots for curve in plot] for folder in (same, other)]
    assert [("held-out exact" in labels, "held-out" in labels) for labels in curves] == [(False, True), (True, True)]


def test_scores_of_several_answers_are_drawn_for_the_largest_number_of_them_alone(tmp_path):
    kinds = ("best_of_2", "best_of_4", "best_of_16", "majority_of_8")
    columns = {f"val/reward/{kind}": lambda step, index=index: index + step for index, kind in enumerate(kinds)}
    text = report(write_run(tmp_path / "run", {"val/reward/mean": lambda step: 0.5, **columns}))
    labels = [curve["label"] for curve in Page(text).plots[0]]
    assert labels == ["held-out", "held-out best of 16", "held-out majority of 8", "held-out score"]
    assert "best of" not in text.partition("</div><h2>")[0].partition("<h2>Doctor")[0]  # no tile


def test_metrics_are_found_in_the_newest_version_folder(tmp_path):
    for version in (2, 10, 9):
        write_run(tmp_path / "logs" / f"version_{version}")
    assert RunMetrics.find(str(tmp_path / "logs")).path.parent.name == "version_10"


def test_iterations_of_a_resumed_run_keep_their_numbers_and_rows_without_an_epoch_belong_to_their_step(tmp_path):
    rows = ["epoch,step,length/truncated,rollouts/length_max"]
    rows += [",8,,24", "2,8,0.7,", "2,9,0.7,", "3,10,0.7,", "3,11,0.7,", ",12,,24", "4,12,0.7,"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    iterations = RunMetrics.find(str(tmp_path)).iterations()
    assert [(row["epoch"], row.get("rollouts/length_max")) for row in iterations] == [(2, 24), (3, None), (4, 24)]
    assert "(iteration 4)" in report(tmp_path)


def test_a_run_and_its_resumption_are_one_run_in_which_what_was_done_again_counts_once(tmp_path):
    first, second = write_run(tmp_path / "version_0", num_steps=12), write_run(tmp_path / "version_1")
    lines = (second / "metrics.csv").read_text().splitlines(keepends=True)
    (second / "metrics.csv").write_text("".join([lines[0], *lines[1 + 8 :]]))  # resumed after step 7
    main(["report", str(first), str(second)])
    assert not (first / "report.html").exists()
    whole = write_run(tmp_path / "whole")
    joined = RunMetrics.find(str(first)).resumed_by(RunMetrics.find(str(second)))
    for name in ("train/entropy", "val/reward/score"):
        assert joined.points(name) == RunMetrics.find(str(whole)).points(name)
    drawn = Page((second / "report.html").read_text()).plots
    assert drawn == Page(report(whole)).plots
    with pytest.raises(
        ValueError, match=r"version_1.metrics\.csv has no step before 0, where .*version_0.metrics\.csv begins.*oldest first"
    ):
        RunMetrics.find(str(second)).resumed_by(RunMetrics.find(str(first)))


def test_a_long_run_is_thinned_to_a_readable_number_of_points(tmp_path):
    page = Page(report(write_run(tmp_path / "run", {"train/entropy": PER_STEP["train/entropy"]}, num_steps=2000)))
    assert len(page.plots[1][0]["points"]) == 400


@pytest.mark.parametrize(("content", "message"), [(None, "no metrics.csv"), ("epoch,step\n", "has no rows")])
def test_a_run_without_metrics_exits_with_1_and_says_what_to_log(tmp_path, content, message, capsys):
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path)])
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_ticks_are_round_and_inside_and_numbers_short():
    assert ticks(0, 1, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0, 3e-13, 3) == [0.0, 1e-13, 2e-13, 3e-13]
    assert all(-1.3 <= tick <= 7.9 for tick in ticks(-1.3, 7.9, 4))
    assert [short(value) for value in (12345, 2.5e6, -0.5, 1e-9)] == ["12k", "2.5M", "-0.5", "1.0e-09"]
    assert running_mean([(0, 1.0), (1, 1.0)]) == [(0, 1.0), (1, 1.0)]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the chromium browser")
def test_a_browser_draws_the_page_and_runs_its_script(tmp_path):
    folder = write_run(tmp_path / "run")
    report(folder)
    flags = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = f"file://{folder / 'report.html'}"
    dom = subprocess.run([*flags, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count('class="cursor"') == 16  # the script has reached every plot
    picture = tmp_path / "page.png"
    command = [*flags, "--window-size=1500,1700", f"--screenshot={picture}", page]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 50_000  # an empty page of this size has 10 kB
