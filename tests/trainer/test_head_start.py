"""Proves that a head starts from vectors of its classes, matched by name, with their angles whatever the widths are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex
from lacuna.trainer.class_vectors import read_class_vectors, write_class_vectors
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.head_decay import check_head_decay
from lacuna.trainer.head_start import fitted
from tests.helpers.launching import last_checkpoint
from tests.helpers.small_runs import CLASSES, WIDTH, Trainer, body, make_data


def cosines(vectors: np.ndarray) -> np.ndarray:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return units @ units.T


@pytest.mark.parametrize("given", [3, 5, 8, 20])
def test_angles_stay(given):
    """6 classes, 8 inputs: every width keeps all products, since there are no more directions than classes."""
    vectors = torch.randn(6, given, generator=torch.Generator().manual_seed(1))
    found = fitted(vectors, 8, seed=3)
    assert found.shape == (6, 8)
    torch.testing.assert_close(found @ found.T, vectors @ vectors.T, atol=1e-4, rtol=1e-4)
    if given == 8:
        torch.testing.assert_close(found, vectors)
    else:
        assert not torch.allclose(found, fitted(vectors, 8, seed=4))
    torch.testing.assert_close(found, fitted(vectors, 8, seed=3), atol=0, rtol=0)


def test_too_few_inputs_keep_the_principal_parts():
    vectors = torch.randn(30, 16, generator=torch.Generator().manual_seed(1)) * torch.linspace(3, 0.1, 16)
    found = fitted(vectors, 4, seed=0)
    left, sizes, right = np.linalg.svd(vectors.numpy(), full_matrices=False)
    best = (left[:, :4] * sizes[:4]) @ right[:4]
    np.testing.assert_allclose((found @ found.T).numpy(), best @ best.T, atol=1e-3)


def test_a_run_starts_from_them(tmp_path):
    """One epoch with a learning rate of next to nothing leaves the head where it started."""
    make_data(tmp_path)
    names = ShardIndex.load(str(tmp_path / "train")).classes
    vectors = np.random.RandomState(0).randn(CLASSES, 5).astype(np.float32)
    order = np.random.RandomState(1).permutation(CLASSES)
    path = str(tmp_path / "text.npz")
    write_class_vectors(path, vectors[order], [names[i] for i in order], "test")
    config = body(tmp_path, "started")
    config["model"]["head_init"] = path
    config["method"] = {"name": "an"}
    config["phases"] = [{"name": "all", "epochs": 1, "batch": 16, "lr": 1e-12}]
    Trainer().train(config)
    weight = load_file(last_checkpoint(tmp_path / "started") / "model.safetensors")["head.weight"].numpy()
    assert weight.shape == (CLASSES, WIDTH)
    np.testing.assert_allclose(cosines(weight), cosines(vectors), atol=1e-4)
    assert np.linalg.norm(weight) / np.sqrt(CLASSES) == pytest.approx(1 / np.sqrt(3), rel=0.2)  # as torch draws them


def test_decay_towards_them(tmp_path):
    """SGD without momentum in one step: W₁ = W₀ − lr·∂loss, whatever the decay is; towards 0 it would be lr·λ·W₀ less.
    Cut in two pieces it is the same."""
    make_data(tmp_path)
    path = str(tmp_path / "start.npy")
    np.save(path, np.random.RandomState(0).randn(CLASSES, WIDTH).astype(np.float32))
    found = {}
    for name, decay, aim, micro in (("none", 0.0, "zero", 0), ("start", 0.5, "head_init", 0),
                                    ("pieces", 0.5, "head_init", 32), ("zero", 0.5, "zero", 0)):
        config = body(tmp_path, name)
        config["model"] |= {"head_init": path, "head_init_length": 2.0}
        config["method"] = {"name": "an"}
        config["phases"] = [{"name": "all", "epochs": 1, "batch": 64, "lr": 0.1, "optimizer": "sgd", "momentum": 0.0,
                             "head_weight_decay": decay, "head_decay_to": aim}]
        config["train"]["micro_batch"] = micro
        Trainer().train(config)
        found[name] = load_file(last_checkpoint(tmp_path / name) / "model.safetensors")["head.weight"].numpy()
    np.testing.assert_allclose(found["start"], found["none"], atol=1e-6)
    np.testing.assert_allclose(found["pieces"], found["none"], atol=1e-6)
    start = np.load(path) * 2.0 / np.linalg.norm(np.load(path), axis=1).mean()
    np.testing.assert_allclose(found["zero"], found["none"] - 0.1 * 0.5 * start, atol=1e-6)


@pytest.mark.parametrize(("model", "phase", "words"), [
    ({}, {}, r"needs model.head_init=FILE and model.head=linear; model.head_init is None"),
    ({"head_init": "x.npy"}, {"optimizer": "adamw"}, r"optimizer adam or sgd \(here adamw\)"),
    ({"head_init": "x.npy"}, {"head_weight_decay": 0.0}, r"a head_weight_decay above 0 \(here 0.0\)"),
])
def test_what_decay_towards_them_needs(tmp_path, model, phase, words):
    config = body(tmp_path, "refused")
    config["model"] |= model
    config["phases"] = [{"name": "all", "epochs": 1, "batch": 16, "lr": 0.1, "head_weight_decay": 0.1,
                         "head_decay_to": "head_init", **phase}]
    with pytest.raises(UserError, match=words):
        check_head_decay(parse_config(config, "test"))


def test_files_that_do_not_fit(tmp_path):
    path = str(tmp_path / "v.npz")
    write_class_vectors(path, np.ones((2, 3)), ["a", "b"], "test")
    with pytest.raises(UserError, match=r"model.head_init = .*v.npz: no vector for class 'c' and 0 others"):
        read_class_vectors(path, ["a", "b", "c"], "model.head_init =")
    write_class_vectors(path, np.full((1, 3), np.nan), ["a"], "test")
    with pytest.raises(UserError, match="not finite"):
        read_class_vectors(path, ["a"], "model.head_init =")
    np.save(tmp_path / "w.npy", np.ones((3, 2, 2)))
    with pytest.raises(UserError, match=r"of shape \[3, 2, 2\], expected numbers \[3, any width\]"):
        read_class_vectors(str(tmp_path / "w.npy"), ["a", "b", "c"], "model.head_init =")
    (tmp_path / "x.npz").write_bytes(b"PK\3\4 torn")
    with pytest.raises(UserError, match=r"no .npy file of numbers, nor an .npz file"):
        read_class_vectors(str(tmp_path / "x.npz"), ["a"], "model.head_init =")
