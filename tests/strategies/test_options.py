"""Options of the strategy change memory and speed, not the numbers."""

import datetime
import functools
import multiprocessing
import os
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.modules import SFTModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy, fsdp
from lightning_rlbatch.strategies.materialize import Materializer
from lightning_rlbatch.strategies.sharding import ShardingOptions, shard
from lightning_rlbatch.testing import run_distributed
from tests.hand_made import make_samples
from tests.helpers import make_trainer, tiny_llama, whole, whole_parameters
from tests.strategies.runs import ppo, rollouts, sft, sft_data


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(size, module=None, data=None, precision="32-true", **options):
    trainer = make_trainer(size, RLBatchFSDPStrategy(**options), max_epochs=1, precision=precision)
    trainer.fit(module or sft(optimizer=momentum), datamodule=data or sft_data(max_tokens_per_rank=14))  # several micro-steps
    return trainer


OPTIONS = {
    2: [
        {},
        {"grad_sync": "every"},
        {"reshard_after_forward": False, "grad_sync": "every"},
        {"activation_checkpointing": True, "sequence_parallel_size": 2},
        {"cpu_offload": True},
        {"wrap_cls": ["LlamaMLP", "LlamaAttention"]},
    ],
    4: [
        {"data_parallel_replicate_size": 2},
        {"data_parallel_replicate_size": 2, "grad_sync": "every", "sequence_parallel_size": 2},
    ],
}


@pytest.fixture(scope="module")
def trained():
    """Train with each of the options; return the parameters of every rank by number of ranks and options."""

    def walk(rank, size):
        return [whole_parameters(train(size, **options).lightning_module) for options in OPTIONS[size]]

    ranks = {size: run_distributed(walk, size, init_process_group=False) for size in OPTIONS}
    return {(size, str(options)): rows for size in OPTIONS for options, rows in zip(OPTIONS[size], zip(*ranks[size]))}


@pytest.mark.parametrize(("world_size", "options"), [(size, options) for size in OPTIONS for options in OPTIONS[size]], ids=str)
def test_option_leaves_the_trained_weights_as_they_are(world_size, options, trained):
    baseline = trained[2, "{}"][0]
    for parameters in trained[world_size, str(options)]:
        for name, value in baseline.items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_activation_checkpointing_computes_blocks_twice_and_keeps_names():
    def main(rank, size):
        calls, losses = [], []
        module = sft(optimizer=momentum)
        build, step = module.build_models, module.micro_batch_step

        def counted():
            build()
            first = module.policy.model.model.layers[0].input_layernorm  # a second computation may stop before the block's end
            first.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))

        def counted_step(*args):
            losses.append(step(*args))
            return losses[-1]

        module.build_models, module.micro_batch_step = counted, counted_step
        trainer = train(size, module, activation_checkpointing=True)
        return len(calls), len(losses), list(trainer.lightning_module.state_dict())

    forwards, micro_steps, names = run_distributed(main, 1, init_process_group=False)[0]
    assert forwards == 2 * micro_steps > 6
    assert names == [f"policy.model.{name}" for name in tiny_llama().state_dict()]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu() + x


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_are_compiled_one_by_one_with_the_same_result():
    def main(rank, size):
        results, compiled = [], []
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at shards

        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward

        for chosen in (None, backend):
            torch.manual_seed(0)
            root = Stack()
            mesh = init_device_mesh("cpu", (size,))
            shard(root, ShardingOptions(mesh, MixedPrecisionPolicy(), compile_backend=chosen), lambda module: None)
            root(torch.ones(3, 4)).sum().backward()
            results.append([whole(parameter.grad) for parameter in root.parameters()])
        return len(compiled) > 0, all(torch.equal(*pair) for pair in zip(*results))

    assert run_distributed(main, 1) == [(True, True)]


def test_frozen_reference_may_lie_in_host_memory_and_gives_the_same_numbers():
    def main(rank, size):
        results = []
        for offload in (False, True):
            module = ppo(kl_coefficient=0.1, optimizer=momentum)
            train(size, module, rollouts(), reference_cpu_offload=offload)
            results.append(whole_parameters(module))
        assert all(isinstance(parameter, DTensor) for parameter in module.reference.parameters())
        return results

    for kept, offloaded in run_distributed(main, 2, init_process_group=False):
        assert all(torch.equal(kept[name], offloaded[name]) for name in kept)


@pytest.mark.parametrize(("precision", "master"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precision_sets_the_master_weights_and_spares_rotary_frequencies(precision, master):
    def main(rank, size):
        module = train(size, sft(optimizer=momentum), precision=precision).lightning_module
        rotary = module.policy.model.model.rotary_emb.inv_freq
        exact = torch.equal(rotary.float(), tiny_llama().model.rotary_emb.inv_freq)
        finite = all(bool(value.isfinite().all()) for value in whole_parameters(module).values())
        return {parameter.dtype for parameter in module.parameters()}, exact, finite

    assert run_distributed(main, 2, init_process_group=False) == [({master}, True, True)] * 2


def test_every_group_has_the_timeout_of_the_strategy():
    def main(rank, size):
        strategy = RLBatchFSDPStrategy(sequence_parallel_size=2, timeout=datetime.timedelta(seconds=2))
        trainer = make_trainer(size, strategy, max_epochs=0)
        trainer.fit(sft(optimizer=momentum), datamodule=sft_data())
        if rank > 0:
            is_done.wait(40)
            return None
        start, seconds = time.monotonic(), []
        groups = (strategy.meshes.sp_group, strategy.meshes.dp_group, strategy.meshes.world_group)
        for waiting in [dist.all_reduce(torch.zeros(1), group=group, async_op=True) for group in groups]:
            with pytest.raises(RuntimeError, match=r"imed out|imeout"):
                waiting.wait()
            seconds.append(time.monotonic() - start)
        is_done.set()
        return seconds

    is_done = multiprocessing.Event()
    assert all(1 < seconds < 6 for seconds in run_distributed(main, 4, init_process_group=False, timeout=60)[0])


def test_fork_starts_the_ranks_from_a_plain_process_and_brings_the_weights_back(trained):
    """In a forked child, as pytest's own process must not change its environment."""

    def main(rank, size):
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR"):
            os.environ.pop(name, None)
        multiprocessing.current_process()._config["daemon"] = False  # a daemon may not have children
        torch.cuda._is_in_bad_fork = lambda: False  # a child of a torch with CUDA must not use CUDA, and this one does not
        module = sft(optimizer=momentum)
        trainer = make_trainer(2, RLBatchFSDPStrategy(start_method="fork"), max_epochs=1)
        module.configure_model()  # so that the parent has somewhere to put the weights
        trainer.fit(module, datamodule=sft_data(max_tokens_per_rank=14))
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    parameters = run_distributed(main, 1, init_process_group=False)[0]
    assert all(torch.equal(parameters[name], value) for name, value in trained[2, "{}"][0].items())


# -- starting without the whole model on every rank ----------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_pretrained_folder_is_read_on_rank_zero_alone_and_sharded_block_by_block(tied, tmp_path):
    source = tiny_llama(7, tied=tied)
    source.save_pretrained(tmp_path / "model")

    def main(rank, size):
        largest, copies = 0, []

        class Watched(Materializer):
            def __call__(self, module):
                nonlocal largest
                super().__call__(module)
                copies.extend(weakref.ref(p) for p in module.parameters() if not isinstance(p, DTensor))
                # What earlier blocks had is sharded by now, and must be gone.
                largest = max(largest, sum(p.numel() for p in {id(p): p for p in (copy() for copy in copies) if p is not None}.values()))

        fsdp.Materializer = Watched  # in this forked process only
        module = sft(policy=str(tmp_path / "model"))
        trainer = make_trainer(size, RLBatchFSDPStrategy(), max_epochs=0)
        built = []
        build = module.build_models

        def watched_build():
            build()
            built.append(sum(p.numel() for p in module.parameters() if not p.is_meta))

        module.build_models = watched_build
        trainer.fit(module, datamodule=sft_data())
        scores = module.policy(make_samples([(2, 3), (1, 4)]))
        return built[0], largest, whole_parameters(module), scores.log_probs.detach()

    total = sum(p.numel() for p in source.parameters())
    scorer = TokenScorer(source)
    expected = scorer(make_samples([(2, 3), (1, 4)])).log_probs.detach()
    for rank, (built, largest, parameters, log_probs) in enumerate(run_distributed(main, 2, init_process_group=False)):
        assert built == (total if rank == 0 else 0)
        assert largest < total / 2
        torch.testing.assert_close(log_probs, expected)
        for name, value in source.named_parameters():
            assert torch.equal(parameters[f"policy.model.{name}"], value)


def bytes_held(*modules):
    """Return the memory of all parameters that are neither sharded nor on the meta device; what is shared counts once."""
    storages = {}
    for module in modules:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and not parameter.is_meta:
                storages[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore:Some weights of:UserWarning")
def test_models_of_ppo_have_weights_on_rank_zero_alone_and_the_reference_costs_nothing_until_it_is_sharded(tmp_path):
    sources = {"policy": tiny_llama(7), "critic": tiny_llama(8), "reward_model": tiny_classifier(9)}
    for name, model in sources.items():
        model.save_pretrained(tmp_path / name)
    one = sum(p.numel() * p.element_size() for p in sources["policy"].parameters())

    def load(name):
        kind = AutoModelForSequenceClassification if name == "reward_model" else AutoModelForCausalLM
        return kind.from_pretrained(tmp_path / name)

    def folder(name):
        return str(tmp_path / name)

    def load_and_look(name):
        model = load(name)
        assert float(model.get_input_embeddings().weight.detach().sum()) != 0  # a function that needs the weights gets them
        return model

    def main(rank, size):
        results = []
        kinds = (
            lambda name: functools.partial(load_and_look, name),
            lambda name: functools.partial(load, name),
            lambda name: str(tmp_path / name),
        )
        for kind in kinds:
            models = {name: kind(name) for name in sources}
            module = ppo(kl_coefficient=0.1, critic_lr=1e-3, optimizer=momentum, **models)
            build = module.build_models
            held = []

            def watched(module=module, build=build, held=held):
                build()
                held.append(bytes_held(module, *module.unregistered_modules(), module.rollout_engine.model))

            module.build_models = watched
            train(size, module, rollouts())
            frozen = [whole_parameters(model) for model in module.unregistered_modules()]
            results.append((held[0], whole_parameters(module), *frozen))
        return results

    for rank, ((whole_bytes, *whole_run), *others) in enumerate(run_distributed(main, 2, init_process_group=False)):
        assert 4.5 * one > whole_bytes > 3.5 * one  # policy, engine, critic, reward model; the last two have no LM head
        for brought_bytes, *brought_run in others:
            assert brought_bytes == (whole_bytes if rank == 0 else one)  # elsewhere the engine's copy alone
            for actual, expected in zip(brought_run, whole_run, strict=True):
                assert all(torch.equal(actual[name], expected[name]) for name in expected)
        _, reward_model, reference = whole_run
        assert all(torch.equal(reference[f"model.{name}"], value) for name, value in sources["policy"].named_parameters())
        assert torch.equal(reward_model["value_head.weight"], sources["reward_model"].score.weight)


def test_without_sharding_the_reference_has_memory_of_its_own():
    def main(rank, size):
        module = ppo(kl_coefficient=0.1, optimizer=momentum)
        make_trainer(1, "auto", max_epochs=1).fit(module, datamodule=rollouts())
        expected = tiny_llama().state_dict()
        return all(torch.equal(value, expected[name]) for name, value in module.reference.model.state_dict().items())

    assert run_distributed(main, 1, init_process_group=False) == [True]


def tiny_classifier(seed):
    config = LlamaConfig(**{**tiny_llama().config.to_dict(), "num_labels": 1, "architectures": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(config)


def with_buffers_in_blocks():
    """Buffers that have values on rank 0 alone until it sends them: they come from weights."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.register_buffer("largest", layer.mlp.up_proj.weight.detach().abs().max(dim=1).values)
    return model


def test_buffers_in_blocks_come_from_rank_zero_too():
    def main(rank, size):
        module = train(size, sft(policy=with_buffers_in_blocks, optimizer=momentum)).lightning_module
        return whole_parameters(module), {name: value.clone() for name, value in module.policy.model.named_buffers()}

    expected = {name: value for name, value in with_buffers_in_blocks().named_buffers() if "largest" in name}
    (one, _), *others = (run_distributed(main, size, init_process_group=False)[-1] for size in (1, 2))
    for parameters, buffers in others:
        assert all(torch.equal(buffers[name], value) for name, value in expected.items())
        for name, value in one.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_ranks_that_built_different_models_are_told_so():
    def main(rank, size):
        with pytest.raises(RuntimeError, match=r"rank 0 has model.lm_head.weight .*, rank 1 has model.model.extra"):
            train(size, SFTModule(lambda: _with_extra(tiny_llama()) if rank else tiny_llama(), optimizer=momentum))

    def _with_extra(model):
        model.model.extra = torch.nn.Linear(2, 2)
        return model

    run_distributed(main, 2, init_process_group=False)
