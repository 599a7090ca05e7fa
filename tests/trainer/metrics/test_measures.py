"""Proves that average precision, its published variants, best-F1 thresholds and top-k equal naive definitions."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.metrics.measures import (
    average_precision,
    f1_counts,
    mean_f1,
    topk_accuracy,
    topk_counts,
    write_table,
)
from lacuna.trainer.metrics.ranking import ordered_keys, scores_of


def naive_ap(scores, targets):
    """scikit-learn on the annotated entries of every class; NaN without positives."""
    out = []
    for s, t in zip(scores.T, targets.T, strict=True):
        known = t != UNKNOWN
        out.append(average_precision_score(t[known] == POSITIVE, s[known]) if (t == POSITIVE).any() else np.nan)
    return np.array(out)


def naive_ungrouped_ap(scores, targets):
    """The ASL repositories' loop: reversed argsort, precision at every positive."""
    out = []
    for s, t in zip(scores.T, targets.T, strict=True):
        known = t != UNKNOWN
        hit = (t[known] == POSITIVE)[np.argsort(s[known], kind="stable")[::-1]]
        seen, total = 0, 0.0
        for place, positive in enumerate(hit, start=1):
            if positive:
                seen += 1
                total += seen / place
        out.append(total / (seen + 1e-8) if seen else np.nan)
    return np.array(out)


def random_case(seed, rows=300, classes=23, decimals=None, dtype=np.float32, parts=(0.05, 0.75, 0.2)):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((rows, classes)) * 3
    scores = (scores if decimals is None else np.round(scores, decimals)).astype(dtype)
    targets = rng.choice([POSITIVE, NEGATIVE, UNKNOWN], size=(rows, classes), p=parts).astype(np.int8)
    return scores, targets


def collected(scores, targets, batch=64):
    collector = ScoreCollector(scores.shape[1])
    for start in range(0, len(scores), batch):
        collector.add(scores[start : start + batch], targets[start : start + batch])
    return collector


@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_equals_sklearn_with_and_without_ties(decimals, dtype):
    scores, targets = random_case(1, decimals=decimals, dtype=dtype)
    result = average_precision(scores, targets)
    np.testing.assert_allclose(result.ap, naive_ap(scores, targets), rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.classes.ap_ungrouped, naive_ungrouped_ap(scores, targets), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), classes=st.integers(1, 40),
       decimals=st.sampled_from([None, 1, 0]), unknown=st.sampled_from([0.0, 0.5, 0.95]))
def test_dense_and_sparse_storage_give_the_same_bits(seed, rows, classes, decimals, unknown):
    parts = (0.3 * (1 - unknown), 0.7 * (1 - unknown), unknown)
    scores, targets = random_case(seed, rows, classes, decimals, parts=parts)
    dense = average_precision(scores, targets)
    np.testing.assert_allclose(dense.ap, naive_ap(scores, targets), rtol=0, atol=1e-12)
    for sparse in (False, True):
        collector = ScoreCollector(classes)
        collector.sparse = sparse
        collector.add(scores[: rows // 2], targets[: rows // 2])
        collector.add(torch.from_numpy(scores[rows // 2 :]), torch.from_numpy(targets[rows // 2 :]))
        np.testing.assert_array_equal(collector.result().classes.to_matrix(), dense.classes.to_matrix())


def test_golden_value_and_extreme_scores():
    scores = np.array([[0.9], [0.8], [0.7], [0.6], [0.5]], np.float32)
    targets = np.array([[1], [0], [1], [1], [0]], np.int8)
    assert average_precision(scores, targets).ap[0] == pytest.approx(0.805556, abs=5e-7)
    odd = np.array([[0.0], [-0.0], [np.inf], [-np.inf], [1e-45]], np.float32)
    assert average_precision(odd, targets).ap[0] == pytest.approx((1 / 1 + 2 / 4 + 3 / 5) / 3)
    np.testing.assert_array_equal(scores_of(ordered_keys(odd)), odd)


def test_every_mean_names_its_rule_and_its_number_of_classes():
    # class 0: both kinds; 1: positives only; 2: negatives only; 3: no annotation
    targets = np.array([[1, 1, 0, UNKNOWN], [0, 1, 0, UNKNOWN], [1, UNKNOWN, 0, UNKNOWN]], np.int8)
    scores = np.array([[0.9, 0.1, 0.5, 0.5], [0.8, 0.2, 0.5, 0.5], [0.7, 0.3, 0.5, 0.5]], np.float32)
    first = (1 + 2 / 3) / 2
    s = average_precision(scores, targets).summary()
    assert (s["map"], s["map_classes"]) == (pytest.approx(100 * (first + 1) / 4), 4)
    assert (s["map_skip_empty"], s["map_skip_empty_classes"]) == (pytest.approx(100 * (first + 1) / 2), 2)
    assert (s["map_asl"], s["map_asl_classes"]) == (pytest.approx(100 * (first + 1) / 4, abs=1e-5), 4)
    assert (s["map_csl_c"], s["map_csl_c_classes"]) == (pytest.approx(100 * first), 1)
    assert (s["map_csl_o"], s["map_csl_o_classes"]) == (pytest.approx(100 * first), 1)
    assert (s["map_ll"], s["map_ll_classes"]) == (pytest.approx(100 * (first + 1) / 3), 3)
    assert s["rows"] == 3


def test_map_csl_o_weighs_classes_by_positives():
    scores, targets = random_case(5)
    ap, pos = naive_ap(scores, targets), (targets == POSITIVE).sum(axis=0)
    expected = 100 * (ap * pos).sum() / pos.sum()
    assert average_precision(scores, targets).summary()["map_csl_o"] == pytest.approx(expected)


@pytest.mark.parametrize("decimals", [None, 1])
def test_thresholds_reach_the_best_f1(decimals):
    scores, targets = random_case(2, rows=120, classes=6, decimals=decimals)
    result = average_precision(scores, targets)
    for c, threshold in enumerate(result.thresholds):
        known = targets[:, c] != UNKNOWN
        truth, s = targets[known, c] == POSITIVE, scores[known, c]
        best = max(f1_score(truth, s >= x) for x in np.unique(s))
        assert result.classes.best_f1[c] == pytest.approx(best, abs=1e-12)
        assert f1_score(truth, s >= threshold) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("decimals", [None, 1])
def test_mean_f1_of_another_set_with_chosen_thresholds(decimals):
    """Rounded scores lie on the thresholds too: such an entry is predicted positive."""
    thresholds = average_precision(*random_case(2, decimals=decimals)).thresholds
    scores, targets = random_case(3, decimals=decimals)
    assert (scores == thresholds.astype(np.float32)).any() == (decimals is not None)
    expected = [f1_score((t == POSITIVE)[t != UNKNOWN], (s >= x)[t != UNKNOWN])
                for s, t, x in zip(scores.T, targets.T, thresholds, strict=True)]
    counts = f1_counts(scores[:100], targets[:100], thresholds) + f1_counts(scores[100:], targets[100:], thresholds)
    assert mean_f1(counts)["mf1"] == pytest.approx(100 * np.mean(expected))
    assert mean_f1(counts)["mf1_skip_empty_classes"] == 23


def test_topk_leaves_out_rows_without_positives():
    scores, targets = random_case(4, rows=50, classes=12, decimals=0)
    rows = [r for r in range(50) if (targets[r] == POSITIVE).any()]
    naive = {k: 100 * np.mean([(targets[r][np.argsort(-scores[r], kind="stable")[:k]] == POSITIVE).any() for r in rows])
             for k in (1, 5)}
    found = topk_accuracy(topk_counts(scores, targets))
    assert found == {"top1": pytest.approx(naive[1]), "top5": pytest.approx(naive[5]), "top_rows": len(rows)}
    assert topk_accuracy(topk_counts(scores[:, :3], targets[:, :3]))["top5"] == 100.0


def test_rows_of_one_kind_can_be_ranked_alone():
    for parts in ((0.1, 0.9, 0.0), (0.02, 0.02, 0.96)):
        scores, targets = random_case(6, parts=parts)
        collector = collected(scores, targets)
        mask = collector.row_positives() == 1
        np.testing.assert_array_equal(mask, (targets == POSITIVE).sum(axis=1) == 1)
        alone = average_precision(scores[mask], targets[mask])
        found = collector.result(rows=mask)
        np.testing.assert_array_equal(found.classes.to_matrix(), alone.classes.to_matrix())
        assert found.count == mask.sum()


def test_padding_is_not_collected_and_buffers_may_be_reused():
    scores, targets = random_case(7, rows=40)
    collector = ScoreCollector(23)
    buffer = np.empty((20, 23), np.float32)
    for start in (0, 20):
        buffer[:] = scores[start : start + 20]
        collector.add(buffer, targets[start : start + 20], keep=np.arange(20) < 17)
    kept = np.r_[0:17, 20:37]
    np.testing.assert_array_equal(collector.result().ap, average_precision(scores[kept], targets[kept]).ap)


def test_nothing_collected_is_a_result_without_scored_classes():
    summary = ScoreCollector(4).result().summary()
    assert (summary["map"], summary["map_skip_empty_classes"], summary["rows"]) == (0.0, 0, 0)


def test_table_is_written_as_csv(tmp_path):
    targets = np.array([[1, 0], [0, 0]], np.int8)
    result = average_precision(np.array([[0.5, 0.1], [0.7, 0.2]], np.float32), targets)
    write_table(str(tmp_path / "ap.csv"), result.table(["cat, tabby", "dog"], ["n1", "n2"]))
    rows = list(csv.DictReader((tmp_path / "ap.csv").open()))
    assert rows[0] == {"class": "0", "id": "n1", "name": "cat, tabby", "ap": "0.5", "positives": "1", "negatives": "1"}
    assert rows[1]["ap"] == ""


@pytest.mark.parametrize(("scores", "targets", "message"), [
    (np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int8), "scores are int64"),
    (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int64), "int64"),
    (np.zeros((2, 3), np.float32), np.zeros((3, 2), np.int8), "same shape"),
    (np.array([[0, np.nan]], np.float32), np.zeros((1, 2), np.int8), "row 0, class 1"),
])
def test_bad_input_is_named(scores, targets, message):
    with pytest.raises(ValueError, match=message):
        average_precision(scores, targets)


def test_the_collector_refuses_float64_which_it_would_have_to_round():
    with pytest.raises(ValueError, match="scores are float64; pass float32, float16 or bfloat16"):
        ScoreCollector(3).add(np.zeros((2, 3)), np.zeros((2, 3), np.int8))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_many_classes_with_and_without_unknown_entries(threads, unknown):
    """Several blocks of classes, several threads; without unknown entries only positives are looked up."""
    scores, targets = random_case(7, 500, 150, 1, parts=(0.02, 0.98 - unknown, unknown))
    targets[:, [0, 70, 149]] = NEGATIVE  # without positives
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = collected(scores, targets).result()
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(result.ap, naive_ap(scores, targets), rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.classes.ap_ungrouped, naive_ungrouped_ap(scores, targets), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(result.classes.positives, (targets == POSITIVE).sum(0))
    np.testing.assert_array_equal(result.classes.negatives, (targets == NEGATIVE).sum(0))
