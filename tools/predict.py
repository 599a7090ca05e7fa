"""What an exported model says about images: the classes above their thresholds, or the strongest ones.

  lacuna predict model photo.jpg other.png
  lacuna predict model holiday-photos/ --top 3 --json > predictions.jsonl
  lacuna predict s3://bucket/model s3://bucket/photos --threshold 0.7
  lacuna predict model holiday-photos/ --heatmaps heatmaps.png          where in the image, for the strongest classes
Without thresholds in the model (`lacuna export --val …`), --threshold decides for all classes (default 0.5).
Probabilities are calibrated if the model was exported with --val; --json says so in `calibrated`.
--json prints one JSON object per image, each on a line of its own. Exit code 1 if any image could not be read; the
others are done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.basics.errors import AccessDenied, Unreachable, UserError
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.decode import DecodeError, decode_image
from lacuna.data_pipelines.readers.base import IMAGE_EXTENSIONS, is_image, walk_images
from lacuna.tools.export.folder import UNCALIBRATED, Exported
from lacuna.tools.heatmaps.drawing import draw_strip, save_sheet
from lacuna.tools.heatmaps.seen import SeenMap

_SHEET, _CLASSES = 40, 4  # images in a picture of heatmaps, and classes of each


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="folder or URL that `lacuna export` made")
    parser.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders with images below "
                        "them; or URLs of such")
    parser.add_argument("--top", type=int, default=5, help="strongest classes to list per image (default 5)")
    parser.add_argument("--threshold", type=float, help="predict classes with at least this probability "
                        "(default: the model's thresholds, else 0.5)")
    parser.add_argument("--batch", type=int, default=16, help="images at a time (default 16)")
    parser.add_argument("--heatmaps", metavar="OUT.png", help=f"draw where (the first {_SHEET} images)")
    parser.add_argument("--json", action="store_true", help="one JSON object per image, each on a line of its own")


def run(args: argparse.Namespace) -> int:
    exported = Exported.load(args.model)
    if exported.architecture["feature_width"]:
        raise UserError(f"{args.model}: this model takes feature vectors, not images.")
    if args.batch < 1 or args.top < 1:
        raise UserError(f"--batch {args.batch} --top {args.top}: both are at least 1.")
    paths = list(image_paths(args.images))
    if exported.calibration is None and not args.json:
        print(f"{UNCALIBRATED} (`lacuna export --val` calibrates them)", file=sys.stderr)
    strips: list[Any] = []
    failed = 0
    with Progress(len(paths), "predicting", "images") as meter:
        for path, image, scores, maps in predictions(exported, paths, args.batch, bool(args.heatmaps)):
            meter.advance()
            if scores is None:
                failed += 1
                print(f"{path}: {image}", file=sys.stderr)
                continue
            facts = describe(exported, path, scores, args.top, args.threshold)
            print(json.dumps(facts, ensure_ascii=False) if args.json else as_text(facts), flush=True)
            if maps is not None and len(strips) < _SHEET:
                best = {int(i): SeenMap.plain(maps[i]) for i in np.argsort(-scores)[:_CLASSES]}
                strips.append(draw_strip(image, os.path.basename(path), best, exported.classes, set(), _CLASSES))
    if args.heatmaps and strips:
        save_sheet(strips, args.heatmaps)
        print(f"heatmaps: {args.heatmaps}", file=sys.stderr)
    return 1 if failed else 0


def image_paths(given: list[str]) -> Iterator[str]:
    """Files as given; images below folders, in sorted order."""
    for path in given:
        if not storage.is_local(path):
            single = is_image(path) and storage.exists(path)
            images = [path] if single else [url for url in storage.list_tree(path) if is_image(url)]
            if not images:
                raise UserError(f"{path}: no image there or below (looked for {', '.join(IMAGE_EXTENSIONS)}).")
            yield from images
        elif os.path.isdir(path):
            found, _ = walk_images(path)
            if not found:
                raise UserError(f"{path}: no image below this folder (looked for {', '.join(IMAGE_EXTENSIONS)}).")
            yield from (os.path.join(path, name) for name in found)
        elif os.path.exists(path):
            yield path
        else:
            raise UserError(f"{path}: no such file or folder.")


def predictions(exported: Exported, paths: list[str], batch: int,
                with_maps: bool) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, model input, scores [L], score maps [L, G, G] or None); of a bad image (path, why, None, None)."""
    model = exported.model()
    if with_maps and not model.has_maps:
        raise UserError(f"--heatmaps: the head of this model has fewer queries than the {len(exported.classes)} "
                        "classes, so that classes have no maps of their own. Leave it out.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    for start in range(0, len(paths), batch):
        inputs: dict[str, torch.Tensor] = {}
        for path in paths[start : start + batch]:
            try:
                inputs[path] = exported.prepare(decode_image(storage.read_bytes(path)))
            except (AccessDenied, Unreachable):
                raise  # the next image would fare no better
            except (OSError, DecodeError) as error:
                yield path, str(error), None, None
        if not inputs:
            continue
        with torch.no_grad():
            logits, maps, _ = model(torch.stack(list(inputs.values())).to(device), with_maps=with_maps)
            scores = exported.score(logits, model.head.bias).cpu().numpy()
            spread = None if maps is None else exported.score(maps, model.head.bias).cpu().numpy()
        for i, (path, image) in enumerate(inputs.items()):
            yield path, image, scores[i], None if spread is None else spread[i]


def describe(exported: Exported, path: str, scores: np.ndarray, top: int, threshold: float | None) -> dict[str, Any]:
    limits = exported.thresholds if threshold is None and exported.thresholds is not None else np.full(
        len(scores), 0.5 if threshold is None else threshold)
    probabilities = exported.probabilities(torch.from_numpy(scores)).numpy()
    judged = scores if threshold is None else probabilities  # the model's own thresholds are meant for scores
    order = np.argsort(-probabilities, kind="stable")
    return {"image": path, "calibrated": exported.calibration is not None,
            "predicted": [{"class": exported.classes[i], "probability": float(probabilities[i])} for i in order
                          if judged[i] >= limits[i]],
            "top": [{"class": exported.classes[i], "probability": float(probabilities[i])} for i in order[:top]]}


def as_text(facts: dict[str, Any]) -> str:
    def words(entries: list[dict]) -> str:
        return ", ".join(f"{entry['class']} {entry['probability']:.3f}" for entry in entries)

    predicted = words(facts["predicted"]) or "nothing above its threshold"
    return f"{facts['image']}: {predicted}  (top: {words(facts['top'])})"
