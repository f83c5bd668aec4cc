"""One seed for a whole run: `seed_everything`, unless the data module has one; a resumed run goes on with its own."""

import warnings

import pytest
from lightning.pytorch import seed_everything

from lightning_rlbatch.testing import run_distributed
from tests.strategies.runs import ppo, rollouts, run, sft, sft_data

PARTS = {"rollouts": (ppo, rollouts), "samples": (sft, sft_data)}


def trained(kind, size, *, everything=None, seed=None, **options):
    """Run a few steps after `seed_everything`; return the final state and journal."""
    module, data = PARTS[kind]
    if everything is not None:
        seed_everything(everything, verbose=False)
    return run(module(), data(seed=seed), size, **{"max_epochs": 2, **options})


def same(one, other):
    return all((one["parameters"][name] == other["parameters"][name]).all() for name in one["parameters"])


@pytest.mark.parametrize("kind", PARTS)
def test_seed_everything_seeds_the_data_unless_they_have_a_seed_of_their_own(kind):
    def main(rank, size):
        first = trained(kind, size, everything=1 + 10 * rank, max_epochs=1)  # ranks may have seeds of their own: rank 0's counts
        again = trained(kind, size, everything=1, max_epochs=1)
        other = trained(kind, size, everything=2, max_epochs=1)
        given = [trained(kind, size, everything=number, seed=1, max_epochs=1) for number in (3, 4)]
        return same(first, again), same(first, other), same(given[0], first), same(given[0], given[1])

    assert run_distributed(main, 2, init_process_group=False) == [(True, False, True, True)] * 2


@pytest.mark.parametrize("kind", PARTS)
def test_a_resumed_run_goes_on_with_its_seed_whatever_the_process_was_seeded_with(kind, tmp_path):
    path = str(tmp_path / "half.ckpt")

    def main(rank, size):
        whole = trained(kind, size, everything=1, max_epochs=3)
        trained(kind, size, everything=1, save_to=path)
        return same(whole, trained(kind, size, everything=2, max_epochs=3, ckpt_path=path))

    assert run_distributed(main, 1, init_process_group=False) == [True]


def test_resuming_with_another_order_of_prompts_says_so_and_inside_an_iteration_it_is_refused(tmp_path):
    path = str(tmp_path / "half.ckpt")

    def main(rank, size):
        run(ppo(), rollouts(seed=1), size, max_epochs=1, save_to=path)
        with pytest.warns(UserWarning, match=r"another order of prompts \(seed was 1 and is 2, train_batch_size was 4 and is 6\)"):
            run(ppo(), rollouts(seed=2, train_batch_size=6), size, max_epochs=2, ckpt_path=path)
        run(ppo(), rollouts(seed=1), size, max_epochs=2, max_steps=1, save_to=path)
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"behind mini-batch 1 of iteration 0.*mini_batch_size was 2 and is 1"):
            run(ppo(), rollouts(seed=1, mini_batch_size=1), size, max_epochs=2, ckpt_path=path)

    run_distributed(main, 1, init_process_group=False)


def test_a_state_that_is_loaded_before_the_prompts_are_read_keeps_its_seed_and_raises_nothing():
    seed_everything(3, verbose=False)
    first = rollouts()
    first.setup("fit")
    state = {**first.state_dict(), "mini_batch": 1}
    seed_everything(4, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = rollouts()
        second.load_state_dict(state)
        second.setup("fit")
    assert second.state_dict() == state
    assert second.mini_batches_of(2) == first.mini_batches_of(2)
