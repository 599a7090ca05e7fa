"""SE-L, SE-I and SE equal their formulas, a double loop over images and classes, in all readings; bad stores."""

import math

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs, Step, Task
from lacuna.trainer.methods.soft_exposure.neighbors import SoftExposureSettings, sharpness
from lacuna.trainer.neighbors import data_fingerprints
from lacuna.trainer.state_rows import StateRows
from tests.helpers.loss_checks import sigmoid
from tests.helpers.neighborhoods import annotated_source, make_neighborhood
from tests.helpers.oracles import batch_of, step_of
from tests.helpers.state.memory import MemoryStore

K, CLASSES, SAMPLES = 4, 12, 30
READINGS = [{}, {"beta": 2.0, "gamma": 0.3}, {"invert": True}, {"normalize": "separate"}, {"nearest": "median"},
            {"nearest": "median", "normalize": "separate", "invert": True, "gamma": 0.1},
            {"positive_weight": 3.0}, {"beta": 100.0}, {"side": "negative"},
            {"side": "negative", "normalize": "separate"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Random labels, neighbours and class distances; class 11 has no median, some distances tie and some exceed 1."""
    rng = np.random.default_rng(3)
    labels = rng.choice([POSITIVE, NEGATIVE, UNKNOWN], (SAMPLES, CLASSES), p=[0.12, 0.15, 0.73]).astype(np.int8)
    labels[0], labels[1], labels[2] = UNKNOWN, NEGATIVE, POSITIVE
    labels[3] = np.where(labels[3] == POSITIVE, UNKNOWN, labels[3])
    labels[4] = np.where(labels[4] == NEGATIVE, UNKNOWN, labels[4])
    labels[5, :2] = POSITIVE, NEGATIVE
    # Eighths: their means are exact in float32 and float64 alike, so ties are ties in both.
    between = np.round(rng.uniform(0, 1.3, (CLASSES, CLASSES)) * 8) / 8
    between = np.minimum(between, between.T).astype(np.float32)
    between[11] = between[:, 11] = np.inf
    neighbors = np.stack([rng.permutation(np.delete(np.arange(SAMPLES), n))[:K] for n in range(SAMPLES)])
    distances = np.sort(np.round(rng.uniform(0.3, 1.3, (SAMPLES, K)) * 8) / 8, axis=1).astype(np.float32)
    neighbors[6, 2:], distances[6, 2:] = -1, np.inf
    neighbors[7], distances[7] = -1, np.inf
    folder = tmp_path_factory.mktemp("near")
    source = annotated_source(str(folder / "data"), labels, [17, 13])
    make_neighborhood(str(folder / "near"), source, neighbors, distances, between)
    return str(folder / "near"), source, labels, neighbors, distances, between


def task_for(source, data=None):
    return Task(source.classes, source.index.samples, source.sidecar.positives, source.sidecar.negatives, False,
                data=data_fingerprints(source) if data is None else data)


def loss_of(name, made, logits, rows, **settings):
    """The global loss through the real fields, as the loop adds it up."""
    url, source, labels = made[:3]
    method = build_method({"name": name, "neighbors": url, **settings}, task_for(source))
    step = step_of(len(rows))
    if method.fields():
        store = MemoryStore(source.index.counts, "", method.fields())
        given = {f.name: (lambda shard, n=f.name: method.initial_rows(n, labels, shard)) for f in method.fields()}
        session = store.session(store.begin_launch(), budget=1 << 20, initials=given)
        session.begin([0, 1], 0)
        session.lease(0)
        session.lease(1)
        shards = (np.asarray(rows) >= 17).astype(np.int64)
        at = session.at(shards, np.asarray(rows) - 17 * shards)
        step = Step(step.world, len(rows), 0, 1, state=StateRows(at, torch.device("cpu")))
    terms = method.loss(Outputs(logits), batch_of(labels[rows]), step)
    return terms.per_sample.sum() / max(1, len(rows))


# ---- the oracle


def picked(values, how):
    values = sorted(v for v in values if v < math.inf)
    if not values:
        return None
    return float(np.median(values[:5])) if how == "median" else values[0]


def temperatures(name, made, n, beta=5.0, gamma=0.0, invert=False, normalize="joint", nearest="min",
                 side="nearer"):
    """{class: T} of the unknown classes of sample n that are not ignored."""
    _, _, labels, neighbors, distances, between = made
    found = {}
    for u in range(CLASSES):
        if labels[n, u] != UNKNOWN:
            continue
        by_label, by_image = [], []
        for label in (POSITIVE, NEGATIVE):
            by_label.append(picked([float(between[u, c]) for c in range(CLASSES) if labels[n, c] == label], nearest))
            by_image.append(picked([float(distances[n, j]) for j in range(K)
                                    if neighbors[n, j] >= 0 and labels[neighbors[n, j], u] == label], nearest))
        if name == "se_l":
            if None not in by_label or (side == "negative" and by_label[0] is not None):
                found[u] = tuple(by_label)
        elif name == "se_i":
            if by_image != [None, None]:
                found[u] = tuple(1.0 if d is None else d for d in by_image)
        else:
            found[u] = tuple(min(math.inf if a is None else a, 1.0 if b is None else b)
                             for a, b in zip(by_label, by_image, strict=True))
    if side == "negative":
        found = {u: (plus, plus) for u, (plus, _) in found.items()}
    tops = [max((d[i] for d in found.values()), default=1) or 1 for i in (0, 1)]
    if normalize == "joint":
        tops = [max(tops)] * 2 if found else tops
    out = {}
    for u, (plus, minus) in found.items():
        plus, minus = plus / tops[0], minus / tops[1]
        near = min(plus, minus)
        size = math.exp(beta * near if invert else beta * (1 - near))
        out[u] = (size if plus < minus else -size) + gamma
    return out


def entry_loss(a, label, soft, positive_weight):
    """Loss of one entry: `soft` is its T, None if it is ignored."""
    if label == POSITIVE:
        return -positive_weight * math.log(sigmoid(a))
    if label == NEGATIVE:
        return -math.log(sigmoid(-a))
    return 0.0 if soft is None else -math.log(sigmoid(a / soft))


@pytest.mark.parametrize("name", ["se_l", "se_i", "se"])
@pytest.mark.parametrize("settings", READINGS)
def test_value_and_gradient_equal_the_formula(name, settings, made):
    rows = np.random.default_rng(1).permutation(SAMPLES)
    a = np.random.default_rng(2).normal(0, 3, (SAMPLES, CLASSES))
    logits = torch.tensor(a, requires_grad=True)
    value = loss_of(name, made, logits, rows, **settings)
    value.backward()
    readings = {key: value for key, value in settings.items() if key != "positive_weight"}
    weight, total, slopes = settings.get("positive_weight", 1.0), 0.0, np.zeros_like(a)
    for i, n in enumerate(rows):
        soft = temperatures(name, made, n, **readings)
        for c in range(CLASSES):
            low, middle, high = (entry_loss(a[i, c] + shift, made[2][n, c], soft.get(c), weight) / SAMPLES
                                 for shift in (-1e-5, 0, 1e-5))
            total += middle
            slopes[i, c] = (high - low) / 2e-5
    # Distances are float32, and their exponentials multiply the error by β.
    tolerance = 2e-5 if settings.get("beta") == 100 else 2e-6
    np.testing.assert_allclose(value.item(), total, rtol=tolerance)
    np.testing.assert_allclose(logits.grad.numpy(), slopes, rtol=10 * tolerance, atol=1e-9)


def test_the_cases_are_covered(made):
    """The data above has both signs, ignored and unsaid entries, and ties, for each method."""
    for name in ("se_l", "se_i", "se"):
        found = [temperatures(name, made, n) for n in range(SAMPLES)]
        values = [t for row in found for t in row.values()]
        assert min(values) < -1
        assert max(values) > 1
        unknowns = [(made[2][n] == UNKNOWN).sum() for n in range(SAMPLES)]
        ignored = [len(row) < count for row, count in zip(found, unknowns, strict=True)]
        assert any(ignored) == (name != "se")


def test_golden_temperatures():
    """|T| for β = 5 at d = 0, .25, .5, .75 and 1; equal distances are negatives."""
    near = torch.tensor([[0.0, 0.25, 0.5, 0.75, 1.0]])
    settings = SoftExposureSettings(name="se", neighbors="x")
    ones = torch.ones_like(near)
    expected = [148.413, 42.521, 12.182, 3.490, 1.0]
    positives = 1 / sharpness(near.clone(), ones.clone(), ones, settings)
    negatives = 1 / sharpness(ones.clone(), near.clone(), ones, settings)
    np.testing.assert_allclose(positives[0, :4], expected[:4], rtol=1e-4)
    np.testing.assert_allclose(-negatives[0], expected, rtol=1e-4)
    assert positives[0, 4] == -1


@pytest.mark.parametrize("name", ["se_l", "se_i", "se"])
def test_odd_inputs_stay_finite(name, made):
    for rows in ([], [0], [0, 1, 2, 7]):
        for size in (80.0, -80.0, 0.0):
            logits = torch.full((len(rows), CLASSES), size, dtype=torch.bfloat16, requires_grad=True)
            loss = loss_of(name, made, logits.float(), rows)
            loss.backward()
            assert torch.isfinite(loss)
            assert torch.isfinite(logits.grad).all()


# ---- bad input


def test_neighbors_of_something_else_are_refused(made, tmp_path):
    url, source = made[:2]
    right = data_fingerprints(source)
    for what in right:
        with pytest.raises(UserError, match=f"another {what}"):
            build_method({"name": "se", "neighbors": url}, task_for(source, {**right, what: "0123"}))
    fewer = Task(7, 30, np.ones(7), np.ones(7), False)
    with pytest.raises(UserError, match="12 classes, the training data has 7"):
        build_method({"name": "se_l", "neighbors": url}, fewer)
    with pytest.raises(UserError, match=r"neighbors\.json: no such file.*lacuna neighbors"):
        build_method({"name": "se_i", "neighbors": str(tmp_path / "nothing")}, task_for(source))
    with pytest.raises(UserError, match=r"needs method\.neighbors.*lacuna neighbors"):
        build_method({"name": "se"}, task_for(source))


def test_changed_files_are_refused(made, tmp_path):
    import shutil

    url, source = made[:2]
    copy = tmp_path / "near"
    shutil.copytree(url, copy)
    before = build_method({"name": "se_l", "neighbors": str(copy)}, task_for(source)).state()
    other = np.load(copy / "class_distances.npy")
    np.save(copy / "class_distances.npy", other + 1)
    with pytest.raises(UserError, match="does not fit"):
        build_method({"name": "se_l", "neighbors": str(copy)}, task_for(source))
    make_neighborhood(str(copy), source, *made[3:5], made[5] * 0.5)
    changed = build_method({"name": "se_l", "neighbors": str(copy)}, task_for(source))
    with pytest.raises(UserError, match="not the neighbours that this run began with"):
        changed.load_state(before)
    (copy / "neighbors.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        build_method({"name": "se_l", "neighbors": str(copy)}, task_for(source))


@pytest.mark.parametrize(("key", "value"), [("beta", 0), ("gamma", 1), ("normalize", "none"), ("nearest", "mean")])
def test_settings_out_of_range(key, value, made):
    with pytest.raises(UserError, match=key):
        build_method({"name": "se", "neighbors": made[0], key: value}, task_for(made[1]))
