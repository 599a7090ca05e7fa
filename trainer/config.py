"""The typed configuration: YAML file + `section.key=value` overrides, merged as plain dicts, validated once.

A YAML file may name a base with `base: other.yaml`, or several with `base: [data.yaml, model.yaml]` (relative to
itself); later bases win over earlier ones, its own keys over all.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from data_pipelines import storage
from data_pipelines.errors import UserError
from data_pipelines.whole_number import whole_number
from trainer.durations import check_duration, check_positive_duration, is_zero


def _check_trainable(value: Any) -> Any:
    parts = [str(part) if type(part) is int else part for part in value] if isinstance(value, list | tuple) else []
    named = parts and all(isinstance(part, str) and part.strip(".") and part != "all" for part in parts)
    if value not in ("head", "all") and not named:
        raise UserError("write head, all, or a list of parts of the backbone such as [layer4]")
    return tuple(parts) or value


Duration = Annotated[str, BeforeValidator(check_duration)]
PositiveDuration = Annotated[str, BeforeValidator(check_positive_duration)]
Trainable = Annotated[Literal["head", "all"] | tuple[str, ...], BeforeValidator(_check_trainable)]


class Section(BaseModel):
    # Numbers become text where text is asked for: `name=2024` on a command line is YAML's 2024.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False,
                              coerce_numbers_to_str=True)


class SplitConfig(Section):
    """One set of samples: shards, which label sidecar, which rows."""

    url: str
    """Folder or fsspec URL that holds index.json."""
    labels: str = "labels"
    """Name of the label sidecar."""
    subset: str | None = None
    """Name of a row subset (made by `lacuna annotate --scheme val_split`), or all rows."""


class AugmentConfig(Section):
    crop: Literal["squash", "random_resized", "center"] = "squash"
    scale: tuple[float, float] = (0.25, 1.0)
    """Area of a random-resized crop, as a fraction of the image."""
    flip: bool = True
    randaugment: int = Field(0, ge=0)
    """Number of RandAugment operations; 0 = off."""
    cutout: float = Field(0.0, ge=0, le=1)
    """Side of the cut-out rectangle as a fraction of the image side; 0 = off."""

    @model_validator(mode="after")
    def _scale_is_a_range(self) -> AugmentConfig:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UserError(f"scale = {list(self.scale)}: write the smallest and the largest area, 0 < a <= b <= 1")
        return self


class DataConfig(Section):
    train: SplitConfig
    val: SplitConfig | None = None
    """Full labels; the best epoch is chosen here."""
    test: SplitConfig | None = None
    """Looked at once, with the best epoch's weights."""
    fully_labelled: SplitConfig | None = None
    """Training images whose labels are complete (the same shards with a subset, or with another sidecar): methods that
    need the expected number of positives estimate it here; by default on val."""
    image_size: int = Field(224, gt=0)
    augment: AugmentConfig = AugmentConfig()
    strong_augment: AugmentConfig = AugmentConfig(randaugment=2, cutout=0.5)
    """The second view of methods that compare two views of an image; others do not make it."""
    eval_crop: Literal["squash", "center"] = "squash"
    normalize: Literal["imagenet", "unit", "centered"] = "imagenet"
    """imagenet: mean/std; unit: [0, 1]; centered: [-1, 1]."""
    streams: int = Field(8, gt=0)
    """Canonical streams: divides every phase's batch, multiple of every world size used. Part of the run's identity."""
    open_shards: int = Field(4, gt=0)
    """Shards of a stream whose rows are mixed at a time."""
    workers: int = Field(2, gt=0)
    """Decoding threads per rank."""
    prefetch: int = Field(4, gt=0)
    """Batches decoded ahead."""
    max_bad_fraction: float = Field(0.001, ge=0, le=1)
    """The run stops when more than this part of an epoch's (or an evaluation's) samples cannot be decoded."""
    scratch: str | None = None
    """Folder for remote shards while they are open (default: the system's temporary folder)."""


class ModelConfig(Section):
    backbone: str = "torchvision:resnet50"
    """`torchvision:NAME`, `timm:NAME`, or `features` for feature shards."""
    weights: str = "none"
    """`none`, `default`, a torchvision weight name such as `IMAGENET1K_V1`, or a .safetensors/.pt file."""
    bottleneck: int = Field(0, ge=0)
    """Width of a linear layer before the classifier; 0 = none (OpenImages: 512)."""
    batchnorm: Literal["frozen", "sync", "local"] = "frozen"
    """frozen: running statistics stay; sync: over all ranks (GPU only); local: per rank (resume is not bit-exact)."""
    boost: float = Field(1.0, gt=0)
    """BoostLU (Kim et al., CVPR 2023): positive scores of the score maps are multiplied by this before the mean over
    cells that makes the logits, in training and evaluation (published: 5); 1 = off."""


class PhaseConfig(Section):
    """One optimisation stage; it starts from the best epoch of the phase before it."""

    name: str
    epochs: int = Field(gt=0)
    batch: int = Field(gt=0)
    """The *global* batch."""
    trainable: Trainable = "all"
    """head; all; or the head and parts of the backbone, by the names that its publisher gave them: a list such as
    [layer4] (torchvision:resnet50) or [blocks.5, blocks.6, conv_head, bn2] (timm:tf_efficientnet_lite0). What is fixed
    keeps its weights and its BatchNorm statistics, and has no dropout."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = Field(gt=0)
    head_lr_multiplier: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    schedule: Literal["constant", "cosine", "one_cycle"] = "constant"
    warmup: Duration = "0st"
    """Linear rise from 0 (constant and cosine); one_cycle: length of the rise, usually 20%."""

    @model_validator(mode="after")
    def _one_cycle_rises(self) -> PhaseConfig:
        if self.schedule == "one_cycle" and is_zero(self.warmup):
            raise UserError("schedule = 'one_cycle' needs the length of its rise: add warmup, e.g. warmup: 20%")
        return self


class TrainConfig(Section):
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batch: int = Field(0, ge=0)
    """Most samples per rank in one forward; 0 = the rank's whole share. The global batch never changes."""
    clip_norm: float = Field(0.0, ge=0)
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Weight EMA; 0 = off. When on, evaluation uses the averaged weights."""
    compile: bool = False
    channels_last: bool = False
    deepspeed: str = "zero0"
    """A JSON file, or a name in configs/deepspeed/."""
    eval_every: int = Field(1, gt=0)
    """Epochs."""
    log_every: int = Field(10, gt=0)
    """Steps."""
    checkpoint_every: PositiveDuration = "1ep"
    keep: int = Field(2, gt=0)
    """Last checkpoints to keep, besides the best."""
    trace_samples: bool = False
    """Write which samples every step saw to trace/rank-N.jsonl."""
    state_url: str | None = None
    """Where per-sample state lives (folder or fsspec URL); default: the run folder's state/."""
    state_budget_mb: float = Field(1024, gt=0)
    """RAM per rank for per-sample state."""
    staging: str | None = None
    """Folder on every node for the files of a run on object storage until they are uploaded (default: the system's
    temporary folder); needs room for a checkpoint."""
    timeout_seconds: float = Field(600, gt=0)
    """A rank that makes no progress for so long is named and the launch ends."""


class Config(Section):
    name: str
    run_folder: str = "runs"
    """Folder or fsspec URL; the run lives in run_folder/name."""
    seed: int = 0
    data: DataConfig
    model: ModelConfig = ModelConfig()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "an"})
    """`name` picks the method, the other keys are its settings (`lacuna methods` lists them)."""
    phases: list[PhaseConfig] = Field(min_length=1)
    train: TrainConfig = TrainConfig()

    @property
    def folder(self) -> str:
        return os.path.join(self.run_folder, self.name)

    def fingerprint(self) -> str:
        """Names what a checkpoint depends on: everything but how fast and where it runs."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Config) -> list[str]:
        """Keys that give two configs different fingerprints, as `section.key: this → other`."""
        mine, theirs = flat(self._identity()), flat(other._identity())
        return [f"{key}: {mine.get(key)!r} → {theirs.get(key)!r}" for key in sorted({*mine, *theirs})
                if mine.get(key) != theirs.get(key)]

    def _identity(self) -> dict:
        body = self.model_dump()
        # Samples are named by the fingerprints of the index and the sidecar, so a dataset may move.
        for split in ("train", "val", "test", "fully_labelled"):
            if body["data"][split]:
                body["data"][split].pop("url")
        for key in ("workers", "prefetch", "scratch", "max_bad_fraction"):
            body["data"].pop(key)
        for key in ("log_every", "checkpoint_every", "keep", "timeout_seconds", "trace_samples", "micro_batch",
                    "deepspeed", "compile", "channels_last", "state_url", "state_budget_mb",
                    "staging"):
            body["train"].pop(key)
        for key in ("run_folder", "name"):
            body.pop(key)
        return body


def load_config(path: str, overrides: list[str]) -> Config:
    """Read, merge and validate; every mistake is a UserError that names the key."""
    body = _read_yaml(path)
    parsed = [_parse_override(override) for override in overrides]
    # A method's name first: another method drops the settings of the one before it, not those given beside it.
    for keys, value, override in sorted(parsed, key=lambda o: o[0] != ["method", "name"]):
        old = body.get("method")
        if keys == ["method", "name"] and isinstance(old, dict) and old.get("name") != value:
            body["method"] = {}
        _set(body, keys, value, override)
    return parse_config(body, path)


def _parse_override(override: str) -> tuple[list[str], Any, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r}: write section.key=value, e.g. train.precision=bf16.")
    try:
        return key.strip().split("."), yaml.safe_load(text), override
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or error
        raise UserError(f"override {override!r}: {text!r} is not valid YAML ({reason}). Quote it: \"'…'\".") from None


def parse_config(body: dict, where: str) -> Config:
    config = validated(Config, body, where)
    _refuse_secrets(config, where)
    return config


_SECRET = re.compile(r"\w+://[^/?#]*:[^/?#]*@|[?&](x-amz-[a-z-]+|sig|signature|token|password|secret|[a-z_-]*key)=",
                     re.IGNORECASE)


def _refuse_secrets(config: Config, where: str) -> None:
    """The config is written into the run folder and into logs: secrets belong into the environment."""
    for key, value in flat(config.model_dump(mode="json")).items():
        if isinstance(value, str) and _SECRET.search(value):
            raise UserError(f"{where}: {key} holds credentials (not repeated here), and configs are written into the "
                            "run folder. Give them in the environment (AWS_ACCESS_KEY_ID …, or a profile) instead.")


def validated(model: type, body: dict, where: str) -> Any:
    """An instance of a pydantic model; unknown keys get the closest legal one suggested."""
    try:
        return model.model_validate(body)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(model, e) for e in error.errors())) from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply.") from None


def _explain(model: type, error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        legal = _legal_keys(model, path[:-1])
        close = difflib.get_close_matches(path[-1], legal, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"legal keys: {', '.join(sorted(legal))}."
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"key {key!r} is required."
    reason = error["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{key}: {reason}." if isinstance(error["input"], dict) else f"{key} = {error['input']!r}: {reason}."


def _legal_keys(model: Any, path: list[str]) -> list[str]:
    for part in path:
        if whole_number(part) is not None:
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)
    return list(model.model_fields)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which YAML would silently take the last."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        double = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if double is not None:
            raise yaml.YAMLError(f"key {double!r} twice, line {node.start_mark.line + 1} ff.")
        return super().construct_mapping(node, deep)


def _read_yaml(path: str, seen: tuple[str, ...] = ()) -> dict:
    named = f"{seen[-1]}: base {path}" if seen else f"--config {path}"
    if path in seen:
        raise UserError(f"{named} leads back to itself.")
    try:
        body = yaml.load(storage.read_bytes(path).decode(), _Loader)  # a SafeLoader
    except UserError:
        raise  # object storage, in its own words
    except OSError as error:
        raise UserError(f"{named}: cannot be read ({(error.strerror or str(error)).lower()}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({error}).") from None
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected keys and values, found {type(body).__name__}.")
    bases = body.pop("base", None) or []
    merged: dict = {}
    for base in bases if isinstance(bases, list) else [bases]:
        merged = merge(merged, _read_yaml(os.path.join(os.path.dirname(path), str(base)), (*seen, path)))
    return merge(merged, body)


def merge(base: dict, top: dict) -> dict:
    """Keys of `top` win; nested sections are merged, everything else is replaced. Another method starts afresh."""
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        other_method = key == "method" and both and value.get("name", out[key].get("name")) != out[key].get("name")
        out[key] = merge(out[key], value) if both and not other_method else value
    return out


def _set(body: dict, path: list[str], value: Any, override: str) -> None:
    node: Any = body
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(node, list):
            number = whole_number(part)
            if number is None or number >= len(node):
                raise UserError(f"override {override!r}: {'.'.join(path[:i])} is a list; "
                                f"use an index 0..{len(node) - 1}.")
            part = number  # type: ignore[assignment]
        elif not isinstance(node, dict):
            raise UserError(f"override {override!r}: {'.'.join(path[:i])} is a single value, it has no keys.")
        if last:
            node[part] = value
        else:
            if isinstance(node, dict) and node.get(part) is None:
                node[part] = {}  # absent, or switched off with null
            node = node[part]


def flat(body: Any, path: str = "") -> dict[str, Any]:
    """Nested sections and lists as {"phases.0.lr": value}."""
    if isinstance(body, dict | list):
        items = body.items() if isinstance(body, dict) else enumerate(body)
        return {key: value for name, part in items for key, value in flat(part, f"{path}.{name}".strip(".")).items()}
    return {path: body}
