"""The typed configuration (files.py reads it from YAML and overrides)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lacuna.basics.errors import UserError
from lacuna.trainer.config.data_section import DataConfig, Section
from lacuna.trainer.config.durations import check_duration, check_positive_duration, is_zero
from lacuna.trainer.config.validation import validated


def _check_trainable(value: Any) -> Any:
    parts = [str(part) if type(part) is int else part for part in value] if isinstance(value, list | tuple) else []
    named = parts and all(isinstance(part, str) and part.strip(".") and part != "all" for part in parts)
    if value not in ("head", "all") and not named:
        raise UserError("write head, all, or a list of parts of the backbone such as [layer4]")
    return tuple(parts) or value


Duration = Annotated[str, BeforeValidator(check_duration)]
PositiveDuration = Annotated[str, BeforeValidator(check_positive_duration)]
Trainable = Annotated[Literal["head", "all"] | tuple[str, ...], BeforeValidator(_check_trainable)]


class DecoderConfig(Section):
    """Of model.head: query2label, variational (which is as query2label) and ml_decoder; 0: as published."""

    width: int = Field(0, ge=0)
    """Of the queries. query2label: by default that of the feature map, another one is reached by a linear layer;
    ml_decoder: 768."""
    heads: int = Field(0, ge=0)
    """Of the attention: 4 of query2label, 8 of ml_decoder."""
    feedforward: int = Field(0, ge=0)
    """Units of the inner layer: 4 times the width for query2label, 2,048 for ml_decoder."""
    layers: int = Field(0, ge=0)
    """Of query2label, in which queries attend to cells: 2. ml_decoder has one."""
    encoder_layers: int = Field(1, ge=0)
    """Of query2label, in which cells attend to one another."""
    groups: int = Field(0, ge=0)
    """Queries of ml_decoder: 100. With fewer than classes, neighbours in the class list share one, and there are no
    score maps."""
    earlier: str = ""
    """Of masked_transformer: the part of the backbone whose input is its other map, such as layer4 of a ResNet."""
    latent: int = Field(0, ge=0)
    """Numbers by which variational sees a class: 256."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Its draws belong to a rank, so that results depend on the number of ranks, not on a resume; 0: on neither."""


class ModelConfig(Section):
    backbone: str = "torchvision:resnet50"
    """`torchvision:NAME`, `timm:NAME`, or `features` for feature shards."""
    weights: str = "none"
    """`none`, `default`, a torchvision weight name such as `IMAGENET1K_V1`, or a .safetensors/.pt file."""
    bottleneck: int = Field(0, ge=0)
    """Width of a linear layer before the classifier; 0 = none (OpenImages: 512)."""
    batchnorm: Literal["frozen", "sync", "local"] = "frozen"
    """frozen: running statistics stay; sync: over all ranks (GPU only); local: per rank (resume is not bit-exact)."""
    expected_positives: float | None = Field(None, gt=0)
    """k, the mean number of true positives per image (VOC 1.5, COCO 2.9, NUS 1.9, CUB 31.4): for head_bias and for the
    methods that need it. By default that of fully labelled images (data.fully_labelled, or val)."""
    head_bias: Literal["prior", "zero", "default"] = "prior"
    """Where the head's bias starts. prior: an untrained head expects k positives per image, every class by its share of
    the annotated positives (on COCO features better than one constant for all classes, see docs/results.md); default:
    torch's random start, as papers' code has it."""
    head: Literal["linear", "csra", "query2label", "ml_decoder", "variational",
                  "masked_transformer"] = "linear"
    """csra: residual attention (Zhu and Wu, ICCV 2021). A class's logit is the mean of its scores over the cells of the
    feature map, plus csra_weight times their mean weighted by a softmax over the cells; the weights of a class are
    divided by their length, so that only their direction learns. query2label (Liu et al., 2021): a transformer with a
    learnt query per class; ml_decoder (Ridnik et al., 2021): fixed queries, each for a group of classes; variational
    (Liu et al., ICML 2023): query2label with a Gaussian bottleneck behind every query, for the method mime;
    masked_transformer (Chen et al., IJCV 2023): a transformer over each of two maps, for the method scob; it has no
    score maps. Those of the three before it are attention: the class's score where it attends most, less elsewhere in
    proportion. All need images; head_bias and the decays of the head hold for all, head_norm, bottleneck and boost not
    for the last four; where there is a query per class, head_init starts the queries."""
    decoder: DecoderConfig = DecoderConfig()
    csra_weight: float = Field(0.1, ge=0)
    """λ of csra (published with ResNet-101: VOC 0.1, COCO 0.2 to 0.4)."""
    csra_temperature: float = Field(1.0, gt=0)
    """T of csra's softmax: what scores are multiplied by; from 99 on the maximum, as published."""
    head_init: str | None = None
    """Where the head's weights start: a file with a vector per class, such as the OUT.text.npz of `lacuna scores` (by
    class name) or a .npy [L, D]. Vectors of another width than the head's input are turned into it so that their angles
    stay, as far as the width allows; all are scaled to the mean length of torch's random start. OUT.vectors.npz of
    `lacuna scores timm:NAME` is for runs on the same network: what its own classifier knows about the classes."""
    head_init_length: float | None = Field(None, gt=0)
    """Mean length of head_init's vectors (those that are not 0) instead of that of torch's start. With head_norm: l2
    and phases.N.head_decay_to: head_init, 0.4 was best on photos."""
    head_norm: Literal["none", "l2"] = "none"
    """l2: what enters the head (after the bottleneck) is divided by its length, centred, and scaled back to the spread
    that it had: c·(x/‖x‖ − mean). Mean and c are measured once, before the first step, and then stay: for features and
    pretrained backbones. A backbone that learns from scratch leaves them behind (digit scenes,
    ROLE, validation mAP, one seed: 45.7 with it, 71.2 without)."""
    boost: float = Field(1.0, gt=0)
    """BoostLU (Kim et al., CVPR 2023): positive scores of the score maps are multiplied by this before the mean over
    cells that makes the logits, in training and evaluation (published: 5); 1 = off."""


class CacheConfig(Section):
    """What the part of the classifier that does not learn makes of every sample, kept at half precision."""

    views: int = Field(0, ge=0)
    """How many random views of every sample (data.augment) the epochs use in turn; 0: the one view of evaluation
    (data.eval_crop), as in the papers' linear protocol."""
    seed: int = 0
    """Of the random views, apart from the run's: runs with other seeds then share a cache."""


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
    optimizer: Literal["adam", "adamw", "adamax", "sgd"] = "adam"
    lr: float = Field(gt=0)
    head_lr_multiplier: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """Of weights, never of biases and norms. Coupled with adam, adamax and sgd (an L2 term), decoupled with
    adamw."""
    head_weight_decay: float | None = Field(None, ge=0)
    """Of the head (and bottleneck) apart from the backbone's; default: weight_decay. With adam, λ/L here equals a term
    λ/2·‖W‖² beside a loss that sums over the L classes, since most losses here are means over classes."""
    head_decay_to: Literal["zero", "head_init"] = "zero"
    """head_init: the head's decay (adam, sgd) is towards the vectors of model.head_init instead of 0, so that classes
    with few labels stay near them."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Learning rate of the backbone's blocks: the last one has lr, each one before it this much less; 1 = all the
    same."""
    momentum: float = Field(0.9, ge=0, lt=1)
    schedule: Literal["constant", "cosine", "one_cycle"] = "constant"
    warmup: Duration = "0st"
    """Linear rise from 0 (constant and cosine); one_cycle: length of the rise, usually 20%."""
    cache: CacheConfig | None = None
    """For phases whose learning part lies at the end, as with trainable: head. `{views: 0}`: what the fixed part makes
    of a sample is computed once and then read; all runs with the same fixed part share it (train.cache_url)."""

    @property
    def decay_of_head(self) -> float:
        return self.weight_decay if self.head_weight_decay is None else self.head_weight_decay

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
    group_weight: float = Field(0.0, ge=0)
    """AssetReg (NeurIPS 2025), beside any method: weight of the cross-entropy of predictions to the running average of
    their group (data.train.groups); 0 = off. The averages take 4 · groups · classes bytes on every rank."""
    group_rate: float = Field(0.001, gt=0, le=1)
    """How much a step's predictions move the average of their group."""
    group_start: float | None = Field(None, ge=0, le=1)
    """Where averages start, but for annotated positives, which start at 1; default: uniformly in 0.4 to 0.6."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Weight EMA; 0 = off. When on, evaluation uses the averaged weights."""
    fully_labelled_weight: float = Field(0.0, ge=0)
    """How much data.fully_labelled counts in the loss of any method: this times the mean over those images, beside the
    mean over the epoch's own. 300 of 12,800 images weigh like any others at 0.023. Every step takes a quarter of the
    phase's batch of them in addition; 0 = off."""
    mixup: float = Field(0.0, ge=0, le=1)
    """Strength of mixup: an image is blended with another one of its batch by a share drawn from Beta(this, this), and
    the loss is that of both labels, by their shares; 0 = off. Methods that remember single samples refuse it."""
    cutmix: float = Field(0.0, ge=0, le=1)
    """The same by pasting a square of the other image; with mixup, every sample takes one of the two."""
    tf32: bool = True
    """On GPUs, factors of float32 products and convolutions are rounded to TensorFloat-32 (10 bits): faster."""
    cudnn_benchmark: bool = False
    """On GPUs, try all convolution algorithms on the first batch of every shape and keep the fastest; a resumed run may
    then choose others and differ in the last bits."""
    compile: bool = False
    channels_last: bool = False
    deepspeed: str = "zero0"
    """A JSON file, or a name in configs/deepspeed/."""
    eval_every: int = Field(1, gt=0)
    """Epochs."""
    stop_after: int = Field(0, ge=0)
    """Epochs, over all phases, after which a launch ends as if it had been asked to; 0 = never. The same config with a
    larger number goes on from there, as if it had never stopped."""
    log_every: int = Field(10, gt=0)
    """Steps."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where the numbers of metrics.jsonl are shown besides: a list, [] for none. Weights & Biases and MLflow are extras
    (`pip install 'lacuna-trainer[wandb]'`); their own environment variables say where they write."""
    checkpoint_every: PositiveDuration = "1ep"
    keep: int = Field(2, gt=0)
    """Last checkpoints to keep, besides the best."""
    trace_samples: bool = False
    """Write which samples every step saw to trace/rank-N.jsonl."""
    state_url: str | None = None
    """Where per-sample state lives (folder or fsspec URL); default: the run folder's state/."""
    state_budget_mb: float = Field(1024, gt=0)
    """RAM per rank for per-sample state; a phase with a cache may take as much again for that."""
    cache_url: str | None = None
    """Where what phases cache lives (folder or fsspec URL), shared by runs; default: .cache in run_folder."""
    cache_budget_gb: float | None = Field(None, gt=0)
    """Most that the views of this run may take there; default: what is free."""
    staging: str | None = None
    """Folder on every node for the files of a run on object storage until they are uploaded (default: the system's
    temporary folder); needs room for a checkpoint."""
    timeout_seconds: float = Field(600, gt=0)
    """A rank that makes no progress for so long is named and the launch ends; while things are built, 5 minutes at
    least."""


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

    @model_validator(mode="after")
    def _phases_have_names_of_their_own(self) -> Config:
        names = [phase.name for phase in self.phases]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"phases: two are named {twice!r}; metrics and reports tell them apart by their names")
        return self

    @property
    def folder(self) -> str:
        return os.path.join(self.run_folder, self.name)

    def fingerprint(self) -> str:
        """Names what a checkpoint depends on: everything but how fast and where it runs, and for how many epochs
        (checkpoints/extending.py says when those may change)."""
        body = self._identity()
        for phase in body["phases"]:
            phase.pop("epochs")
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Config) -> list[str]:
        """Keys that give two configs different fingerprints, as `section.key: this → other`."""
        mine, theirs = flat(self._identity()), flat(other._identity())
        return [f"{key}: {mine.get(key)!r} → {theirs.get(key)!r}" for key in sorted({*mine, *theirs})
                if mine.get(key) != theirs.get(key)]

    def _identity(self) -> dict:
        body = self.model_dump()
        # Samples are named by the fingerprints of the index and the sidecar, so a dataset may move. Training never
        # looks at the test set: a run that was trained without one may be given one afterwards.
        body["data"].pop("test")
        for split in ("train", "val", "fully_labelled"):
            if body["data"][split]:
                body["data"][split].pop("url")
        for key in ("workers", "prefetch", "scratch", "max_bad_fraction"):
            body["data"].pop(key)
        if self.data.decode == "cpu":  # as runs have it that were begun before there was a choice
            body["data"].pop("decode")
        for key in ("log_every", "checkpoint_every", "keep", "timeout_seconds", "trace_samples", "micro_batch",
                    "deepspeed", "compile", "channels_last", "cudnn_benchmark", "state_url", "state_budget_mb",
                    "cache_url", "cache_budget_gb", "staging", "stop_after", "loggers"):
            body["train"].pop(key)
        for key in ("run_folder", "name"):
            body.pop(key)
        return body


def parse_config(body: dict, where: str) -> Config:
    config = validated(Config, body, where)
    try:
        _refuse_secrets(config, where)
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: text that is no valid Unicode ({error}). Write it anew.") from None
    return config


_SECRET = re.compile(r"\w+://[^/?#]*:[^/?#]*@|[?&](x-amz-[a-z-]+|sig|signature|token|password|secret|[a-z_-]*key)=",
                     re.IGNORECASE)


def _refuse_secrets(config: Config, where: str) -> None:
    """The config is written into the run folder and into logs: secrets belong into the environment."""
    for key, value in flat(config.model_dump(mode="json")).items():
        if isinstance(value, str) and _SECRET.search(value):
            raise UserError(f"{where}: {key} holds credentials (not repeated here), and configs are written into the "
                            "run folder. Give them in the environment (AWS_ACCESS_KEY_ID …, or a profile) instead.")


def flat(body: Any, path: str = "") -> dict[str, Any]:
    """Nested sections and lists as {"phases.0.lr": value}."""
    if isinstance(body, dict | list):
        items = body.items() if isinstance(body, dict) else enumerate(body)
        return {key: value for name, part in items for key, value in flat(part, f"{path}.{name}".strip(".")).items()}
    return {path: body}
