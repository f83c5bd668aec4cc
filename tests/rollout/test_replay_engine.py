import json
import math
from pathlib import Path

import pytest
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
        shares = [ReplayEngine.from_jsonl(tmp_path / "r.jsonl").generate(requests[r::world_size], SAMPLING) for r in range(world_size)]
        assert [shares[i % world_size][i // world_size] for i in range(len(requests))] == expected


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
    engine = ReplayEngine.from_jsonl(file, encode=lambda text: [ord(c) - ord("a") + 10 for c in text], eos_token_id=STOP)
    served = [engine.generate([RolloutRequest([10, 11], seed)], SAMPLING)[0] for seed in range(2)]
    assert [completion.token_ids for completion in served] == [[12, 13, STOP], [14, STOP]]
    assert all(map(math.isnan, served[0].log_probs))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object"),
        ("[1]", "line 2: expected prompt_ids and token_ids"),
        ('{"prompt": "a", "score": 1}', r"but got \['prompt', 'score'\]"),
        ('{"prompt": "a", "completion": "b"}', "line 2 holds text. Pass encode"),
        ('{"prompt_ids": [1], "token_ids": [1, 2], "log_probs": [0.1]}', "2 token_ids need as many log_probs but there are 1"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt_ids": [1], "token_ids": [2]}\n' + line)
    with pytest.raises(ValueError, match=message):
        ReplayEngine.from_jsonl(tmp_path / "x.jsonl")
