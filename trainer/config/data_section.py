"""What every section of the config is, and the section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lacuna.basics.errors import UserError

Strength = Annotated[float, Field(ge=0, le=1)]


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
    groups: str | None = None
    """Name of groups of samples (made by `lacuna annotate --scheme groups`), for train.group_weight."""


class AugmentConfig(Section):
    crop: Literal["squash", "random_resized", "center", "same"] = "squash"
    """squash: the whole image; random_resized; center: the middle; same (strong_augment only): the crop and flip of the
    first view."""
    scale: tuple[float, float] = (0.25, 1.0)
    """Area of a random-resized crop, as a fraction of the image."""
    flip: bool = True
    randaugment: int = Field(0, ge=0)
    """Number of RandAugment operations; 0 = off."""
    randaugment_magnitude: float = Field(9.0, ge=0, le=30)
    cutout: float = Field(0.0, ge=0, le=1)
    """Side of the cut-out rectangle as a fraction of the image side; 0 = off."""
    color_jitter: tuple[Strength, Strength, Strength, Annotated[float, Field(ge=0, le=0.5)]] = (0.0, 0.0, 0.0, 0.0)
    """Brightness, contrast and saturation times 1 ± these, hue turned by up to ± the last (0.5: any colour)."""
    color_chance: float = Field(1.0, ge=0, le=1)
    """How often the jitter is applied."""
    grayscale: float = Field(0.0, ge=0, le=1)
    """How often an image loses its colours."""
    blur: float = Field(0.0, ge=0, le=1)
    """How often an image is blurred (3 × 3 pixels)."""
    scaled_decode: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its sides where a random-resized crop is at least 2, 4 or 8 times image_size:
    large photos load faster and look the same to within a grey level or two. Tables of papers have it off."""

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
    """Training images whose labels are complete (the same shards with a subset, or with another sidecar): the expected
    number of positives is estimated here (by default on val), and with train.fully_labelled_weight they learn, too."""
    hold_out: float = Field(0.0, ge=0, lt=1)
    """Without val: this share of the training samples stays out of training. How high the model ranks their known
    positives is then measured after every epoch (recall at k). Samples without a known positive are not held out. Not
    for methods that read tables about the training set (neighbours): those are made for all of it."""
    image_size: int = Field(224, gt=0)
    augment: AugmentConfig = AugmentConfig()
    strong_augment: AugmentConfig = AugmentConfig(randaugment=2, cutout=0.5)
    """The second view of methods that compare two views of an image; others do not make it. crop: same keeps the first
    view's crop and flip."""
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
    decode: Literal["cpu", "device"] = "cpu"
    """Where JPEGs are decoded and cropped. device: on the GPU that trains (nvJPEG, through torchvision), for machines
    whose cores cannot feed it; the CPU where that is not to be had, said in one line, and for other files. Pixels
    differ by a few levels, so this is part of a run's identity. Phases with a cache decode every view once, on the
    CPU."""
    max_bad_fraction: float = Field(0.001, ge=0, le=1)
    """The run stops when more than this part of an epoch's (or an evaluation's) samples cannot be decoded."""
    scratch: str | None = None
    """Folder for remote shards while they are open (default: the system's temporary folder)."""

    @model_validator(mode="after")
    def _first_view_has_its_own_crop(self) -> DataConfig:
        if self.augment.crop == "same":
            raise UserError("augment.crop = 'same' is for strong_augment: write squash, random_resized or center")
        return self
