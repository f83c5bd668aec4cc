import pytest

from lightning_rlbatch.rollout.engine import RolloutRequest, SamplingParams, rollout_seed


def test_rollout_seeds_differ_in_every_part_and_are_63_bit() -> None:
    seeds = {rollout_seed(s, i, p, r) for s in range(4) for i in range(6) for p in range(10) for r in range(10)}
    assert len(seeds) == 4 * 6 * 10 * 10
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rollout_seed(1, 2, 3, 4) != rollout_seed(2, 1, 3, 4) != rollout_seed(1, 2, 4, 3)


def test_rollout_seed_is_a_constant_of_the_package() -> None:
    # another value would change the samples of every recorded run
    assert rollout_seed(3, 1, 4, 15) == 6764533548554859362


def test_negative_seeds_are_welcome() -> None:
    assert rollout_seed(-1, 0, 0, 0) != rollout_seed(1, 0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 but is 0"),
        ({"temperature": -0.5}, "temperature must be 0 .* but is -0.5"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k .* but is -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.5}, "but is 1.5"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(("seed", "limit"), [(-1, None), (2**63, None), (0, 0), (0, -3)])
def test_requests_that_no_engine_could_answer_are_refused(seed: int, limit: int | None) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\*\*63\)" if limit is None else f"at least 1, or None, but is {limit}"):
        RolloutRequest([3], seed, limit)


def test_stop_tokens_given_as_a_list_make_a_hashable_value() -> None:
    assert hash(SamplingParams(stop_token_ids=[3, 4])) == hash(SamplingParams(stop_token_ids=(3, 4)))  # type: ignore[arg-type]  # YAML gives lists
