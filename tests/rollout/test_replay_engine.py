import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_toys import STOP, mixed_requests, toy_llama

from lightning_rlbatch.rollout.engine import Completion, RolloutRequest, SamplingParams
from lightning_rlbatch.rollout.replay_engine import RecordedCompletion, RecordingEngine, ReplayEngine
from lightning_rlbatch.rollout.transformers_engine import TransformersEngine

SAMPLING = SamplingParams(max_new_tokens=16, stop_token_ids=(STOP,))


def test_what_was_recorded_is_replayed_to_the_last_bit_on_any_share(tmp_path: Path) -> None:
    recording = RecordingEngine(TransformersEngine(toy_llama(), pad_token_id=0), tmp_path / "r.jsonl")
    requests = mixed_requests()
    expected = recording.generate(requests[:7], SAMPLING) + recording.generate(requests[7:], SAMPLING)
    for world_size in (1, 2, 4):
        shares = [ReplayEngine.from_file(tmp_path / "r.jsonl").generate(requests[r::world_size], SAMPLING) for r in range(world_size)]
        assert [shares[i % world_size][i // world_size] for i in range(len(requests))] == expected


def test_what_an_engine_returns_as_arrays_is_recorded_and_its_wishes_are_told(tmp_path: Path) -> None:
    class Arrays(ReplayEngine):
        merges_adapters = True

        def generate(self, requests: Any, sampling: SamplingParams, on_progress: Any = None) -> Any:
            return [Completion(np.array([5, 6]), torch.tensor([-0.5, torch.nan]), "stop") for _ in requests]

    recording = RecordingEngine(Arrays([RecordedCompletion((3,), Completion([5], [-1.0], "stop"))]), tmp_path / "r.jsonl")
    returned = recording.generate([RolloutRequest([3], 0)], SAMPLING)
    (served,) = ReplayEngine.from_file(tmp_path / "r.jsonl").generate([RolloutRequest([3], 0)], SAMPLING)
    assert [completion.token_ids for completion in (*returned, served)] == [[5, 6], [5, 6]]
    assert [str(value) for value in served.log_probs] == ["-0.5", "nan"]
    assert recording.merges_adapters
    assert not RecordingEngine(ReplayEngine([RecordedCompletion((3,), served)]), tmp_path / "s.jsonl").merges_adapters


def test_a_request_that_recurs_is_served_what_was_recorded_in_its_order_and_then_again() -> None:
    records = [RecordedCompletion((3,), Completion([token], [-1.0], "stop"), seed) for token, seed in ((5, 0), (6, 1), (7, 0), (8, 0))]
    engine = ReplayEngine(records)
    served = [engine.generate([RolloutRequest([3], 0), RolloutRequest([3], 1)], SAMPLING) for _ in range(4)]
    assert [[completion.token_ids[0] for completion in pair] for pair in served] == [[5, 6], [7, 6], [8, 6], [5, 6]]
    twice = ReplayEngine(records).generate([RolloutRequest([3], 0)] * 2, SAMPLING)
    assert [completion.token_ids[0] for completion in twice] == [5, 7]


def test_an_unknown_seed_picks_one_of_the_prompts_completions() -> None:
    records = [RecordedCompletion((3,), Completion([token], [-1.0], "stop")) for token in range(5)]
    engine = ReplayEngine(records)
    served = [engine.generate([RolloutRequest([3], seed)], SAMPLING)[0].token_ids[0] for seed in range(100)]
    assert set(served) == set(range(5))
    assert engine.generate([RolloutRequest([3], 42)], SAMPLING) == engine.generate([RolloutRequest([3], 42)], SAMPLING)


def test_a_prompt_that_was_not_recorded_is_an_error() -> None:
    engine = ReplayEngine([RecordedCompletion((3,), Completion([1], [-1.0], "stop"))])
    with pytest.raises(ValueError, match=r"Prompt 1 \(2 tokens, beginning with \[3, 4\]\) was not recorded"):
        engine.generate([RolloutRequest([3], 0), RolloutRequest([3, 4], 0)], SAMPLING)
    with pytest.raises(ValueError, match="got none"):
        ReplayEngine([])


@pytest.mark.parametrize("keys", [("input", "output"), ("prompt", "completion")])
def test_text_dumps_of_other_trainers_are_read(tmp_path: Path, keys: tuple[str, str]) -> None:
    file = tmp_path / "1.jsonl"
    file.write_text("".join(json.dumps({keys[0]: "ab", keys[1]: text, "score": 1.0, "step": 1}) + "\n" for text in ("cd", "e")))
    engine = ReplayEngine.from_file(file, encode=lambda text: [ord(c) - ord("a") + 10 for c in text], eos_token_id=STOP)
    served = [engine.generate([RolloutRequest([10, 11], seed)], SAMPLING)[0] for seed in range(2)]
    assert [completion.token_ids for completion in served] == [[12, 13, STOP], [14, STOP]]
    assert all(map(math.isnan, served[0].log_probs))


def test_conversations_are_encoded_by_the_given_function_and_a_line_that_breaks_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "1.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "cd"}], "reward": 1.0},
        {"prompt": "ab", "completion": "\u00e9\u2028e", "reward": None},
    ]
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + json.dumps(rows[1])[:-30]
    file.write_text(text, encoding="utf-8")

    def encode(prompt: Any) -> list[int]:
        return [20, *encode(prompt[0]["content"])] if isinstance(prompt, list) else [10 + ord(c) % 30 for c in prompt]

    with pytest.warns(UserWarning, match=r"The end of .*1.jsonl breaks off: line 3 is left out"):
        engine = ReplayEngine.from_file(file, encode=encode)
    served = [engine.generate([RolloutRequest(encode(row["prompt"]), 0)], SAMPLING)[0].token_ids for row in rows]
    assert served == [encode("cd"), encode("\u00e9\u2028e")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "Line 2 of .*x.jsonl is not JSON"),
        ("[1]", r"Line 2 of .*x.jsonl must be a JSON object but is \[1\]"),
        ('{"prompt": "a", "score": 1}', r"but got \['prompt', 'score'\]"),
        ('{"prompt": "a", "completion": "b"}', "Line 2 of .*x.jsonl: the row holds text; pass encode"),
        ('{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}', "must be text, or one message of the assistant with text"),
        ('{"prompt_ids": [1], "token_ids": "12"}', "Line 2 of .*: expected token_ids to be a list of token ids but got '12'"),
        ('{"prompt_ids": [1], "token_ids": [1, 2], "log_probs": [0.1]}', "2 token_ids need as many log_probs but there are 1"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt_ids": [1], "token_ids": [2]}\n' + line)
    with pytest.raises(ValueError, match=message):
        ReplayEngine.from_file(tmp_path / "x.jsonl", encode=list if "role" in line else None)
