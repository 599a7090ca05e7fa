"""Proves that prediction files of every form give the numbers of naive formulas, and that bad ones are named."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from scipy.io import savemat
from sklearn.metrics import average_precision_score

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.tools.cli import main
from lacuna.tools.eval.truth import Truth
from tests.helpers.labelled_shards import write_dataset

WNIDS = [f"n{i:08d}" for i in range(7)]
IMAGES, CLASSES, LISTED = 40, len(WNIDS), 5


@pytest.fixture
def real(tmp_path):
    """A small world in ReaL's files: two empty sets, a class without positives, rows in ImageFolder's order."""
    rng = np.random.RandomState(0)
    labels = rng.randint(0, CLASSES, IMAGES)
    sets = [sorted({int(label), *rng.choice(6, rng.randint(0, 3), replace=False).tolist()} - {6}) for label in labels]
    sets[3] = sets[11] = []
    names = [f"ILSVRC2012_val_{i + 1:08d}" for i in range(IMAGES)]
    order = sorted(range(IMAGES), key=lambda i: (WNIDS[labels[i]], names[i]))
    (tmp_path / "real.json").write_text(json.dumps(sets))
    (tmp_path / "val_labels.txt").write_text("".join(f"{label}\n" for label in labels))
    (tmp_path / "rows.txt").write_text("".join(f"{WNIDS[labels[i]]}/{names[i]}.JPEG\n" for i in order))
    (tmp_path / "synsets.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    truth = np.array([[c in s for c in range(CLASSES)] for s in sets])
    scores = (rng.rand(IMAGES, CLASSES) * 0.5 + 0.4 * truth).astype(np.float32)  # by validation number
    np.save(tmp_path / "dense.npy", scores[order])
    listed = np.argsort(-scores[order], axis=1)[:, :LISTED]
    listed = np.take_along_axis(listed, rng.rand(IMAGES, LISTED).argsort(axis=1), axis=1)  # columns in no order
    np.save(tmp_path / "classes.npy", listed.astype(np.int16))
    np.save(tmp_path / "scores.npy", np.take_along_axis(scores[order], listed, axis=1))
    return tmp_path, labels, truth, scores, order


def evaluate(capsys, folder: Path, *files: str, extra: tuple[str, ...] = ()) -> dict:
    given = {"--rows": "rows.txt", "--real": "real.json", "--val-labels": "val_labels.txt", "--synsets": "synsets.txt"}
    flags = [part for flag, name in given.items() if flag not in extra for part in (flag, str(folder / name))]
    code = main(["eval", "--protocol", "real", "--predictions", *[str(folder / f) for f in files], *flags, *extra,
                 "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def naive(labels, truth, scores) -> dict:
    order = np.argsort(-scores, axis=1, kind="stable")
    some = truth.any(axis=1)
    hits = np.take_along_axis(truth, order, axis=1)
    right = order == labels[:, None]
    found = {"top1": 100 * right[:, 0].mean(), "top5": 100 * right[:, :5].any(axis=1).mean(),
             "real_top1": 100 * hits[some, 0].mean(), "real_top5": 100 * hits[some, :5].any(axis=1).mean()}
    counts = truth.sum(axis=1)
    subsets = {"": some, "_k1": counts == 1, "_k2": counts == 2, "_k3": counts == 3, "_k4plus": counts >= 4}
    for name, rows in subsets.items():
        ap = [average_precision_score(truth[rows, c], scores[rows, c]) if truth[rows, c].any() else None
              for c in range(CLASSES)]
        scored = [a for a in ap if a is not None]
        found[f"map{name}"] = 100 * sum(scored) / CLASSES
        found[f"map{name}_skip_empty"] = 100 * np.mean(scored) if scored else None
        found[f"map{name}_skip_empty_classes"] = len(scored)
    return found


def assert_same(found: dict, expected: dict) -> None:
    wrong = {k: (found[k], v) for k, v in expected.items()
             if (found[k] is None) != (v is None) or (v is not None and abs(found[k] - v) > 1e-9)}
    assert not wrong


def test_dense_scores(real, capsys):
    folder, labels, truth, scores, _ = real
    found = evaluate(capsys, folder, "dense.npy")
    assert_same(found, naive(labels, truth, scores))
    assert found["truncated"] is False
    assert (found["rows"], found["real_rows"]) == (IMAGES, truth.any(axis=1).sum())


def test_every_form_of_the_k_best_gives_the_same_numbers(real, capsys):
    folder, labels, truth, scores, order = real
    classes, best = np.load(folder / "classes.npy"), np.load(folder / "scores.npy")
    listed = np.zeros_like(scores[order])
    np.put_along_axis(listed, classes.astype(int), best, axis=1)
    by_number = np.zeros_like(listed)
    by_number[order] = listed
    expected = naive(labels, truth, by_number)
    keys = (folder / "rows.txt").read_text().split()
    np.savez(folder / "both.npz", classes=classes, scores=best.astype(np.float64))
    np.savez(folder / "keyed.npz", classes=classes[::-1], scores=best[::-1], keys=np.array(keys[::-1]))
    parquet.write_table(pa.table({"key": keys, "classes": classes.tolist(), "scores": best.tolist()}),
                        folder / "table.parquet")
    for files in (("classes.npy", "scores.npy"), ("scores.npy", "classes.npy"), ("both.npz",), ("table.parquet",)):
        found = evaluate(capsys, folder, *files)
        assert_same(found, expected)
        assert found["truncated"] is True
        assert "truncated: 5 of 7 classes" in found["warnings"][0]
    code = main(["eval", "--protocol", "real", "--predictions", str(folder / "keyed.npz"), "--synsets",
                 str(folder / "synsets.txt"), "--real", str(folder / "real.json"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert_same(found, expected)  # the keys come from the file, the original labels from their folders


@pytest.mark.parametrize("form", ["wnids", "devkit ids", "files and wnids", "files and indices", "kaggle"])
def test_original_labels_in_every_published_form(real, capsys, form):
    """What `shards make imagenet --ground-truth` takes, in an order of its own where the file names the images."""
    folder, labels, truth, scores, _ = real
    names = [f"ILSVRC2012_val_{i + 1:08d}" for i in range(IMAGES)]
    backwards = list(reversed(range(IMAGES)))
    devkit = {wnid: number for number, wnid in enumerate(reversed(WNIDS), 1)}
    text = {"wnids": "".join(f"{WNIDS[label]}\r\n" for label in labels),
            "devkit ids": "".join(f"{devkit[WNIDS[label]]}\n" for label in labels),
            "files and wnids": "".join(f"val/{names[i]}.JPEG {WNIDS[labels[i]]}\n" for i in backwards),
            "files and indices": "".join(f"{names[i]}.JPEG {labels[i]}\n" for i in backwards),
            "kaggle": "ImageId,PredictionString\n" + "".join(f"{names[i]},{WNIDS[labels[i]]} 1 2 3 4 \n"
                                                             for i in backwards)}[form]
    (folder / "val_labels.txt").write_text(text, newline="")
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    savemat(folder / "meta.mat", {"synsets": np.array([(i, w, w, 0) for w, i in devkit.items()], dtype=fields)})
    extra = ("--meta", str(folder / "meta.mat")) if form == "devkit ids" else ()
    assert_same(evaluate(capsys, folder, "dense.npy", extra=extra), naive(labels, truth, scores))


def test_classes_in_another_order_are_renamed_by_their_synsets(real, capsys):
    folder, labels, truth, scores, order = real
    swapped = np.random.RandomState(1).permutation(CLASSES)
    np.save(folder / "swapped.npy", scores[order][:, swapped])
    (folder / "other.txt").write_text("".join(f"{WNIDS[c]}\n" for c in swapped))
    found = evaluate(capsys, folder, "swapped.npy", extra=("--synsets", str(folder / "other.txt")))
    assert_same(found, naive(labels, truth, scores))


def test_scores_of_other_images_are_warned_about(real, capsys):
    folder, _, _, scores, order = real
    np.save(folder / "worse.npy", 1 - scores[order])  # with 40 images, mere noise may look better than chance
    assert any("about what random scores give" in w for w in evaluate(capsys, folder, "worse.npy")["warnings"])
    assert not evaluate(capsys, folder, "dense.npy")["warnings"]


@pytest.mark.parametrize(("change", "words"), [
    (lambda f: np.save(f / "dense.npy", np.full((IMAGES, CLASSES), np.nan, np.float32)), "row 0, column 0 is nan"),
    (lambda f: np.save(f / "dense.npy", np.zeros((IMAGES, 9), np.float32)), "9 scores a row, the labels have 7"),
    (lambda f: np.save(f / "dense.npy", np.zeros((IMAGES - 1, CLASSES), np.float32)), "40 rows, .* has 39"),
    (lambda f: np.save(f / "dense.npy", np.zeros((IMAGES, CLASSES), np.int32)), "expected floating-point"),
    (lambda f: np.save(f / "dense.npy", np.array([{}]), allow_pickle=True), "damaged, or not what its ending says"),
    (lambda f: (f / "dense.npy").unlink(), "no such file"),
    (lambda f: (f / "rows.txt").write_text("x\n" * IMAGES), "'x' is not in .*real.json"),
    (lambda f: (f / "rows.txt").write_text(f"{WNIDS[0]}/ILSVRC2012_val_00000001.JPEG\n" * IMAGES), "more than one row"),
    (lambda f: (f / "real.json").write_text(json.dumps([[9]] * IMAGES)), r"entry 0 is \[9\]"),
    (lambda f: (f / "real.json").write_text("{"), "not valid JSON"),
    (lambda f: (f / "val_labels.txt").write_text("1\n"), "1 lines; expected 40"),
    (lambda f: (f / "val_labels.txt").write_text("7\n" * IMAGES), r"expected a class id 0\.\.6.*--meta"),
    (lambda f: (f / "val_labels.txt").write_text("n99999999\n" * IMAGES), "n99999999 is no class"),
    (lambda f: (f / "val_labels.txt").write_text("x.JPEG 0\n" * IMAGES), "ILSVRC2012_val_00000001 has none"),
    (lambda f: (f / "val_labels.txt").write_text("0\n" * IMAGES), "Class ids must be in sorted-WNID order"),
    (lambda f: (f / "synsets.txt").write_text("cat\n"), "line 1 does not start with a WNID"),
])
def test_bad_files(real, capsys, change, words):
    change(real[0])
    with pytest.raises(AssertionError, match=words):
        evaluate(capsys, real[0], "dense.npy")


@pytest.mark.parametrize(("classes", "scores", "words"), [
    ([[0, 9]], [[0.5, 0.4]], "class id 9"),
    ([[0, 0]], [[0.5, 0.4]], "lists a class twice"),
    ([[0, 1]], [[0.5, -0.4]], "negative score"),
    ([[0, 1, 2]], [[0.5, 0.4]], "of the same shape"),
])
def test_bad_k_best(real, capsys, classes, scores, words):
    np.save(real[0] / "c.npy", np.repeat(classes, IMAGES, axis=0))
    np.save(real[0] / "s.npy", np.repeat(scores, IMAGES, axis=0))
    with pytest.raises(AssertionError, match=words):
        evaluate(capsys, real[0], "c.npy", "s.npy")


def test_missing_images(real, capsys):
    folder, labels, truth, scores, order = real
    np.save(folder / "dense.npy", scores[order][:30])
    kept = (folder / "rows.txt").read_text().splitlines(keepends=True)[:30]
    (folder / "rows.txt").write_text("".join(kept))
    with pytest.raises(AssertionError, match=r"is missing.*--allow-missing"):
        evaluate(capsys, folder, "dense.npy")
    found = evaluate(capsys, folder, "dense.npy", extra=("--allow-missing",))
    assert_same(found, naive(labels[order[:30]], truth[order[:30]], scores[order[:30]]))


def test_shards_as_truth(tmp_path, capsys):
    """OpenImages' rule against a naive loop; groups by positives; a class without negatives is no class."""
    rng = np.random.RandomState(3)
    truth = rng.choice([POSITIVE, NEGATIVE, UNKNOWN], (90, 13), p=[0.2, 0.2, 0.6]).astype(np.int8)
    truth[:, 4] = np.where(truth[:, 4] == NEGATIVE, UNKNOWN, truth[:, 4])
    truth[:, 5] = UNKNOWN
    scores = rng.rand(90, 13).astype(np.float32) + (truth == POSITIVE) * np.float32(0.3)
    write_dataset(str(tmp_path / "set"), truth, [50, 40], unlisted=UNKNOWN)
    np.savez(tmp_path / "p.npz", scores=scores, keys=np.array([f"{i:06d}" for i in range(90)]))
    code = main(["eval", "--protocol", "openimages", "--shards", str(tmp_path / "set"), "--predictions",
                 str(tmp_path / "p.npz"), "--json", "--csv", str(tmp_path / "classes.csv")])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    known = truth != UNKNOWN
    valid = [c for c in range(13) if c not in (4, 5)]
    ap = {c: average_precision_score(truth[known[:, c], c] == POSITIVE, scores[known[:, c], c]) for c in valid}
    weight = {c: int((truth[:, c] == POSITIVE).sum()) for c in valid}
    assert found["map_c_classes"] == 11
    assert found["map_c"] == pytest.approx(100 * np.mean(list(ap.values())), abs=1e-9)
    assert found["map_o"] == pytest.approx(100 * sum(ap[c] * weight[c] for c in valid) / sum(weight.values()), abs=1e-9)
    groups = np.array_split(sorted(valid, key=lambda c: weight[c]), 5)
    assert [found[f"map_group{g}_classes"] for g in range(1, 6)] == [3, 2, 2, 2, 2]
    for g, group in enumerate(groups, 1):
        assert found[f"map_group{g}"] == pytest.approx(100 * np.mean([ap[c] for c in group]), abs=1e-9)
    with open(tmp_path / "classes.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(rows[c]["ap"]) for c in valid] == pytest.approx([ap[c] for c in valid], abs=1e-12)
    assert rows[5]["ap"] == ""
    assert main(["eval", "--protocol", "multilabel", "--shards", str(tmp_path / "set"), "--predictions",
                 str(tmp_path / "p.npz")]) == 2
    assert "leaves labels unknown" in capsys.readouterr().err


def test_a_file_name_that_two_folders_have_is_not_enough():
    labels = SparseLabels.from_lists([[0]] * 3, [[]] * 3, NEGATIVE)
    truth = Truth("set", ["a/1", "b/1", "b/2"], labels, ["x"], [])
    assert truth.rows_of(["b/1.jpg", "2.jpg", "a/1"], "rows", False).tolist() == [1, 2, 0]
    with pytest.raises(UserError, match=r"'1\.jpg' is not in set"):
        truth.rows_of(["1.jpg"], "rows", True)


def test_flags_that_do_not_go_together(capsys):
    for flags, words in ((["--protocol", "real"], "or else --predictions"),
                         (["--protocol", "real", "--predictions", "x.npy"], "--real is needed"),
                         (["--protocol", "lvis", "--predictions", "x.npy"], "--shards is needed"),
                         (["run", "--protocol", "lvis"], "--shards is needed"),
                         (["run", "--protocol", "lvis", "--shards", "x", "--thresholds-out", "t"], "needs --val")):
        assert main(["eval", *flags]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.skipif(not os.environ.get("LACUNA_EVAL_DATA"), reason="published ReaL labels: set LACUNA_EVAL_DATA")
def test_published_numbers(capsys):
    folder = Path(os.environ["LACUNA_EVAL_DATA"]) / "real"
    found = evaluate(capsys, folder, "resnet50_top5_classes.npy", "resnet50_top5_probs.npy")
    assert [round(found[name], 3) for name in ("top1", "top5", "real_top1")] == [75.062, 92.476, 81.982]
    assert [found[f"rows_{k}"] for k in ("k1", "k2", "k3", "k4plus")] == [39_394, 5_408, 1_319, 716]
