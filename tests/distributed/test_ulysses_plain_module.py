import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from examples.plain_transformer import PlainTransformer, make_batch, mean_loss, train
from lightning_rlbatch.testing import run_distributed


def one_by_one(model, batch):
    """The reference: every sample through the model by itself, one mean over all predicted tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for ids in batch.split_per_sample("input_ids"):
        logits = model(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]), None)
        total = total + functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    return total / (batch.num_tokens - batch.num_samples)


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_a_plain_module_split_over_ranks_has_the_gradients_of_its_samples_alone(world_size):
    torch.manual_seed(0)
    model, batch = PlainTransformer().double(), make_batch(0)
    expected = torch.autograd.grad(one_by_one(model, batch), list(model.parameters()))

    def work(rank, size):
        gradients = torch.autograd.grad(mean_loss(model, batch, dist.group.WORLD), list(model.parameters()))
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= size
        return max(float((ours - reference).abs().max()) for ours, reference in zip(gradients, expected))

    assert max(run_distributed(work, world_size)) < 1e-12


def test_the_example_trains_alike_on_every_number_of_ranks():
    losses = [run_distributed(train, world_size)[0] for world_size in (1, 2)]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
