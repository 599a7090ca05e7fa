"""ROLE and EN/CL/SCL on the real store equal their in-memory definitions over the whole matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Step, Task
from lacuna.trainer.world import World
from tests.helpers.oracles import LOGITS, OBSERVED
from tests.helpers.state.harness import CLASSES, SAMPLES, Harness, labels_of, make_source, maps_at, role_loss


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShardSource:
    return make_source(str(tmp_path_factory.mktemp("state") / "shards"))


def annotated(source) -> float:
    """Annotated positives per sample: the paper's K counts per annotated positive, k per image."""
    return source.sidecar.positives.sum() / SAMPLES


def test_role_golden_values(tmp_path, source):
    phi = torch.tensor([[5.293305, 0.2, -0.3, 0.1], [0.4, 5.293305, -0.4, 0]], dtype=torch.float64, requires_grad=True)
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    value = role_loss(phi, logits, torch.from_numpy(OBSERVED), 1.5)
    assert value.item() == pytest.approx(0.795012, abs=1e-5)
    value.backward()
    method = build_method({"name": "role"}, Task(4, 2, np.ones(4), np.zeros(4), False, expected_positives=1.5))
    step = Step(World(torch.device("cpu")), 2, 0, 1)
    y = torch.sigmoid(phi.detach())
    pull = y.sum() / 2 - 1.5
    gradient = method._gradient(phi.detach(), y, torch.sigmoid(logits), torch.from_numpy(OBSERVED), pull, step)
    golden = torch.tensor([[0.006965, 0.025253, -0.004703, 0.037602], [0.021293, 0.010909, 0.025104, 0.007775]])
    assert torch.allclose(phi.grad.float(), golden, atol=2e-6), "the oracle itself"
    assert torch.allclose(gradient.float(), golden, atol=2e-6)


def test_lazy_adam_golden_trajectory():
    from lacuna.trainer.methods.role import lazy_adam

    one = lambda x: torch.tensor([[x]])  # noqa: E731
    phi, m, v = lazy_adam.step(one(0.2), one(0.0), one(0.0), one(0.025253), 1, 0.01)
    found = [phi.item()] + [lazy_adam.replay(phi, m, v, np.array([1]), now, 0.01)[0].item() for now in (2, 3, 4, 5)]
    assert found == pytest.approx([0.190000, 0.183299, 0.178120, 0.173877, 0.170291], abs=2e-6)


@pytest.mark.parametrize(("dtype", "worst", "mean"), [("float32", 1e-4, 1e-4), ("float16", 0.02, 1e-3)])
def test_three_epochs_of_role_equal_dense_adam_over_all_samples(source, tmp_path, dtype, worst, mean):
    lr, k = 0.05, 2.5
    harness = Harness(source, tmp_path / "store",
                      {"name": "role", "lr": lr, "phi_dtype": dtype}, k=k)
    z = torch.from_numpy(labels_of(source))
    dense = torch.nn.Parameter(torch.from_numpy(harness.table("phi")).double())
    adam = torch.optim.Adam([dense], lr=lr)

    def on_step(samples, batch, outputs, step, terms):
        adam.zero_grad()
        value = role_loss(dense[samples], outputs.logits.double(), z[samples], k)
        value.backward()
        adam.step()
        ours = terms.per_sample.sum() / len(samples) + terms.coupled
        assert ours.item() == pytest.approx(value.item(), abs=2e-3 if dtype == "float16" else 1e-5)

    for epoch in range(3):
        harness.epoch(epoch, on_step)
    from lacuna.trainer.methods.role import lazy_adam

    last = harness.table("visit")[:, 1].astype(np.int64)
    tables = [torch.from_numpy(harness.table(name)).double() for name in ("phi", "phi_m", "phi_v")]
    view = lazy_adam.replay(*tables, last, harness.number, lr)
    difference = view[0] - dense.detach()
    assert difference.abs().max() <= worst
    assert abs(difference.mean()) <= mean
    if dtype == "float32":
        state = adam.state[dense]
        assert torch.allclose(view[1], state["exp_avg"], atol=1e-7)
        assert torch.allclose(view[2], state["exp_avg_sq"], atol=1e-9)
    assert (dense.detach() - torch.from_numpy(harness.table("phi"))).abs().max() > 10 * worst, "momentum moves rows"
    assert harness.state.session.metrics.chunks_read > 8, "state was never evicted: the test proves nothing"
    harness.state.close()


def test_role_hands_the_best_phi_over_to_the_next_phase(source, tmp_path):
    """LinearInit: roll back to the best epoch, replay to its last step, clamp, and start a new Adam."""
    k, lrs = 2.5, [0.5, 0.02]
    harness = Harness(source, tmp_path / "store", {"name": "role", "lr": lrs}, k=k)
    z = torch.from_numpy(labels_of(source))
    dense = torch.nn.Parameter(torch.from_numpy(harness.table("phi")).double())
    adam = [torch.optim.Adam([dense], lr=lrs[0])]

    def on_step(samples, batch, outputs, step, terms):
        adam[0].zero_grad()
        role_loss(dense[samples], outputs.logits.double(), z[samples], k).backward()
        adam[0].step()

    harness.epoch(0, on_step)
    harness.state.snapshot("best")
    best, steps = dense.detach().clone(), harness.number
    harness.epoch(1, on_step)
    harness.state.restore("best")
    harness.method.end_phase(steps)
    harness.number = 0
    with torch.no_grad():
        dense.copy_(best.clamp(-11.512915, 11.512915))
    adam[0] = torch.optim.Adam([dense], lr=lrs[1])
    harness.epoch(2, on_step, phase=1)
    from lacuna.trainer.methods.role import lazy_adam

    tables = [torch.from_numpy(harness.table(name)).double() for name in ("phi", "phi_m", "phi_v")]
    last = harness.table("visit")[:, 1].astype(np.int64)
    view = lazy_adam.replay(*tables, last, harness.number, lrs[1])[0]
    assert (view - dense.detach()).abs().max() < 2e-4
    harness.state.close()


def test_en_masks_are_the_exact_top_p_of_the_epochs_first_scores(source, tmp_path):
    harness = Harness(source, tmp_path / "store", {"name": "en_cl"}, k=2.4 * annotated(source))
    z = labels_of(source)
    counts = harness.method.initial_counts()["score"]
    ranked = z != NEGATIVE
    np.testing.assert_array_equal(counts[:, 255], ((harness.table("score") == 1) & ranked).sum(0))
    np.testing.assert_array_equal(counts.sum(1), ranked.sum(0))
    p_i = np.clip(np.rint(2.4 * (z == POSITIVE).sum(0)), (z == POSITIVE).sum(0), SAMPLES - (z == NEGATIVE).sum(0))
    for epoch in range(4):
        scores = harness.table("score")
        chosen = np.zeros((SAMPLES, CLASSES), bool)

        def on_step(samples, batch, outputs, step, terms, chosen=chosen, scores=scores, epoch=epoch):
            before = step.state.read("score").numpy()
            np.testing.assert_array_equal(before, scores[samples], "a row changed before its visit")
            if harness.method.cutoffs is None:
                assert epoch == 0
                mask = z[samples] == POSITIVE
            else:
                mask = step.state.selected("score", harness.method.cutoffs).numpy() & (z[samples] != NEGATIVE)
            chosen[samples] = mask
            # The loss by formula: positives, and negatives where nothing is expected.
            f = 1 / (1 + np.exp(-outputs.logits.double().numpy()))
            pos = z[samples] == POSITIVE
            expected = -(np.log(f) * pos + np.log(1 - f) * (~pos & ~mask)).mean(1) + np.abs(f - before).mean(1)
            np.testing.assert_allclose(terms.per_sample.numpy(), expected, rtol=1e-4)
            np.testing.assert_allclose(terms.rows["score"].numpy(), 0.8 * before + 0.2 * f, atol=1e-6)

        harness.epoch(epoch, on_step)
        if epoch > 0:
            np.testing.assert_array_equal(chosen.sum(0), p_i)
            ranked = np.where(z == NEGATIVE, -1.0, scores)
            for i in range(CLASSES):
                assert ranked[chosen[:, i], i].min() >= ranked[~chosen[:, i] & (z[:, i] != NEGATIVE), i].max()
    harness.state.close()


def test_scl_top_k_equals_the_full_maps_on_the_kept_classes(source, tmp_path):
    grid = 3
    body = {"name": "en_scl", "gamma": 1.0}
    full = Harness(source, tmp_path / "full", body, grid, k=2.0)
    every = Harness(source, tmp_path / "top", {**body, "top_k": CLASSES}, grid, k=2.0)
    losses: dict[str, list] = {"full": [], "top": []}
    for name, harness in (("full", full), ("top", every)):
        for epoch in range(2):
            harness.epoch(epoch, lambda s, b, o, st, terms, name=name: losses[name].append(terms.per_sample),
                          maps_at(grid))
    for a, b in zip(losses["full"], losses["top"], strict=True):
        # A tracked map starts constant at the running score, a full one at the label: equal here, as scores start so.
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=0.02)
    full.state.close()
    every.state.close()


def test_heat_outside_the_crop_is_untouched_bit_for_bit(source, tmp_path):
    grid = 3
    harness = Harness(source, tmp_path / "store", {"name": "an_scl"}, grid)
    harness.epoch(0, maps=maps_at(grid))

    def on_step(samples, batch, outputs, step, terms):
        before = step.state.codes("heat").copy()
        step.state.write({"heat": terms.rows["heat"]})
        after = step.state.codes("heat")
        seen = np.broadcast_to(terms.rows["heat"].mask.numpy(), before.shape)
        np.testing.assert_array_equal(before[~seen], after[~seen])
        assert (before[seen] != after[seen]).any()

    harness.epoch(1, on_step, maps_at(grid))
    harness.state.close()


def test_a_budget_below_what_a_batch_leases_is_refused_up_front(source, tmp_path):
    """Two open shards, and a third when a batch ends one and opens another."""
    harness = Harness(source, tmp_path / "store", {"name": "en"}, budget_shards=2, k=2.0 * annotated(source))
    assert harness.state.session.slots.count == 2
    with pytest.raises(UserError, match=r"train\.state_budget_mb holds 2 shards.*lease 3 at a time"):
        harness.epoch(0)
    harness.state.close()


def test_cutoffs_survive_the_checkpoint(source, tmp_path):
    harness = Harness(source, tmp_path / "store", {"name": "en"}, k=2.4 * annotated(source))
    harness.epoch(0)
    harness.epoch(1)
    saved = harness.method.state()
    fresh = build_method({"name": "en"}, replace(harness.task))
    fresh.load_state(saved)
    for name, value in harness.method.cutoffs.to_arrays().items():
        np.testing.assert_array_equal(value, fresh.cutoffs.to_arrays()[name])
    harness.state.close()
