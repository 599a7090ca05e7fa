"""train.compile: the classifier is one graph for whatever a method asks of it, smaller batches cost at most one further
compilation, and runs end with the weights of the plain model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.methods import METHODS, example
from lacuna.trainer.models.classifier import Classifier, build_model
from tests.helpers import launching
from tests.helpers.method_runs import config, make_data

SIZE, CLASSES, WIDTH = 16, 5, 6
# name → (model settings, what learns, whether maps are asked for)
SHAPES = {
    "logits": ({}, "all", False), "maps": ({}, "all", True), "head": ({}, "head", True),
    "boosted": ({"boost": 5.0}, "all", True), "neck": ({"bottleneck": 3}, "all", True),
    "normalised": ({"head_norm": "l2"}, "all", True), "features": ({"backbone": "features"}, "all", False),
}
SCRIPT = str(Path(launching.__file__).parent / "pretended_runs.py")


def model_of(settings: dict, trainable: str) -> Classifier:
    data = DataConfig.model_validate({"train": {"url": "unused"}, "image_size": SIZE, "normalize": "unit"})
    torch.manual_seed(0)
    model = build_model(ModelConfig(**{"backbone": "lacuna:tiny", **settings}), data, CLASSES,
                        WIDTH if "backbone" in settings else 0)
    model.set_trainable(trainable)
    return model.train()


def inputs(count: int, model: Classifier) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    if isinstance(model.backbone, torch.nn.Identity):
        return torch.randn(count, WIDTH, generator=generator)
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_graph_and_few_compilations(shape):
    settings, trainable, maps = SHAPES[shape]
    plain = model_of(settings, trainable)
    torch._dynamo.reset()
    compiled, counter = copy.deepcopy(plain), CompileCounterWithBackend("eager")
    compiled.compile(backend=counter, fullgraph=True)  # a break in the graph is an error
    for count in (8, 8, 5, 8, 3, 7):
        for model in (plain, compiled):
            model.zero_grad()
            logits, found, _ = model(inputs(count, model), with_maps=maps)
            (logits.square().mean() + (found.square().mean() if maps else 0)).backward()
        for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)
    assert counter.frame_count <= 2  # one for the first size, one for all others


def families() -> list[str]:
    """One method of every kind of needs."""
    return list({json.dumps(vars(example(name).needs()), default=str): name for name in METHODS}.values())


@pytest.mark.parametrize("names", [("an", "en_scl", "ignore"),
                                   pytest.param(families(), marks=pytest.mark.long)], ids=("few", "families"))
def test_runs(tmp_path, names):
    """Real ones, with further forwards and forwards without gradients where a method asks for them."""
    make_data(tmp_path)
    bodies = []
    for name in names:
        for kind in ("compiled", "plain"):
            body = config(tmp_path, name) | {"run_folder": str(tmp_path), "name": f"{name}-{kind}"}
            body["train"] |= {"log_every": 1000, "compile": kind == "compiled"}
            bodies.append(body)
    (tmp_path / "jobs.json").write_text(json.dumps(bodies))
    launch = launching.launches.Launch(
        launching.command(1, str(tmp_path / "jobs.json"), str(tmp_path / "found.json"), "compiled", script=SCRIPT),
        str(tmp_path / "out"), launching.environment(), str(tmp_path))
    assert launch.wait(1800) == 0, launch.text()[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name in names:
        compiled, plain = found[f"{name}-compiled"], found[f"{name}-plain"]
        assert "failed" not in compiled, compiled["failed"]
        assert 1 <= compiled["graphs"] <= 4  # with and without gradients, one size and any
        assert plain["graphs"] == 0
        np.testing.assert_allclose(compiled["losses"], plain["losses"], rtol=1e-4)
