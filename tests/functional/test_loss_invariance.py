"""Every policy loss, KL estimate, entropy bonus and value loss, in every aggregation mode: the same however the mini-batch is cut."""

import pytest
import torch
from rl_cases import LOSSES, run_ranks

from lightning_rlbatch.functional.aggregation import AGGREGATION_MODES, Denominators, aggregate
from lightning_rlbatch.functional.importance import importance_weights
from lightning_rlbatch.functional.kl import KL_KINDS, kl_penalty, needs_logits
from lightning_rlbatch.functional.losses import entropy_bonus
from lightning_rlbatch.functional.losses_covariance import token_keys
from lightning_rlbatch.functional.metrics import add_pairs, quotients, token_mean
from lightning_rlbatch.functional.value import value_loss

# Response tokens from 1 to 9, sample 5 has none, sample 3 has two turns. Samples never start with a response token.
RESPONSES = [1, 9, 2, 8, 3, 0, 5, 4]
CUTS = {
    "one micro-batch": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "two": [[1, 3, 5], [0, 2, 4, 6, 7]],
    "four, one without response tokens": [[7, 0], [5], [3, 1, 2], [4, 6]],
    "one each, shuffled": [[3], [7], [0], [5], [1], [6], [2], [4]],
}


class Samples:
    """Eight samples whose log-probs come from one parameter vector, so that gradients of cuts can be compared."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.masks = [torch.tensor([False] * 2 + [True] * n + [False] * (n % 2)) for n in RESPONSES]
        self.masks[3][4:6] = False
        self.lengths = [len(mask) for mask in self.masks]
        total = sum(self.lengths)

        def draw(scale, shift=0.0):
            return list((torch.randn(total, generator=generator, dtype=torch.float64) * scale + shift).split(self.lengths))

        self.old, self.reference, self.rollout = draw(0.6, -2.0), draw(0.6, -2.0), draw(0.6, -2.0)
        self.advantages, self.returns, self.old_values = draw(1.0), draw(1.0), draw(1.0)
        self.offset = draw(0.4)
        self.features = torch.randn(total, 5, generator=generator, dtype=torch.float64).split(self.lengths)
        for fields in (self.old, self.reference, self.rollout, self.advantages, self.returns, self.old_values, self.offset):
            for values, mask in zip(fields, self.masks):
                values[~mask] = float("nan")

    def take(self, name, indices):
        return torch.cat([getattr(self, name)[i] for i in indices])

    def layout(self, indices):
        cu_seqlens = torch.tensor([0, *torch.tensor([self.lengths[i] for i in indices]).cumsum(0).tolist()], dtype=torch.int32)
        return self.take("masks", indices), cu_seqlens

    def log_probs(self, indices, weight):
        """NaN outside the response mask, through ``offset``."""
        return self.take("old", indices) + self.take("offset", indices) + self.take("features", indices) @ weight


SAMPLES = Samples()


def accumulate(cut, terms_of, mode):
    """Return gradient, loss and metrics of a mini-batch cut as told; ``terms_of(indices, weight) -> (terms, metrics)``."""
    weight = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    counts = sum(Denominators.local(*SAMPLES.layout(piece)).counts() for piece in cut)
    denominators = Denominators.from_counts(counts, norm_constant=16)
    loss, pairs = 0.0, {}
    for piece in cut:
        mask, cu_seqlens = SAMPLES.layout(piece)
        terms, metrics = terms_of(piece, weight)
        part = aggregate(terms, mask, cu_seqlens, mode, denominators)
        part.backward()
        loss += part.item()
        pairs = add_pairs(pairs, {name: token_mean(value, mask) for name, value in metrics.items()})
    return weight.grad, loss, quotients(pairs)


def check_cuts(terms_of_cut, mode):
    whole = None
    for name, cut in CUTS.items():
        gradient, loss, metrics = accumulate(cut, terms_of_cut(cut), mode)
        assert gradient.isfinite().all()
        if whole is None:
            whole = (gradient, loss, metrics)
            assert gradient.abs().max() > 1e-6
            continue
        torch.testing.assert_close(gradient, whole[0], rtol=1e-10, atol=1e-12, msg=name)
        assert loss == pytest.approx(whole[1], rel=1e-10), name
        assert metrics == pytest.approx(whole[2], rel=1e-10, abs=1e-12), name


def select(loss, cut):
    """Select tokens over the mini-batch: one rank, all micro-batches end to end. Return sample -> tokens."""
    indices = [i for piece in cut for i in piece]
    mask, cu_seqlens = SAMPLES.layout(indices)
    log_probs = SAMPLES.log_probs(indices, torch.zeros(5, dtype=torch.float64))
    keys = token_keys(torch.tensor(indices), cu_seqlens, mask.shape[0], seed=3)
    arguments = (log_probs, SAMPLES.take("old", indices), SAMPLES.take("advantages", indices), mask, keys)
    selected = loss.select(*arguments, num_tokens=int(mask.sum()))
    return dict(zip(indices, selected.split([SAMPLES.lengths[i] for i in indices])))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_loss_and_metrics_of_every_policy_loss_do_not_depend_on_the_cut(name, mode):
    loss = LOSSES[name]

    def terms_of_cut(cut):
        chosen = select(loss, cut) if loss.needs_selection else None

        def terms_of(piece, weight):
            mask, cu_seqlens = SAMPLES.layout(piece)
            log_probs = SAMPLES.log_probs(piece, weight)
            correction = importance_weights(SAMPLES.take("old", piece), SAMPLES.take("rollout", piece), mask, cu_seqlens)
            selected = None if chosen is None else torch.cat([chosen[i] for i in piece])
            old, advantages = SAMPLES.take("old", piece), SAMPLES.take("advantages", piece)
            result = loss(log_probs, old, advantages, mask, cu_seqlens, weights=correction.weights, selected=selected)
            return result.terms, {**result.metrics, **correction.metrics}

        return terms_of

    check_cuts(terms_of_cut, mode)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("kind", [*KL_KINDS, "entropy", "value", "value clipped"])
def test_gradient_and_loss_of_every_other_term_do_not_depend_on_the_cut(kind, mode):
    def terms_of(piece, weight):
        mask, _ = SAMPLES.layout(piece)
        log_probs = SAMPLES.log_probs(piece, weight)
        if kind == "entropy":
            result = entropy_bonus(-0.3 * log_probs, mask, coefficient=0.01)
            return result.terms, result.metrics
        if kind.startswith("value"):
            clip = 0.2 if kind.endswith("clipped") else None
            result = value_loss(log_probs + 2, SAMPLES.take("old_values", piece), SAMPLES.take("returns", piece), mask, clip=clip)
            return result.terms, result.metrics
        full = 0.1 * torch.where(mask, log_probs, 0).square() if needs_logits(kind) else None  # any term will do here
        value = kl_penalty(log_probs, SAMPLES.take("reference", piece), mask, kind, full=full)
        return value, {"kl": value}

    check_cuts(lambda cut: terms_of, mode)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_selection_of_a_mini_batch_does_not_depend_on_the_ranks(name):
    loss = LOSSES[name]
    alone = select(loss, CUTS["one micro-batch"])
    num_tokens = sum(int(mask.sum()) for mask in SAMPLES.masks)
    assert sum(int(chosen.sum()) for chosen in alone.values()) == int(0.2 * num_tokens)
    for shards in ([[7, 1], [0, 2, 3, 4, 5, 6]], [[5], [6, 2], [1, 0, 4], [3, 7]]):

        def work(rank, peers, shards=shards):
            mask, cu_seqlens = SAMPLES.layout(shards[rank])
            log_probs = SAMPLES.log_probs(shards[rank], torch.zeros(5, dtype=torch.float64))
            keys = token_keys(torch.tensor(shards[rank]), cu_seqlens, mask.shape[0], seed=3)
            arguments = (log_probs, SAMPLES.take("old", shards[rank]), SAMPLES.take("advantages", shards[rank]), mask, keys)
            selected = loss.select(*arguments, num_tokens=num_tokens, peers=peers)
            return dict(zip(shards[rank], selected.split([SAMPLES.lengths[i] for i in shards[rank]])))

        spread = {i: chosen for part in run_ranks(len(shards), work) for i, chosen in part.items()}
        for i, chosen in alone.items():
            assert torch.equal(chosen, spread[i])


# Response tokens [1, 9, 2, 8] with a constant loss per sample: the token mean is 57 / 20, a mean of means would be 2.5.
FIXTURE = {"counts": [1, 9, 2, 8], "loss": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[3, 0, 1], [2]]])
def test_the_token_mean_is_2_85_for_every_cut(cut):
    denominators = Denominators(num_tokens=20, num_sequences=4)
    total = 0.0
    for piece in cut:
        counts = [FIXTURE["counts"][i] for i in piece]
        terms = torch.tensor([FIXTURE["loss"][i] for i in piece], dtype=torch.float64).repeat_interleave(torch.tensor(counts))
        cu_seqlens = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        total += aggregate(terms, torch.ones(len(terms), dtype=torch.bool), cu_seqlens, "token-mean", denominators).item()
    assert total == pytest.approx(57 / 20, rel=1e-12)


def test_a_fully_masked_second_sample_leaves_39_elevenths():
    counts = torch.tensor(FIXTURE["counts"])
    terms = torch.tensor(FIXTURE["loss"], dtype=torch.float64).repeat_interleave(counts)
    mask = torch.tensor([True, False, True, True]).repeat_interleave(counts)
    terms[~mask] = float("nan")
    cu_seqlens = torch.tensor([0, *counts.cumsum(0).tolist()])
    denominators = Denominators.local(mask, cu_seqlens)
    assert aggregate(terms, mask, cu_seqlens, "token-mean", denominators).item() == pytest.approx(39 / 11, rel=1e-12)
    assert aggregate(terms, mask, cu_seqlens, "seq-mean-token-mean", denominators).item() == pytest.approx(8 / 3, rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_nothing_outside_the_response_mask_reaches_value_gradient_or_metrics(name, mode, poison):
    loss = LOSSES[name]
    indices = [3, 0, 5, 4]
    mask, cu_seqlens = SAMPLES.layout(indices)
    gradients, values = [], []
    for hidden in (0.0, poison):
        fields = [SAMPLES.log_probs(indices, torch.zeros(5, dtype=torch.float64))]
        fields += [SAMPLES.take(field, indices) for field in ("old", "advantages", "rollout")]
        log_probs, old, advantages, weights = (torch.where(mask, field, hidden) for field in fields)
        log_probs.requires_grad_()
        selected = mask & (advantages > 0) if loss.needs_selection else None
        result = loss(log_probs, old, advantages, mask, cu_seqlens, weights=weights, selected=selected)
        total = aggregate(result.terms, mask, cu_seqlens, mode, Denominators.local(mask, cu_seqlens, norm_constant=16))
        (gradient,) = torch.autograd.grad(total, log_probs)
        gradients.append(gradient)
        values.append(torch.stack([total.detach(), *(metric.sum() for metric in result.metrics.values())]))
    assert gradients[1].isfinite().all()
    assert gradients[1][~mask].eq(0).all()
    assert torch.equal(*gradients)
    assert torch.equal(*values)


@pytest.mark.parametrize("kind", [*KL_KINDS, "value"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_outside_the_response_mask_reaches_kl_or_value_loss(kind, poison):
    mask = torch.tensor([False, True, True, False])
    x = torch.tensor([poison, -1.0, -2.0, poison], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([poison, -1.5, -1.0, -poison], dtype=torch.float64)
    full = torch.where(mask, x, 0).square() if needs_logits(kind) else None
    terms = value_loss(x, y, y, mask, clip=0.1).terms if kind == "value" else kl_penalty(x, y, mask, kind, full=full)
    assert terms.isfinite().all()
    (gradient,) = torch.autograd.grad(terms.sum(), x)
    assert gradient.isfinite().all()
    assert gradient[~mask].eq(0).all()
    assert gradient[mask].ne(0).any()
