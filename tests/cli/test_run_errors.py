"""What a user sees last of a run that failed."""

import jsonargparse
import pytest
from lightning.pytorch.callbacks import Callback
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


def refuses(n: int = 0):
    raise ValueError(f"n must be above 3 but is {n}")


class Refuses(Callback):
    def __init__(self, n: int = 0):
        refuses(n)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `instantiate_classes`, which Lightning calls
@pytest.mark.parametrize(
    ("value", "last"),
    [
        ([{"class_path": f"{__name__}.Refuses"}], "rlbatch fit failed. ValueError: n must be above 3 but is 0 (test_run_errors.py, line "),
        (
            [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"save_top_k": 3}}],
            "rlbatch fit failed. MisconfigurationException: ModelCheckpoint(save_top_k=3, monitor=None) is not a valid",
        ),
    ],
)
def test_what_the_constructor_of_a_configured_class_raises_is_told_without_the_types_that_it_might_have_been(value, last, capsys):
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback] | Callback | None)
    with pytest.raises(ValueError, match="Does not validate") as caught:
        parser.instantiate_classes(parser.parse_object({"callbacks": value}))
    report_failure(caught.value, "rlbatch fit")
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(last)
    assert "Union subtypes" not in error
