"""Whichever rank fails in whichever phase: every rank ends within seconds, and says what happened where."""

import multiprocessing
import os
import time
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.strategies.failure import FailureReport
from lightning_rlbatch.testing import run_distributed
from lightning_rlbatch.testing.distributed import free_port
from tests.helpers import make_trainer
from tests.strategies.faults import APART, RANKS, SETUP, TOGETHER, exit_early, faulty_run, interrupt, kill, leave, raise_boom, sigterm
from tests.strategies.runs import ppo, prompt_rows, rollouts, sft, sft_data


def matrix(cases, *args, **options):
    """Return the results of :func:`matrix_rows` by case."""
    return dict(zip(cases, matrix_rows(cases, *args, **options)))


def matrix_rows(cases, action, folder, *, size=2, linger=lambda number, rank: time.sleep(1.0), saves=True, strategy=None):
    """Run several worlds at once, each with one fault; return the results per case, None for a rank that was killed.

    Args:
        cases: (phase, rank of the fault) per world.
        action: What happens there; or one per case.
        folder: For results and checkpoints.
        size: Ranks of each world.
        linger: What a rank does with world number and rank before it ends: others may still be using its connections.
        saves: Whether checkpoints are written.
        strategy: None is ours.
    """
    ports = [free_port() for _ in cases]

    def main(process, _):
        number, rank = divmod(process, size)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(ports[number]))
        (phase, bad_rank), act = cases[number], action if callable(action) else action[number]
        file = folder / f"{process}.pt"
        child = os.fork()  # a killed rank must not end this process, which reports it
        if child == 0:
            savers = (ModelCheckpoint(str(folder / str(number)), every_n_epochs=1, save_top_k=-1),) if saves else ()
            torch.save(faulty_run(rank, size, phase, bad_rank, act, callbacks=savers, strategy=strategy), file)
            linger(number, rank)
            os._exit(0)
        os.waitpid(child, 0)
        return torch.load(file) if file.exists() else None

    results = run_distributed(main, size * len(cases), init_process_group=False, timeout=80)
    return [results[first : first + size] for first in range(0, len(results), size)]


@pytest.mark.parametrize("bad_rank", RANKS)
def test_an_error_on_one_rank_ends_all_ranks_naming_it(bad_rank, tmp_path):
    for case, results in matrix([(phase, bad_rank) for phase in APART], raise_boom, tmp_path).items():
        assert results[bad_rank][:2] == ("BoomError", "the cause"), case
        name, text, seconds, _ = results[1 - bad_rank]
        assert name == "PeerFailedError", case
        assert f"Rank {bad_rank} failed" in text, case
        assert "BoomError: the cause" in text, case
        assert seconds < 30, case


def test_under_ddp_all_ranks_end_too_and_name_the_one_that_failed_or_was_killed(tmp_path):
    cases = [("data setup", 0), ("model loading", 1), ("backward", 0), ("checkpoint", 1), ("data setup", 1), ("loss", 0)]
    actions = [raise_boom] * 4 + [kill] * 2
    rows = matrix_rows(cases, actions, tmp_path, strategy="ddp")
    for (phase, bad_rank), action, results in zip(cases, actions, rows):
        if action is raise_boom:
            assert results[bad_rank][:2] == ("BoomError", "the cause"), phase
        name, text, seconds, _ = results[1 - bad_rank]
        assert name == "PeerFailedError", phase
        assert f"Rank {bad_rank} {'failed: BoomError: the cause' if action is raise_boom else 'was lost'}" in text, phase
        assert seconds < 30, phase


def lose_a_server():
    raise ConnectionResetError("Connection reset by peer: the server of the logger timed out for \udcff.png")  # a file's name, half decoded


def test_an_error_that_only_sounds_like_a_lost_rank_is_named_too(tmp_path):
    cases = [("callback", 0), ("loss", 1), ("epoch start", 1)]  # the last one while the other rank waits for weights
    for (_, bad_rank), results in matrix(cases, lose_a_server, tmp_path).items():
        assert results[bad_rank][0] == "ConnectionResetError"
        expected = (
            f"Rank {bad_rank} failed: ConnectionResetError: Connection reset by peer: the server of the logger timed out for \\udcff.png"
        )
        assert expected in results[1 - bad_rank][1]


def test_an_interrupt_of_one_rank_alone_ends_the_other_too(tmp_path):
    (interrupted, other) = matrix_rows([("loss", 0)], interrupt, tmp_path, saves=False)[0]
    assert interrupted[:2] == ("SystemExit", "1")
    assert other[0] == "PeerFailedError"
    assert "Rank 0 failed: KeyboardInterrupt" in other[1]
    assert other[2] < 30


@pytest.mark.parametrize("bad_rank", RANKS)
def test_a_killed_rank_ends_all_ranks_naming_it(bad_rank, tmp_path):
    for case, results in matrix([(phase, bad_rank) for phase in (*TOGETHER, *APART)], kill, tmp_path).items():
        assert results[bad_rank] is None, case
        name, text, seconds, _ = results[1 - bad_rank]
        assert name == "PeerFailedError", case
        assert f"Rank {bad_rank} was lost" in text, case
        assert seconds < 30, case
        checkpoints = list((tmp_path / str(list((*TOGETHER, *APART)).index(case[0]))).glob("*.ckpt"))
        assert all("state_dict" in torch.load(path, weights_only=True) for path in checkpoints), case


def test_a_rank_that_stops_before_the_first_step_ends_all_ranks_naming_it(tmp_path):
    cases = [("data setup", 0), ("data setup", 1), ("data setup", 1), ("model loading", 0), ("model loading", 1)]
    actions = [leave, exit_early, sigterm, exit_early, leave]
    for (phase, bad_rank), action, results in zip(cases, actions, matrix_rows(cases, actions, tmp_path)):
        own, (name, text, seconds, _) = results[bad_rank], results[1 - bad_rank]
        assert name == "PeerFailedError", (phase, bad_rank)
        if action is leave:
            assert own[:2] == ("SystemExit", "3")
            assert f"Rank {bad_rank} failed: SystemExit: 3" in text
        else:
            assert own is None
            assert f"Rank {bad_rank} was lost" in text
        assert seconds < 30


def test_an_error_of_a_phase_that_ranks_run_alone_leaves_them_able_to_save_and_to_run_again(tmp_path):
    cases = [(phase, bad_rank) for phase in TOGETHER for bad_rank in RANKS]

    def main(rank, size):
        results = []
        for number, (phase, bad_rank) in enumerate(cases):
            saver = ModelCheckpoint(str(tmp_path / str(number)), "saved", save_on_exception=True, every_n_epochs=100)
            results.append(faulty_run(rank, size, phase, bad_rank, raise_boom, callbacks=(saver,)))
        return results, faulty_run(rank, size, "none", 0, raise_boom)

    for rank, (results, after) in enumerate(run_distributed(main, 2, init_process_group=False)):
        for (_, bad_rank), (name, text, seconds, _) in zip(cases, results):
            assert name == ("BoomError" if rank == bad_rank else "PeerFailedError")
            assert "the cause" in text
            assert f"Rank {bad_rank} failed in phase" in text or rank == bad_rank
            assert seconds < 30
        assert after[:2] == (None, 6)
    steps = [torch.load(tmp_path / str(number) / "saved.ckpt", weights_only=True)["global_step"] for number in range(len(cases))]
    assert steps == [2, 2, 2, 2, 4, 4]


def test_after_an_error_of_one_rank_alone_a_second_run_in_the_same_process_is_refused_at_once():
    def main(rank, size):
        first = faulty_run(rank, size, "loss", 1, raise_boom)
        return first[0], faulty_run(rank, size, "none", 1, raise_boom)

    with pytest.raises(AssertionError) as report:  # the other rank may end itself, since this one goes on
        run_distributed(
            lambda rank, size: print(main(rank, size)) if rank == 0 else _exit_with(main(rank, size)), 2, init_process_group=False
        )
    assert "Start all processes again" in str(report.value)


def _exit_with(result):
    (_, (name, text, seconds, _)) = result
    raise AssertionError(f"{name} after {seconds:.1f} s: {text}")


def test_sigterm_on_one_rank_in_any_phase_ends_all_ranks_after_the_same_step_and_saves(tmp_path):
    cases = [(phase, bad_rank) for phase in (*TOGETHER, *APART) if phase not in SETUP for bad_rank in RANKS]

    def main(rank, size):
        results = []
        for number, (phase, bad_rank) in enumerate(cases):
            saver = ModelCheckpoint(str(tmp_path / str(number)), "saved", save_on_exception=True, every_n_epochs=2, save_top_k=-1)
            results.append(faulty_run(rank, size, phase, bad_rank, sigterm, callbacks=(saver,), with_step=True))
        return results

    first, second = run_distributed(main, 2, init_process_group=False)
    for number, (case, one, other) in enumerate(zip(cases, first, second)):
        assert one[0] == other[0] == "SIGTERMException", case
        assert one[1] == other[1], case
        assert max(one[2], other[2]) < 20, case
        saved = max((tmp_path / str(number)).glob("saved*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        assert torch.load(saved, weights_only=True)["global_step"] == one[1], case


def test_with_three_ranks_both_others_name_the_one_that_failed_and_the_one_that_was_killed(tmp_path):
    failed, killed = matrix_rows([("loss", 1), ("loss", 2)], [raise_boom, kill], tmp_path, size=3, saves=False)
    assert all("Rank 1 failed" in failed[rank][1] for rank in (0, 2))
    assert all("Rank 2 was lost" in killed[rank][1] for rank in (0, 1))


def test_ranks_that_have_built_their_models_notice_one_that_could_not_although_the_backend_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(FailureReport, "_leave_groups", lambda self: None)  # as with NCCL: the failed rank's connections stay
    noticed = [multiprocessing.Event() for _ in RANKS]

    def linger(bad_rank, rank):
        noticed[bad_rank].wait(30) if rank == bad_rank else noticed[bad_rank].set()

    cases = [("model loading", bad_rank) for bad_rank in RANKS]
    for (_, bad_rank), results in matrix(cases, raise_boom, tmp_path, linger=linger, saves=False).items():
        assert results[bad_rank][:2] == ("BoomError", "the cause")
        other = results[1 - bad_rank]
        assert other is not None, "it was waiting in native code, and its process was ended"
        assert other[0] == "PeerFailedError"
        assert f"Rank {bad_rank} failed: BoomError: the cause" in other[1]


def test_a_checkpoint_on_exception_neither_blocks_nor_hides_the_error(tmp_path):
    savers = [
        ModelCheckpoint(dirpath=str(tmp_path), save_on_exception=True, save_on_train_epoch_end=True),
        OnExceptionCheckpoint(str(tmp_path), "on_exception"),
    ]
    results = run_distributed(
        lambda rank, size: faulty_run(rank, size, "loss", 1, raise_boom, callbacks=savers), 2, init_process_group=False, timeout=60
    )
    assert results[1][:2] == ("BoomError", "the cause")
    assert "Rank 1 failed in" not in results[0][1]
    assert "BoomError: the cause" in results[0][1]
    assert all(seconds < 30 for _, _, seconds, _ in results)
    assert any("was not saved: a rank has failed" in text for text in results[1][3])
    # The iteration before the fault was saved whole.
    assert "state_dict" in torch.load(tmp_path / "epoch=0-step=2.ckpt", weights_only=True)


class StopOnOneRank(Callback):
    def __init__(self, is_told, how):
        self.is_told, self.how = is_told, how

    def _stop(self, trainer, how):
        if self.is_told and self.how == how:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            self._stop(trainer, "batch end")

    def on_train_epoch_end(self, trainer, *args):
        self._stop(trainer, "epoch end")

    def on_validation_end(self, trainer, *args):
        self._stop(trainer, "validation end")


def test_should_stop_on_one_rank_stops_all_ranks_after_the_same_step():
    def main(rank, size):
        warnings.filterwarnings("ignore", message=".*val_dataloader.*does not have many workers")
        steps = []
        for how in ("batch end", "epoch end", "validation end"):
            for told in RANKS:
                stopper = StopOnOneRank(rank == told, how)
                trainer = make_trainer(size, max_epochs=5, limit_val_batches=1.0, num_sanity_val_steps=0, callbacks=[stopper])
                trainer.fit(ppo(), datamodule=rollouts(val_prompts=prompt_rows))
                steps.append(trainer.global_step)
        return steps

    assert run_distributed(main, 2, init_process_group=False) == [[3, 3, 2, 2, 2, 2]] * 2


def test_check_collectives_names_the_first_difference_before_ranks_block():
    def main(rank, size):
        module = sft()
        if rank == 1:
            original = module.micro_batch_step
            module.backward_passes = lambda batch, denominators: [(batch.micro_batches * 2, original)]
        trainer = make_trainer(size, RLBatchFSDPStrategy(check_collectives=True), max_epochs=1)
        try:
            trainer.fit(module, datamodule=sft_data())
        except RuntimeError as error:
            return str(error)
        return None

    for text in run_distributed(main, 2, init_process_group=False):
        assert "about to do different things" in text
        assert "micro" in text
