"""A resumed run is the run that was never interrupted."""

import errno
import logging
import shutil
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor

from lightning_rlbatch.callbacks import RLBatchModelCheckpoint
from lightning_rlbatch.modules import SFTModule
from lightning_rlbatch.strategies import FSDPMixedPrecision, RLBatchFSDPStrategy
from lightning_rlbatch.strategies.atomic import AtomicCheckpointIO
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer, tiny_llama
from tests.strategies.killed_runs import steps_after_resuming, train_until_killed
from tests.strategies.runs import Journal, assert_same_state, final_state, ppo, rollouts, run, sft, sft_data

KINDS = {
    "grpo": lambda: (ppo(), rollouts()),
    "ppo": lambda: (ppo(critic=lambda: tiny_llama(1), critic_lr=1e-3, kl_coefficient=0.1), rollouts(ppo_epochs=2)),
    "sft": lambda: (sft(), sft_data()),
}
FORMS = (False, True)  # one file, or a folder with a file per rank


def strategy(sharded, **options):
    return RLBatchFSDPStrategy(save_distributed_checkpoint=sharded, **options)


def on_ranks(fn, world_size, *args, **kwargs):
    return run_distributed(lambda rank, size: fn(rank, size, *args), world_size, init_process_group=False, **kwargs)


def save_every_step(folder):
    return ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


@pytest.fixture(scope="module")
def uninterrupted():
    """Train three epochs without a break, once per kind."""
    cache = {}

    def get(kind):
        if kind not in cache:
            cache[kind] = on_ranks(lambda rank, size: run(*KINDS[kind](), size, max_epochs=3), 2)
        return cache[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_resume_at_an_iteration_boundary_equals_the_uninterrupted_run_bitwise(kind, uninterrupted, tmp_path):
    def interrupted(rank, size):
        runs = []
        for sharded in FORMS:
            path = str(tmp_path / f"{sharded}.ckpt")
            first = run(*KINDS[kind](), size, strategy=strategy(sharded), max_epochs=2, save_to=path)
            runs.append((first, run(*KINDS[kind](), size, strategy=strategy(sharded), max_epochs=3, ckpt_path=path)))
        return runs

    for runs, expected in zip(on_ranks(interrupted, 2), uninterrupted(kind)):
        for first, second in runs:
            assert_same_state(second, expected)
            assert first["steps"] + second["steps"] == expected["steps"]
            assert first["collections"] + second["collections"] == expected["collections"]  # prompts, and every sampled token


@pytest.mark.parametrize(("workers", "steps"), [(0, [1, 6]), (2, [4])])
def test_supervised_training_resumes_exactly_anywhere_in_an_epoch_with_loader_workers(workers, steps, tmp_path):
    def main(rank, size):
        saver = save_every_step(str(tmp_path / "steps"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
            warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
            whole = run(sft(), sft_data(num_workers=workers), size, max_epochs=3, callbacks=(saver,), enable_checkpointing=True)
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
            paths = [str(tmp_path / "steps" / f"step={step}.ckpt") for step in steps]
            return whole, [run(sft(), sft_data(num_workers=workers), size, max_epochs=3, ckpt_path=path) for path in paths]

    for whole, resumed in on_ranks(main, 2):
        for step, rest in zip(steps, resumed, strict=True):
            assert whole["steps"][step:] == rest["steps"]
            assert_same_state(rest, whole)


def test_resume_inside_an_iteration_rolls_out_its_remaining_prompts_and_ends_at_the_same_step(tmp_path):
    def main(rank, size):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
            whole = run(
                ppo(), rollouts(), size, max_epochs=3, callbacks=(save_every_step(str(tmp_path / "steps")),), enable_checkpointing=True
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = run(ppo(), rollouts(), size, max_epochs=3, ckpt_path=str(tmp_path / "steps" / "step=3.ckpt"))
        return whole, rest, [str(warning.message) for warning in caught if "inside iteration" in str(warning.message)]

    results = on_ranks(main, 2)
    whole, rest, said = results[0]
    assert rest["steps"] == whole["steps"][3:]
    assert (rest["global_step"], rest["epoch"], rest["lr"]) == (whole["global_step"], whole["epoch"], whole["lr"])
    again, *later = rest["collections"]
    assert again[0] == 1
    assert len(again[1]) == 2  # one mini-batch of two prompts was still owed
    assert set(again[1]) < set(whole["collections"][1][1])
    assert [collection[:2] for collection in later] == [collection[:2] for collection in whole["collections"][2:]]
    assert len(said) == 1
    assert "iteration 1" in said[0]


def test_states_survive_two_to_four_to_one_ranks_and_hsdp_bitwise(tmp_path):
    """The state after loading, before a step, is the saved one; `max_epochs` is reached, so that nothing is trained."""

    def one_hop(rank, size, source, options):
        states = []
        for sharded in FORMS:
            folder = tmp_path / f"sharded {sharded}"
            paths = {"ckpt_path": source and str(folder / f"{source}.ckpt"), "save_to": str(folder / f"{size}.ckpt")}
            states.append(run(*KINDS["ppo"](), size, strategy=strategy(sharded, **options), max_epochs=1, **paths))
        return states

    saved = on_ranks(one_hop, 2, None, {})[0]
    for source, size, options in [(2, 4, {"data_parallel_replicate_size": 2}), (4, 1, {})]:
        for states in on_ranks(one_hop, size, source, options):
            for state, expected in zip(states, saved, strict=True):
                assert_same_state(state, expected)
                assert state["collections"] == []


def test_training_goes_on_alike_at_another_world_size(tmp_path):
    path = str(tmp_path / "one.ckpt")

    def sgd_run(size, **options):
        module = sft(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return run(module, sft_data(), size, **options)

    def train(rank, size):
        sgd_run(size, max_epochs=1, save_to=path)
        return sgd_run(size, max_epochs=2)

    expected = on_ranks(train, 2)[0]
    for state in on_ranks(lambda rank, size: sgd_run(size, max_epochs=2, ckpt_path=path), 4):
        assert_same_state(state, expected, tolerance=1e-5)


def test_last_checkpoint_is_found_and_more_epochs_continue_a_finished_run(tmp_path, uninterrupted):
    def main(rank, size):
        def saver():
            return ModelCheckpoint(dirpath=str(tmp_path / "run"), save_last=True, every_n_epochs=1, save_top_k=1)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            run(*KINDS["grpo"](), size, max_epochs=2, callbacks=(saver(),), enable_checkpointing=True)
            return run(*KINDS["grpo"](), size, max_epochs=3, ckpt_path="last", callbacks=(saver(),), enable_checkpointing=True)

    for state, expected in zip(on_ranks(main, 2), uninterrupted("grpo")):
        assert_same_state(state, expected)
        assert state["collections"] == expected["collections"][2:]


class Told(logging.Handler):
    """Keeps what Lightning says."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class LoggedSteps(Callback):
    """Notes the step under which loggers are given the metrics of each batch."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, *args):
        self.steps.append(trainer.fit_loop.epoch_loop._batches_that_stepped)


@pytest.mark.parametrize("stop", [2, 3])  # at the end of an iteration, and inside of one
def test_what_was_saved_behind_an_epoch_goes_on_alike_with_more_steps_and_with_more_epochs(stop, tmp_path):
    ways = [({"max_steps": 6, "max_epochs": -1}, "end.ckpt"), ({"max_epochs": 3}, "end.ckpt"), ({"max_steps": 6}, "fit.ckpt")]

    def main(rank, size):
        def go(**options):
            logged = LoggedSteps()
            callbacks = (logged, *options.pop("callbacks", ()))
            return run(ppo(), rollouts(), size, strategy="auto", callbacks=callbacks, **options), logged.steps

        saver = RLBatchModelCheckpoint(str(tmp_path), "end")
        whole = go(max_epochs=3)
        go(max_steps=stop, callbacks=(saver,), enable_checkpointing=True, save_to=str(tmp_path / "fit.ckpt"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resumed = [go(**options, ckpt_path=str(tmp_path / name)) for options, name in ways]
            again = str(tmp_path / "again.ckpt")
            go(max_steps=4, ckpt_path=str(tmp_path / "fit.ckpt"), save_to=again)
            return whole, resumed, go(max_steps=6, ckpt_path=again)[0]

    (whole, logged), resumed, third = on_ranks(main, 1)[0]
    assert (third["steps"], third["epoch"]) == (whole["steps"][4:], 3)
    assert [number for number, *_ in third["collections"]] == [2]
    for rest, logged_again in resumed:
        assert rest["steps"] == whole["steps"][stop:]
        assert logged_again == logged[stop:]
        assert [number for number, *_ in rest["collections"]] == [1, 2]
        assert (rest["global_step"], rest["epoch"]) == (6, 3)
        if stop == 2:
            assert_same_state(rest, whole)


def test_a_second_fit_goes_on_with_weights_and_data_but_with_a_new_optimizer_and_says_so(uninterrupted):
    def main(rank, size):
        journal = Journal()
        trainer = make_trainer(size, max_epochs=2, callbacks=[journal])
        module, data = KINDS["grpo"]()
        trainer.fit(module, data)
        trainer.fit_loop.max_epochs = 3
        told = Told()
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(told)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, data)
        states = trainer.optimizers[0].state.values()
        facts = {(int(state["step"]), isinstance(state["exp_avg"], DTensor)) for state in states}
        said = [str(warning.message) for warning in caught if "A second fit" in str(warning.message)]
        assert not any("configure_callbacks" in text for text in told.texts), told.texts  # ours do not override those that the user passed
        return journal.collections, journal.steps, facts, said, trainer.current_epoch

    results = on_ranks(main, 2)
    for (collections, steps, facts, _, epoch), expected in zip(results, uninterrupted("grpo")):
        assert collections == expected["collections"]  # the policy that sampled the third iteration is the trained one
        assert steps == [*expected["steps"][:4], (5, 1e-2 * 0.9), (6, 1e-2 * 0.9**2)]
        assert facts == {(2, True)}
        assert epoch == 3
    assert "goes on at step 4" in results[0][3][0]
    assert len(results[0][3]) == 1


@pytest.mark.filterwarnings("ignore:.*Bfloat16:UserWarning")
def test_a_module_in_shards_is_not_run_with_options_that_would_have_no_effect():
    def main(rank, size):
        module = sft()
        make_trainer(size, strategy(False), max_epochs=1).fit(module, sft_data())
        make_trainer(size, strategy(True), max_epochs=1).fit(module, sft_data())  # how it is saved may change
        for other, options, expected in (
            (strategy(False, activation_checkpointing=True), {}, "activation_checkpointing was False and is True"),
            (strategy(False), {"precision": "bf16-mixed"}, "policy was"),
            ("auto", {}, "SingleDeviceStrategy needs it whole"),
        ):
            with pytest.raises(MisconfigurationException, match=expected):
                make_trainer(size, other, max_epochs=1, **options).fit(module, sft_data())

    on_ranks(main, 1)


def test_tied_embeddings_stay_tied_and_are_stored_once(tmp_path):
    path = tmp_path / "tied.ckpt"

    def main(rank, size):
        state = run(sft(policy=lambda: tiny_llama(tied=True)), sft_data(), size, max_epochs=1, save_to=str(path))
        trainer = make_trainer(size, max_epochs=1)
        trainer.fit(sft(policy=lambda: tiny_llama(seed=5, tied=True)), datamodule=sft_data(), ckpt_path=str(path))
        model = trainer.lightning_module.policy.model
        assert isinstance(model.lm_head.weight, DTensor)
        return state, final_state(trainer), model.lm_head.weight is model.model.embed_tokens.weight

    for state, again, tied in on_ranks(main, 2):
        assert tied
        assert_same_state(again, state)
    stored = torch.load(path, weights_only=True)["state_dict"]
    names = ("policy.model.lm_head.weight", "policy.model.model.embed_tokens.weight")
    assert len({stored[name].untyped_storage().data_ptr() for name in names}) == 1


def test_checkpoint_leaves_out_the_frozen_reference_and_loads_weights_only(tmp_path):
    path = tmp_path / "with_reference.ckpt"
    on_ranks(lambda rank, size: run(ppo(kl_coefficient=0.1), rollouts(), size, max_epochs=1, save_to=str(path)), 2)
    checkpoint = torch.load(path, weights_only=True)
    assert all(name.startswith("policy.") for name in checkpoint["state_dict"])
    assert len(checkpoint["state_dict"]) == len(tiny_llama().state_dict())


def test_loss_scale_of_half_precision_is_restored(tmp_path):
    path = str(tmp_path / "fp16.ckpt")

    def plugin(scale):
        return FSDPMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2))

    def main(rank, size):
        first = plugin(64.0)
        run(sft(), sft_data(), size, max_epochs=1, save_to=path, plugins=[first])
        second = plugin(2.0)
        run(sft(), sft_data(), size, max_epochs=1, ckpt_path=path, plugins=[second])
        return first.state_dict(), second.state_dict()

    for saved, restored in on_ranks(main, 2):
        assert saved["scale"] == 128.0  # grew once in three steps
        assert restored == saved


def test_killed_at_any_moment_the_last_checkpoint_loads(tmp_path):
    cases = [(sharded, attempt, tmp_path / f"{sharded}{attempt}") for sharded in (False, True) for attempt in range(2)]
    for sharded, attempt, folder in cases:

        def fit(size, sharded=sharded, folder=folder):
            saver = ModelCheckpoint(dirpath=folder, save_last=True, every_n_epochs=1, save_top_k=1)
            run(sft(), sft_data(), size, strategy=strategy(sharded), max_epochs=10_000, callbacks=(saver,), enable_checkpointing=True)

        train_until_killed(fit, folder, delay=0.05 + 0.117 * attempt)
    runs = [(folder, {"strategy": strategy(sharded), "max_epochs": 1}) for sharded, _, folder in cases]
    assert min(steps_after_resuming(runs)) >= 3


NO_CHECKPOINTS = {
    "none.ckpt": "No checkpoint at",
    "link.ckpt": "which is gone",
    "file.ckpt": "a damaged one",
    "weights.ckpt": "expected a dictionary with a state_dict",
    "no_meta.ckpt": r"without meta\.pt, which is written last",
    "folder.ckpt/meta.pt": r"is one file of a sharded checkpoint\. Pass its folder",
    "folder.ckpt/.metadata": "is one file of a sharded checkpoint",
    "hub": "is a transformers folder",
    "run": r"It holds last\.ckpt: pass one of them",
}


def test_what_is_no_checkpoint_is_named_with_what_is_missing(tmp_path):
    def main(rank, size):
        run(sft(), sft_data(), size, strategy=strategy(True), max_epochs=1, save_to=str(tmp_path / "folder.ckpt"))
        shutil.copytree(tmp_path / "folder.ckpt", tmp_path / "no_meta.ckpt")
        (tmp_path / "no_meta.ckpt" / "meta.pt").unlink()
        (tmp_path / "file.ckpt").write_bytes(b"half a file")
        torch.save({"layer.weight": torch.zeros(1)}, tmp_path / "weights.ckpt")
        (tmp_path / "link.ckpt").symlink_to("gone.ckpt")
        for folder, name in (("hub", "config.json"), ("run", "last.ckpt")):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / name).touch()

        def refused(name, message, kind):
            with pytest.raises((RuntimeError, FileNotFoundError, ValueError), match=message) as error:
                run(sft(), sft_data(), size, strategy=kind, max_epochs=2, ckpt_path=str(tmp_path / name))
            assert name in str(error.value)

        for name, message in NO_CHECKPOINTS.items():
            for kind in ("rlbatch_fsdp", "auto") if name != "weights.ckpt" else ("rlbatch_fsdp",):
                refused(name, message, kind)
        refused("folder.ckpt", r"which only strategy='rlbatch_fsdp' resumes: on any number of devices, one included", "auto")
        with pytest.raises(FileNotFoundError, match="written last"):
            SFTModule.load_from_checkpoint(tmp_path / "no_meta.ckpt")
        next((tmp_path / "folder.ckpt").glob("*.distcp")).unlink()
        refused("folder.ckpt", "a damaged one", "rlbatch_fsdp")

    on_ranks(main, 1)


def test_a_full_disk_is_named_in_place_of_what_closing_the_archive_says(tmp_path, monkeypatch):
    def save(content, file):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")  # as the archive of torch does when it is closed

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RuntimeError, match=r"could not be written \(OSError: .* No space left on device"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "full.ckpt")
    assert not list(tmp_path.iterdir())
