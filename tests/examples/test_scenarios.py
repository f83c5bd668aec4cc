import pytest
import yaml

from examples.scenarios import comparison
from examples.scenarios.comparison import FOLDER, SCENARIOS, relative_difference, run_scenarios
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.testing import run_distributed


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_distributed(run_scenarios, 2, str(tmp_path_factory.mktemp("logs")), init_process_group=False)[0]


def configuration(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def test_all_scenarios_are_in_the_folder_and_nothing_else():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_option_of_a_scenario_is_refused_or_without_effect(name):
    findings = explain(run_config(configuration(name))).findings
    assert [finding.text for finding in findings if finding.level != "note"] == []


def test_scenarios_differ_in_how_they_cut_and_spread_only():
    cutting = {"micro_batch_size", "max_tokens_per_rank", "balance", "remove_padding"}
    shared = []
    for name in SCENARIOS:
        content = configuration(name)
        sections = (content["model"]["init_args"], content["data"]["init_args"])
        shared.append([{key: value for key, value in section.items() if key not in cutting} for section in sections])
    assert shared.count(shared[0]) == len(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS[1:])
def test_losses_and_gradients_of_all_scenarios_are_equal(outcomes, name):
    reference, outcome = outcomes["plain"], outcomes[name]
    assert len(outcome.gradients) == len(reference.gradients) == 2
    assert sum(float(gradient.abs().sum()) for gradient in reference.gradients[0].values()) > 0
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-5, abs=1e-7)
    for actual, expected in zip(outcome.gradients, reference.gradients):
        assert relative_difference(actual, expected) < 1e-5


def test_removing_padding_computes_real_tokens_only_and_padding_computes_more(outcomes):
    assert len({outcome.real_tokens for outcome in outcomes.values()}) == 1
    real = outcomes["plain"].real_tokens
    assert outcomes["padding_removal"].computed_tokens == outcomes["recommended"].computed_tokens == real
    assert outcomes["plain"].computed_tokens > 1.5 * real
    # a token budget puts samples of like length together, which saves padding too
    assert real < outcomes["dynamic"].computed_tokens < outcomes["plain"].computed_tokens
    # each micro-batch is padded to a multiple of the two ranks that share it
    shared = outcomes["sequence_parallel"]
    assert real <= shared.computed_tokens <= real + shared.micro_steps


def test_a_token_budget_is_kept_and_needs_fewer_and_more_even_micro_steps(outcomes):
    for name in ("dynamic", "recommended", "sequence_parallel"):
        assert outcomes[name].largest <= configuration(name)["data"]["init_args"]["max_tokens_per_rank"]
    assert outcomes["plain"].largest > 256  # nothing bounds it
    assert outcomes["recommended"].micro_steps < outcomes["dynamic"].micro_steps < outcomes["plain"].micro_steps
    assert outcomes["recommended"].efficiency > 0.98 > outcomes["plain"].efficiency


def test_sequence_parallel_ranks_share_samples_that_none_of_them_could_hold(outcomes):
    outcome = outcomes["sequence_parallel"]
    assert {(plan.dp_size, plan.sp_size) for plan in outcome.plans} == {(1, 2)}
    longest = max(int(plan.lengths.max()) for plan in outcome.plans)
    assert outcome.largest <= 48 < longest


def test_what_a_rank_keeps_for_the_backward_follows_its_largest_micro_batch(outcomes):
    assert 2 * outcomes["sequence_parallel"].saved_bytes < outcomes["recommended"].saved_bytes < outcomes["plain"].saved_bytes


def test_the_comparison_prints_a_row_for_each_scenario(outcomes, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "run_distributed", lambda *args, **kwargs: [outcomes])
    comparison.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in SCENARIOS)
