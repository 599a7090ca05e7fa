"""Proves that a head is refitted as naive loops over single classes do it, and that the new run reads like others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.cli import main
from lacuna.tools.passes.cached import cached_view
from lacuna.tools.passes.scoring import ShardModel
from lacuna.tools.passes.trained import load_model, open_trained
from lacuna.tools.refit import head_inputs
from lacuna.tools.refit.fitting import Recipe, Samples, refit
from tests.helpers.cached_runs import body as cached_body
from tests.helpers.cached_runs import make_scenes, without_tars
from tests.helpers.launching import last_checkpoint
from tests.helpers.small_runs import CLASSES, Trainer, body, make_data


def drawn(seed: int, rows: int, unknown: float) -> Samples:
    draws = np.random.RandomState(seed)
    inputs = draws.randn(rows, 5).astype(np.float32)
    truth = inputs @ np.random.RandomState(9).randn(5, 6) + draws.randn(rows, 6) > 0.8
    labels = np.where(draws.rand(rows, 6) < unknown, UNKNOWN, np.where(truth, POSITIVE, NEGATIVE)).astype(np.int8)
    labels[:, 5] = np.where(labels[:, 5] == NEGATIVE, UNKNOWN, labels[:, 5])  # positives alone: cannot be trained
    return Samples(torch.from_numpy(inputs), labels)


def naive(weight: torch.Tensor, bias: torch.Tensor, train: Samples, val: Samples, c: int,
          recipe: Recipe) -> tuple[torch.Tensor, int]:
    """(row with its bias, step at which it was kept) of one class."""
    row = torch.cat([weight[c], bias[c : c + 1]]).clone().requires_grad_()
    mine, theirs = train.labels[:, c] != UNKNOWN, val.labels[:, c] != UNKNOWN
    adam = torch.optim.Adam([row], lr=recipe.lr)

    def precision() -> float:
        logits = (val.inputs[torch.from_numpy(theirs)] @ row[:-1] + row[-1]).detach().numpy()
        return average_precision_score(val.labels[theirs, c] == POSITIVE, logits)

    best, kept, at = precision(), row.detach().clone(), 0
    for step in range(1, recipe.steps + 1):
        logits = train.inputs[torch.from_numpy(mine)] @ row[:-1] + row[-1]
        target = torch.from_numpy(train.labels[mine, c] == POSITIVE).float()
        p = torch.sigmoid(logits)
        if recipe.loss == "bce":
            loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        else:
            shifted = (p - 0.05).clamp(min=0)
            loss = -(target * p.log() + (1 - target) * shifted.detach() ** 4 * (1 - shifted).log()).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % recipe.every == 0:
            found = precision()
            if found > best:
                best, kept, at = found, row.detach().clone(), step
            if step - at >= recipe.patience:
                break
    return kept, at


@pytest.mark.parametrize("loss", ["asl", "bce"])
def test_every_class_by_itself(loss):
    train, val = drawn(0, 80, 0.6), drawn(1, 60, 0.2)
    start = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(6, 5, generator=start), torch.randn(6, generator=start)
    recipe = Recipe(loss, lr=0.03, steps=120, patience=40, every=5)
    found = refit(weight, bias, train, val, recipe)
    for c in range(5):
        row, at = naive(weight, bias, train, val, c, recipe)
        assert found.steps[c] == at
        torch.testing.assert_close(torch.cat([found.weight[c], found.bias[c : c + 1]]), row, atol=1e-4, rtol=1e-4)
        assert found.after[c] >= found.before[c]
    assert (found.steps[:5] > 0).sum() >= 3
    assert found.steps[5] == 0
    torch.testing.assert_close(found.weight[5], weight[5], atol=0, rtol=0)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("refit")
    make_data(folder)
    config = body(folder, "first")
    config["model"]["head_norm"] = "l2"
    config["data"]["train"]["labels"] = "labels"
    Trainer().train(config)
    return str(folder / "first")


def test_the_new_run(trained_run, tmp_path, capsys):
    out = str(tmp_path / "second")
    train = str(Path(trained_run).parent / "train")  # what helps on the small set's own val is the opposite
    argv = ["refit", trained_run, "--out", out, "--lr", "0.05", "--steps", "60", "--workers", "1", "--val", train]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["run"] == out
    assert report["refitted"] >= 1
    assert report["val_map_after"] > report["val_map_before"]
    old, new = open_trained(trained_run), open_trained(out)
    assert new.classes == old.classes
    source = ShardSource.load(old.config.data.val.url, "labels", None)
    after = load_file(last_checkpoint(Path(out)) / "model.safetensors")
    best = load_file(f"{old.checkpoint}/model.safetensors")
    assert sorted(name for name in best if not torch.equal(best[name], after[name])) == ["head.bias", "head.weight"]
    model = ShardModel(load_model(new, source, torch.device("cpu")), source, new.config)
    inputs, logits = (model.run(0, f)[0] for f in (head_inputs, lambda m, x: m(x)[0]))
    np.testing.assert_allclose(inputs @ after["head.weight"].numpy().T + after["head.bias"].numpy(), logits, atol=1e-5)
    assert logits.shape[1] == CLASSES
    assert main(argv) == 2
    assert "there is already a run" in capsys.readouterr().err


@pytest.mark.parametrize("views", [0, 2])
def test_what_a_phase_cached_is_not_computed_again(views, tmp_path, capsys):
    """The same rows as from the images, which are gone: the cache has half precision, as in training."""
    shards = make_scenes(tmp_path)
    config = cached_body(shards, tmp_path, "run", {"views": views})
    Trainer().train(config)
    argv = ["refit", str(tmp_path / "run"), "--lr", "0.05", "--steps", "20", "--workers", "1", "--json"]
    trained, source = open_trained(str(tmp_path / "run")), ShardSource.load(str(shards / "train"), "labels", None)
    view = cached_view(trained, source)
    assert view is not None
    plain = ShardModel(load_model(trained, source, torch.device("cpu")), source, trained.config)
    cut = load_model(trained, source, torch.device("cpu"))
    kept = ShardModel(cut, source, trained.config, cached_view(trained, source, cut))
    exact = plain.run(2, head_inputs)[0]
    without_tars(shards)
    np.testing.assert_allclose(kept.run(2, head_inputs)[0], exact, atol=5e-3 * np.abs(exact).max())
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["val_map_after"] > 0
    shutil.rmtree(tmp_path / ".cache")
    assert cached_view(trained, source) is None


@pytest.mark.parametrize(("options", "message"), [(["--lr", "0"], "--lr 0.0, --steps 5000, --patience 300: all must"),
                                                  (["--steps", "0"], "--steps 0")])
def test_mistakes(trained_run, options, message, capsys):
    assert main(["refit", trained_run, *options]) == 2
    assert re.search(message, capsys.readouterr().err)
