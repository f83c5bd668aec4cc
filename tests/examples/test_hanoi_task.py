import time

import pytest
import torch

from examples.hanoi.model import build_policy
from examples.hanoi.task import (
    DISKS,
    MOVES,
    HanoiDemonstrations,
    HanoiTokenizer,
    hanoi_reward,
    held_out_prompts,
    is_solved,
    puzzles,
    train_prompts,
)


def hanoi_moves(num_disks: int, start: str, target: str) -> list[str]:
    """The textbook recursion."""
    if num_disks == 0:
        return []
    (spare,) = set("ABC") - {start, target}
    return [*hanoi_moves(num_disks - 1, start, spare), start + target, *hanoi_moves(num_disks - 1, spare, target)]


def test_there_are_thirty_puzzles_with_the_optimal_answers_of_the_textbook() -> None:
    assert len({(p.num_disks, p.start, p.target) for p in puzzles()}) == len(puzzles()) == 30
    for puzzle in puzzles():
        assert list(puzzle.solution) == hanoi_moves(puzzle.num_disks, puzzle.start, puzzle.target)
        assert len(puzzle.solution) == 2**puzzle.num_disks - 1


def test_each_puzzle_holds_out_one_wording_and_every_wording_is_held_out_somewhere() -> None:
    train, held_out = {row["prompt"] for row in train_prompts()}, {row["prompt"] for row in held_out_prompts()}
    assert (len(train), len(held_out), len(train & held_out)) == (90, 30, 0)
    for puzzle in puzzles():
        assert len(held_out.intersection(puzzle.wordings)) == 1
        assert len(train.intersection(puzzle.wordings)) == 3
    for num_disks in DISKS:
        assert {puzzle.held_out_wording for puzzle in puzzles() if puzzle.num_disks == num_disks} == {0, 1, 2, 3}


def test_demonstrations_never_show_a_held_out_prompt_but_all_others() -> None:
    tokenizer, data = HanoiTokenizer(), HanoiDemonstrations(size=2000)
    shown = {tokenizer.decode(sample["input_ids"][~sample["response_mask"]].tolist()) for sample in (data[i] for i in range(len(data)))}
    assert shown == {row["prompt"] for row in train_prompts()}


def test_optimal_answers_are_rewarded_in_every_wording() -> None:
    for puzzle in puzzles():
        answer = " ".join(puzzle.solution)
        assert hanoi_reward(puzzle.wordings, [answer] * 4, num_disks=[puzzle.num_disks] * 4) == [1.0] * 4


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "empty"),
        ("AC", "not finished: the verifier gives partial credit, which is not used"),
        ("AC AB BC", "ends on the wrong peg"),
        ("AB AC BC AB", "the larger disk lies on the smaller one"),
        ("AC AC CB", "a larger disk onto a smaller one"),
        ("BA AC AB CB", "from an empty peg"),
        ("AB BC AB CB", "solves it, with one move too many"),
        ("AC AB CB AC", "goes on after the target"),
        ("AC 5 CB", "a token that is no move"),
        ("AC AB CB >", "a token that is no move at the end"),
    ],
)
def test_anything_but_the_shortest_solution_earns_nothing(answer: str, why: str) -> None:
    assert hanoi_reward(["2:A>B="], [answer]) == [0.0], why


def test_a_prompt_that_is_no_puzzle_is_an_error() -> None:
    with pytest.raises(ValueError, match="Expected a puzzle such as '5:B>A='"):
        is_solved("7:A>B=", "AB")


def test_a_random_change_of_a_move_is_never_a_solution() -> None:
    for puzzle in puzzles():
        for index in range(0, len(puzzle.solution), 7):
            for move in MOVES:
                changed = [*puzzle.solution[:index], move, *puzzle.solution[index + 1 :]]
                assert is_solved(puzzle.wordings[0], " ".join(changed)) == (move == puzzle.solution[index])


def test_judging_an_iteration_takes_a_fraction_of_a_second() -> None:
    puzzle = puzzles()[-1]
    answers = [" ".join([*puzzle.solution[:-1], *[MOVES[i % 6]] * (i // 6), puzzle.solution[-1]]) for i in range(256)]
    start = time.process_time()
    hanoi_reward([puzzle.wordings[0]] * 256, answers)
    assert time.process_time() - start < 0.3


def test_tokenizer_round_trips_and_leaves_special_tokens_out() -> None:
    tokenizer = HanoiTokenizer()
    for puzzle in puzzles():
        for prompt in puzzle.wordings:
            text = prompt + " ".join(puzzle.solution)
            ids = tokenizer.encode(text)
            assert len(ids) == len(prompt) + len(puzzle.solution)
            assert tokenizer.decode([tokenizer.pad_token_id, *ids, tokenizer.eos_token_id]) == text
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<pad> <eos>"
    assert tokenizer.batch_decode([[1], tokenizer.encode("AB")]) == ["", "AB"]
    with pytest.raises(ValueError, match="AX"):
        tokenizer.encode("AX")


def test_every_sequence_of_tokens_can_be_decoded_and_judged() -> None:
    tokenizer = HanoiTokenizer()
    garbage = torch.randint(len(tokenizer), (200, 5), generator=torch.Generator().manual_seed(0)).tolist()
    assert hanoi_reward(["3:A>B="] * 200, tokenizer.batch_decode(garbage)) == [0.0] * 200


def test_demonstrations_are_repeatable_and_as_noisy_as_asked() -> None:
    first, second = HanoiDemonstrations(size=600, noise=0.06, seed=1), HanoiDemonstrations(size=600, noise=0.06, seed=1)
    tokenizer, moves, wrong = HanoiTokenizer(), 0, 0
    solutions = {prompt: puzzle.solution for puzzle in puzzles() for prompt in puzzle.wordings}
    for index in range(600):
        assert torch.equal(first[index]["input_ids"], second[index]["input_ids"])
        prompt, arrow, answer = tokenizer.decode(first[index]["input_ids"].tolist()).rpartition("=")
        moves += len(answer.split())
        wrong += sum(a != b for a, b in zip(answer.split(), solutions[prompt + arrow]))
    assert abs(wrong / moves - 0.06 * 5 / 6) < 0.008  # a sixth of the random moves happen to be right
    assert not torch.equal(HanoiDemonstrations(size=9, seed=2)[0]["input_ids"], first[0]["input_ids"])
    with pytest.raises(IndexError):
        first[600]
    with pytest.raises(ValueError, match="noise=2"):
        HanoiDemonstrations(noise=2)


def test_the_policy_fits_the_task_and_its_weights_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    policy = build_policy(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert 130_000 < sum(parameter.numel() for parameter in policy.parameters()) < 170_000
    assert policy.config.vocab_size == HanoiTokenizer.vocab_size
    assert policy.config.max_position_embeddings >= 6 + 72
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), build_policy(seed=3).parameters()))
    assert not torch.equal(policy.lm_head.weight, build_policy(seed=4).lm_head.weight)
