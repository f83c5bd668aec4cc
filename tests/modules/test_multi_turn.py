"""Rollouts of several turns: what the policy said is trained, what the environment said is not, on any number of ranks."""

import asyncio

import pytest
import torch
from hand_made import plain_log_probs
from helpers import (
    EOS,
    VOCAB,
    StepRecorder,
    ToyTokenizer,
    length_reward,
    make_trainer,
    relative_difference,
    tiny_llama,
)

from lightning_rlbatch.callbacks import RolloutCallback
from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.data.prompt_reading import read_prompts
from lightning_rlbatch.functional import GAE, PackedBatch
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.modules.turns import Response, ResponseSampler
from lightning_rlbatch.rollout import Completion, RolloutRequest, SamplingParams
from lightning_rlbatch.testing import run_distributed

PROMPTS = ["a", "bc", "d"]


class ChattyTokenizer(ToyTokenizer):
    """Letters as tokens, and a template that says ``u`` for the user, ``t`` for a tool, ``p`` for the policy and ``e`` at a turn's end."""

    eos_token = "e"

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [EOS if letter == "e" else ord(letter) - ord("a") + 3 for letter in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, continue_final_message):
        assert not tokenize
        assert add_generation_prompt is not continue_final_message
        turns = [{"assistant": "p"}.get(m["role"], m["role"][0]) + m["content"] + "e" for m in messages]
        return "".join(turns).removesuffix("e" if continue_final_message else "") + ("p" if add_generation_prompt else "")


class Talker:
    """An engine that answers every request with the same tokens; keeps what it was asked."""

    def __init__(self, answer=(5, 6, EOS)):
        self.answer = list(answer)
        self.calls = []

    def generate(self, requests, sampling, on_progress=None):
        self.calls.append(list(requests))
        done = []
        for request in requests:
            ids = self.answer[: request.limit(sampling)]
            done.append(Completion(ids, [-float(place + 1) for place in range(len(ids))], "stop" if ids[-1] == EOS else "length"))
            if on_progress is not None:
                on_progress(1, len(ids))
        return done


def respond(environment, *, engine=None, prompts=PROMPTS, limit=40, max_turns=None, tokenizer=None):
    rows = [prompt if isinstance(prompt, dict) else {"prompt": prompt, "goal": index} for index, prompt in enumerate(prompts)]
    batch = read_prompts(
        rows, tokenizer or ToyTokenizer(), name="rows", rollouts_per_prompt=1, max_prompt_length=20, max_response_length=limit, seed=0
    )
    responses = [Response(index, 100 + index) for index in range(len(rows))]
    sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=(EOS,))
    engine = engine or Talker()
    sampler = ResponseSampler(engine, batch, sampling, group=None, environment=environment, max_turns=max_turns)
    sampler.sample(responses)
    return responses, engine, batch


# -- turns, one by one -------------------------------------------------------------------------------------------------------------------


def test_turns_alternate_and_only_the_policys_tokens_are_marked_as_sampled():
    responses, engine, _ = respond(lambda turn, prompts: ["xy" if turn < 2 else None] * len(prompts))
    said, reply = [5, 6, EOS], [26, 27]
    for response in responses:
        assert response.token_ids == said + reply + said + reply + said
        assert response.sampled == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3
        assert response.log_probs == [-1.0, -2.0, -3.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0, 0.0, -1.0, -2.0, -3.0]
        assert response.finish_reason == "stop"
    assert [request.prompt_ids for request in engine.calls[2]] == [
        prompt + said + reply + said + reply for prompt in ([3], [4, 5], [6])
    ]  # a later turn continues the tokens of the earlier ones


def test_every_turn_has_random_numbers_of_its_own():
    _, engine, _ = respond(lambda prompts: ["x"] * len(prompts), max_turns=4)
    seeds = [request.seed for call in engine.calls for request in call]
    assert len(set(seeds)) == len(seeds) == 12
    assert seeds[:3] == [100, 101, 102]


def test_responses_end_one_by_one():
    responses, engine, _ = respond(lambda prompts, turn: [None if len(prompt) > 1 or turn else "x" for prompt in prompts])
    assert [len(call) for call in engine.calls] == [3, 2]
    assert [response.sampled.count(False) for response in responses] == [1, 0, 1]


def test_environment_gets_what_it_asks_for_and_nothing_else():
    seen = []

    async def environment(prompts, completions, turns, turn, goal):
        await asyncio.sleep(0)
        seen.append((prompts, completions, turns, turn, goal))
        return [None if turn else "x"] * len(prompts)

    respond(environment)
    assert seen == [
        (PROMPTS, ["cd"] * 3, ["cd"] * 3, 0, [0, 1, 2]),
        (PROMPTS, ["cdxcd"] * 3, ["cd"] * 3, 1, [0, 1, 2]),
    ]
    everything = []
    respond(lambda **arguments: everything.append(sorted(arguments)) or [None] * 3)
    assert everything == [["completions", "goal", "prompts", "turn", "turns"]]


def test_environment_that_changes_what_it_gets_changes_no_data():
    def environment(prompts, completions, goal):
        for messages, listed in zip([*prompts, *completions], goal * 2):
            messages.clear()
            listed.append("spoilt")
        return [None] * len(goal)

    rows = [{"prompt": [{"role": "user", "content": letter}], "goal": [letter]} for letter in "ab"]
    responses, _, batch = respond(environment, prompts=rows, tokenizer=ChattyTokenizer())
    assert batch.conversations == [row["prompt"] for row in rows] == [[{"role": "user", "content": letter}] for letter in "ab"]
    assert batch.columns == [{"goal": ["a"]}, {"goal": ["b"]}]
    assert [len(response.messages) for response in responses] == [1, 1]


def test_number_of_turns_is_bounded():
    responses, engine, _ = respond(lambda prompts: ["x"] * len(prompts), max_turns=2)
    assert len(engine.calls) == 2
    assert all(response.sampled.count(False) == 1 and response.finish_reason == "stop" for response in responses)


@pytest.mark.parametrize("limit", range(3, 14))
def test_whole_response_stays_within_its_limit_and_ends_with_words_of_the_policy(limit):
    responses, engine, _ = respond(lambda prompts: ["xy"] * len(prompts), limit=limit)
    for response in responses:
        assert len(response.token_ids) <= limit
        assert response.sampled[-1]
        assert response.finish_reason == "length"
    room = [limit, limit - 5, limit - 10]
    assert [call[0].limit(SamplingParams(limit)) for call in engine.calls] == [tokens for tokens in room if tokens > 0]


def test_engine_that_ignores_the_limit_of_a_request_is_cut():
    class Deaf(Talker):
        def generate(self, requests, sampling, on_progress=None):
            return super().generate([RolloutRequest(request.prompt_ids, request.seed) for request in requests], sampling)

    responses, _, _ = respond(lambda prompts: ["xy"] * len(prompts), engine=Deaf(), limit=7)
    assert [response.token_ids for response in responses] == [[5, 6, EOS, 26, 27, 5, 6]] * 3
    assert {response.finish_reason for response in responses} == {"length"}


def test_response_that_was_cut_off_is_not_answered():
    responses, engine, _ = respond(lambda prompts: ["x"] * len(prompts), engine=Talker([5] * 99), limit=6)
    assert len(engine.calls) == 1
    assert {response.finish_reason for response in responses} == {"length"}


@pytest.mark.parametrize(
    ("replies", "error", "message"),
    [
        (["x"], ValueError, "returned 1 replies for 3 completions"),
        (None, TypeError, "must return one reply (or None) per completion, in order, but returned None"),
        ("abc", TypeError, "must return one reply (or None) per completion, in order, but returned 'abc'"),
        ([1, 2, 3], TypeError, "must return text or None for each response but returned 1"),
        ([{"role": "tool", "content": "x"}] * 3, TypeError, "must return text or None"),
    ],
)
def test_wrong_replies_are_refused(replies, error, message):
    with pytest.raises(error, match="environment") as raised:
        respond(lambda prompts: replies)
    assert message in str(raised.value)


def test_conversations_go_on_in_the_words_of_the_template():
    prompts = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]]
    seen = []

    def environment(prompts, completions, turn):
        seen.append(completions)
        tools = [{"role": "tool", "content": letter} for letter in "yz"]  # two calls were answered
        return ["x", tools] if turn == 0 else [None, None]

    responses, _, batch = respond(environment, prompts=prompts, tokenizer=ChattyTokenizer())
    encode = ChattyTokenizer().encode
    assert batch.prompt_ids == [encode("uaep", False), encode("ubepc", False)]  # the second goes on with the assistant's words
    said = [5, 6, EOS]
    assert [response.token_ids for response in responses] == [said + encode(f"{turn}ep", False) + said for turn in ("ux", "tyetz")]
    answer = {"role": "assistant", "content": "cd"}
    tools = [{"role": "tool", "content": letter} for letter in "yz"]
    assert seen[1] == [[answer, {"role": "user", "content": "x"}, answer], [answer, *tools, answer]]
    with pytest.raises(ValueError, match=r"environment's reply cannot be tokenized: .*'tool'.* \(KeyError: 'content'\)"):
        respond(lambda prompts: [{"role": "tool"}, None], prompts=prompts, tokenizer=ChattyTokenizer())


def test_options_of_turns_need_each_other():
    with pytest.raises(ValueError, match="max_turns=3 bounds the turns between the policy and an environment, and there is none"):
        PPOModule(tiny_llama, [length_reward], max_turns=3)
    with pytest.raises(ValueError, match="max_turns=0"):
        PPOModule(tiny_llama, [length_reward], max_turns=0, environment=lambda prompts: prompts)


# -- whole runs ----------------------------------------------------------------------------------------------------------------------------


def tool(prompts, completions, turn, goal):
    """Say two letters, to some longer than to others; enough after ``goal`` turns."""
    said = [chr(97 + len(completion) * 7 % 20) * (1 + most) for completion, most in zip(completions, goal)]
    return [None if turn >= most else text for text, most in zip(said, goal)]


def words_said(prompts, completions, completion_ids):
    return [float(len(set(ids))) for ids in completion_ids]


class Keep(RolloutCallback):
    def on_rollout_start(self, trainer, pl_module, prompts, iteration):
        self.started = iteration, prompts.prompts

    def on_rollout_end(self, trainer, pl_module, rollouts):
        assert self.started == (rollouts.iteration, rollouts.prompts.prompts)
        self.samples = rollouts.store.samples
        self.table = rollouts.store.table


def chatty_policy():
    """A policy that ends about every fourth token with the end token, so that turns follow each other."""
    model = tiny_llama(dtype=torch.get_default_dtype())
    model.lm_head.weight.data[EOS] *= 3.0
    return model


def run(rank, world_size, **options):
    torch.set_default_dtype(torch.float64)
    module = PPOModule(
        chatty_policy, [words_said], environment=tool, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05), **options
    )
    data = RolloutDataModule(
        lambda: [{"prompt": letter * (1 + index % 2), "goal": index % 4} for index, letter in enumerate("abcdefg")], ToyTokenizer(),
        train_batch_size=5, mini_batch_size=3, rollouts_per_prompt=3, max_tokens_per_rank=40, max_prompt_length=2, max_response_length=24,
    )  # fmt: skip
    keep, steps = Keep(), StepRecorder()
    make_trainer(world_size, callbacks=[keep, steps], max_epochs=1).fit(module, datamodule=data)
    samples = {
        int(index): {name: keep.samples.split_per_sample(name)[place] for name in keep.samples.per_token}
        for place, index in enumerate(keep.samples["sample_id"])
    }
    metrics = [{k: v for k, v in row.items() if k.split("/")[0] not in ("balance", "time", "perf")} for row in steps.metrics]
    return samples, metrics, keep.table


@pytest.fixture(scope="module")
def alone():
    return run_distributed(run, 1, init_process_group=False)[0]


def test_engine_and_trainer_agree_on_the_policys_words_only(alone):
    samples, metrics, table = alone
    assert sum((~row["response_mask"][row["response_mask"].int().argmax() :]).any() for row in samples.values()) >= 4  # several turns
    model = chatty_policy().double()
    for index, row in samples.items():
        mask = row["response_mask"]
        expected = plain_log_probs(PackedBatch.from_samples([{"input_ids": row["input_ids"], "response_mask": mask}]), model)
        for name in ("old_log_probs", "rollout_log_probs"):
            torch.testing.assert_close(row[name][mask].double(), expected[mask], atol=1e-5, rtol=1e-5)
        assert table.num_response_tokens[index] == int(mask.sum())
        assert (row["input_ids"] < VOCAB).all()
    assert metrics[0]["kl/rollout_mismatch"] < 1e-9
    assert metrics[0]["length/mean"] == pytest.approx(sum(table.num_response_tokens) / 15)
    assert sum(row["train/num_tokens"] for row in metrics) == sum(table.num_response_tokens)


@pytest.mark.parametrize("world_size", [2, 4])
def test_conversations_do_not_depend_on_the_number_of_ranks(world_size, alone):
    samples, metrics, _ = alone
    ranks = run_distributed(run, world_size, init_process_group=False)
    assert sorted(index for own, _, _ in ranks for index in own) == list(range(15))
    for own, own_metrics, _ in ranks:
        for index, row in own.items():
            assert row["input_ids"].tolist() == samples[index]["input_ids"].tolist()
            assert row["response_mask"].tolist() == samples[index]["response_mask"].tolist()
        for step, (row, expected) in enumerate(zip(own_metrics, metrics)):
            assert relative_difference(row, expected) < 1e-9, step


def test_generalised_advantages_pass_over_the_environments_turns(alone):
    def fn(rank, world_size):
        return run(rank, world_size, critic="shared", advantage=GAE(gamma=1.0, lam=1.0, whiten=False))

    samples, metrics, table = run_distributed(fn, 1, init_process_group=False)[0]
    for index, row in samples.items():
        mask = row["response_mask"]  # without discount the reward at the end is what every token returns
        expected = table.rewards[index].expand(int(mask.sum()))
        torch.testing.assert_close(row["returns"][mask].double(), expected, atol=1e-6, rtol=1e-6)
    assert metrics[0]["value/loss"] > 0


def test_overlong_penalty_counts_the_environments_turns_as_the_limit_does():
    def fn(rank, world_size):
        return run(rank, world_size, overlong_buffer=12, overlong_factor=2.0)

    samples, _, table = run_distributed(fn, 1, init_process_group=False)[0]
    penalised = 0
    for index, row in samples.items():
        response = row["input_ids"][int(row["response_mask"].int().argmax()) :].tolist()
        penalty = -2.0 * max(0, len(response) - 12) / 12
        penalised += penalty < 0
        assert float(table.rewards[index]) == pytest.approx(words_said(None, None, [response])[0] + penalty)
    assert 0 < penalised < len(samples)


def test_environment_that_fails_on_one_rank_ends_all_with_its_error():
    def fn(rank, world_size):
        def broken(prompts, turn, goal):
            if rank == 1 and turn == 1:
                raise RuntimeError("the sandbox is gone")
            return ["x"] * len(prompts)

        data = RolloutDataModule(
            lambda: [{"prompt": "ab", "goal": 1}] * 4, ToyTokenizer(), train_batch_size=4, mini_batch_size=4, max_tokens_per_rank=40,
            max_prompt_length=2, max_response_length=30,
        )  # fmt: skip
        module = PPOModule(chatty_policy, [length_reward], environment=broken)
        with pytest.raises(RuntimeError, match="the sandbox is gone") as raised:
            make_trainer(world_size, max_epochs=1).fit(module, datamodule=data)
        return str(raised.value)

    messages = run_distributed(fn, 2, init_process_group=False)
    assert messages[1] == "the sandbox is gone"
    assert messages[0] == "Rank 1 failed in phase 'generation': RuntimeError: the sandbox is gone"
