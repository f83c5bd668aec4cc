"""What a user sees last of a run that failed."""

import pytest
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlbatch.cli.run_errors import report_failure, sentence
from lightning_rlbatch.distributed.failure import PeerFailedError
from lightning_rlbatch.modules.rewards import call_rewards


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    (tmp_path / "my_broken_rewards.py").write_text(
        "def lookup(prompts, completions):\n    return [{}[completion] for completion in completions]\n\n"
        "async def asked(prompts, completions):\n    raise TimeoutError('no server')\n\n"
        "def nothing(prompts, completions):\n    return [float('inf')] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def raised(name):
    module = __import__("my_broken_rewards")
    told = {"prompts": ["2+2=", "2+2="], "completions": ["four", "5"], "completion_ids": [[1], [2]], "columns": {}}
    with pytest.raises(Exception, match=r".") as caught:
        call_rewards([getattr(module, name)], [1.0], **told)
    return caught.value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lookup", ["Reward function 'lookup' raised KeyError: 'four' (my_broken_rewards.py, line 2: ", "2 completions of '2+2='. Catch"]),
        ("asked", ["Reward function 'asked' raised TimeoutError: no server (my_broken_rewards.py, line 5: "]),
        ("nothing", ["Reward function 'nothing' returned inf for completion 0 ('four' of the prompt '2+2=')", "Return a finite number"]),
    ],
)
def test_the_last_line_says_which_function_on_which_prompt_and_what_to_do(name, words, reward_file, capsys):
    report_failure(raised(name), "rlbatch fit")
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith("rlbatch fit failed. Reward function")
    assert all(word in last for word in words)
    assert error.count("rlbatch fit failed") == 1
    assert "Traceback (most recent call last)" in error


def test_an_error_of_the_users_own_code_elsewhere_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "my_broken_model.py").write_text("def build():\n    raise RuntimeError('cannot build')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        __import__("my_broken_model").build()
    assert sentence(caught.value) == "RuntimeError: cannot build (my_broken_model.py, line 2: raise RuntimeError('cannot build'))"


@pytest.mark.parametrize(
    ("error", "rank", "first", "said"),
    [
        (PeerFailedError("Rank 1 failed in phase 'rewards': ValueError: no"), 0, None, ""),
        (PeerFailedError("Rank 1 was lost without an error of its own: killed"), 0, None, "rlbatch fit: Rank 1 was lost"),
        (ValueError("here too"), 2, 1, ""),
        (ValueError("mine"), 0, 0, "rlbatch fit failed. ValueError: mine"),
    ],
)
def test_one_rank_says_it_for_all(error, rank, first, said, monkeypatch, capsys):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    if first is not None:
        error.first_failed_rank = first
    report_failure(error, "rlbatch fit")
    shown = capsys.readouterr().err
    assert said in shown
    assert bool(said) == bool(shown)
