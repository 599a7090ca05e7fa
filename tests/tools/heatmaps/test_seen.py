"""Proves that a map's start is told apart from what was seen: the crops are training's own, the rest is exact."""

from __future__ import annotations

import numpy as np
import torch

from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.heatmaps.seen import Looks, SeenMap, without_start
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.heatmaps import write_crop
from lacuna.trainer.training_data import epoch_plan, training_stream


def test_crops_are_those_of_training(single_shards):
    """Every box that the real stream records, in two phases, is the box that is computed afterwards."""
    body = {"name": "crops", "seed": 5,
            "data": {"train": {"url": str(single_shards / "train"), "labels": "single"}, "image_size": 24, "streams": 4,
                     "normalize": "centered", "augment": {"crop": "random_resized", "scale": [0.2, 0.8]}},
            "model": {"backbone": "lacuna:tiny"}, "method": {"name": "en_scl"},
            "phases": [{"name": "a", "epochs": 1, "batch": 16, "lr": 0.1},
                       {"name": "b", "epochs": 2, "batch": 32, "lr": 0.1}]}
    config = parse_config(body, "test")
    source = ShardSource.load(str(single_shards / "train"), "single", None)
    seen: dict[tuple[int, int], list] = {}
    steps = []
    for phase, epoch in ((0, 0), (1, 0), (1, 1)):
        plan = epoch_plan(config, source, phase, epoch)
        steps.append(plan.steps)
        with training_stream(config, source, plan, range(4)) as stream:
            for batch in stream:
                for shard, row, box in zip(batch.shards.tolist(), batch.rows.tolist(), batch.boxes, strict=True):
                    seen.setdefault((shard, row), []).append(box)
    looks = Looks(config, source)
    for shard, row in [(0, 0), (1, 3), (2, 5)]:
        image = decode_image(source.open(shard).read(row))
        for done, step in ((0, steps[0] - 1), (1, steps[0]), (2, sum(steps[:2]) + 1), (3, sum(steps))):
            boxes = list(looks.boxes(shard, row, image, step))
            assert len(boxes) == done
            for box, recorded in zip(boxes, seen[shard, row], strict=False):
                np.testing.assert_allclose(box, recorded, atol=1e-6)
        counts = looks.counts(shard, row, image, sum(steps), 8)
        naive = sum(write_crop(torch.zeros(1, 1, 4, 4), box[None], torch.tensor([False]), 8)[1][0, 0].long()
                    for box in seen[shard, row])
        np.testing.assert_array_equal(counts, naive)


def test_the_start_is_taken_out():
    """A map that starts at 1, as training keeps it, is afterwards what one that started at 0 would be."""
    rng = torch.Generator().manual_seed(3)
    side, momentum = 8, 0.8
    from_one, from_zero = torch.ones(1, 1, side, side), torch.zeros(1, 1, side, side)
    counts = np.zeros((side, side), np.int64)
    for _ in range(6):
        low = torch.rand(2, generator=rng) * 0.6
        box = torch.cat([low, low + 0.4])[None]
        values, seen = write_crop(torch.rand(1, 1, 4, 4, generator=rng), box, torch.tensor([False]), side)
        counts += seen[0, 0].numpy()
        from_one, from_zero = (torch.where(seen, momentum * kept + (1 - momentum) * values, kept)
                               for kept in (from_one, from_zero))
    kept = (from_one[0, 0] * 255).round().to(torch.uint8).numpy()
    found = without_start(kept, 1.0, counts, momentum)
    np.testing.assert_array_equal(found.unseen, counts == 0)
    assert found.unseen.any()
    np.testing.assert_allclose(found.values, from_zero[0, 0].numpy(), atol=0.51 / 255)
    np.testing.assert_allclose(found.start_share, (0.8**counts).mean())
    unknown = without_start((from_zero[0, 0] * 255).round().to(torch.uint8).numpy(), 0.0, counts, momentum)
    assert unknown.start_share == 0
    np.testing.assert_allclose(unknown.values, from_zero[0, 0].numpy(), atol=0.51 / 255)


def test_the_peak_is_of_what_was_seen():
    values, unseen = np.array([[0.2, 0.9]], np.float32), np.array([[False, True]])
    assert SeenMap(values, unseen).peak == np.float32(0.2)
    assert SeenMap.plain(values).peak == np.float32(0.9)
