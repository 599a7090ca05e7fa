"""The method contract: a method owns its loss and declares the state it needs; the loop does not know which one runs.

Legend: B batch rows on this rank, L classes, G grid side, N training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.state_store import Field
from lacuna.trainer.scores import SIGMOID, Score
from lacuna.trainer.state_rows import NO_ROWS, Masked, StateRows
from lacuna.trainer.world import World

if TYPE_CHECKING:
    from lacuna.trainer.sample_state import NoState, SampleState


class Settings(BaseModel):
    """A method's own keys under `method:` in the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    name: str


@dataclass(frozen=True)
class Task:
    """What a method may know about the training set before it starts."""

    classes: int  # L
    samples: int  # N
    positives: np.ndarray  # int64 [L] annotated positives per class
    negatives: np.ndarray  # int64 [L] verified negatives per class
    fully_annotated: bool  # no unknown entries
    grid: int = 0  # G, side of the score maps; 0 if the inputs are feature vectors
    expected_positives: float | None = None  # k: model.expected_positives, or that of fully labelled images
    seed: int = 0
    width: int = 0  # D, channels of the backbone's features
    class_names: tuple[str, ...] = ()
    class_ids: tuple[str, ...] = ()  # stable ids (WNIDs, MIDs), where the dataset has them
    blank: tuple[int, int, int] = (0, 0, 0)  # the colour that the model's normalisation maps to 0
    data: dict[str, str] = field(default_factory=dict)  # fingerprints of the training data's index, labels and subset
    class_width: int = 0  # W, of the features that the head has of every class; 0 if it has none
    has_maps: bool = True  # the head gives images a score map for every class
    vector_width: int = 0  # of the vector that the head has of an image, also through masks (masked.py); 0: none
    draws: bool = False  # the head's features of a class are [spread, information] of its logit (variational.py)


class Outputs:
    """What the model said about a batch. Asking for a part that is not there is a mistake of the method's `needs`."""

    def __init__(self, logits: torch.Tensor, maps: torch.Tensor | None = None, features: torch.Tensor | None = None):
        self.logits = logits  # float32 [B, L]
        self.parts = (logits, maps, features)

    @property
    def maps(self) -> torch.Tensor:
        """float32 [B, L, G, G]: score-map logits."""
        return _there(self.parts[1], "score maps: the method's needs() must ask for maps")

    @property
    def features(self) -> torch.Tensor:
        """[B, D, G, G], or [B, D] for feature shards: what the head saw; with Needs.class_features [B, L, W]: what it
        found of every class."""
        return _there(self.parts[2], "features")


def _there(tensor: torch.Tensor | None, what: str) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError(f"these outputs have no {what}")
    return tensor


def _no_forward(inputs: torch.Tensor) -> Outputs:
    raise RuntimeError("this step has no model to ask about further views")


@dataclass(frozen=True)
class Step:
    """Where a batch stands."""

    world: World
    samples: int  # real samples of the *global* batch
    epoch: int  # of this phase, from 0
    epochs: int
    phase: int = 0
    number: int = 0  # optimizer steps of this phase before this one
    state: StateRows = NO_ROWS  # the batch's rows of the method's fields
    forward: Callable[..., Outputs] = _no_forward  # for methods that look at further views of the batch


@dataclass(frozen=True)
class EpochStart:
    """What a method may do between two epochs, on every rank alike."""

    phase: int
    epoch: int  # of this phase, from 0
    epochs: int
    overall: int  # counts epochs over all phases
    world: World
    state: SampleState | NoState
    scored: Callable[[], Iterator[Scored]]
    """A pass over this rank's share of all training samples: every sample once, in evaluation mode, without random
    augmentation. Go through it to its end; rows of the state may be read and written on the way."""


@dataclass(frozen=True)
class Scored:
    """One batch of such a pass."""

    batch: Batch
    outputs: Outputs
    state: StateRows


@dataclass
class LossTerms:
    """global loss = Σ over all ranks of per_sample.sum() / samples + coupled."""

    per_sample: torch.Tensor  # [B]
    coupled: torch.Tensor | None = None  # a scalar of the whole global batch, equal on every rank
    rows: dict[str, torch.Tensor | Masked] = field(default_factory=dict)  # new values of the fields, by name
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # values [B] whose means a run reports, by name


@dataclass(frozen=True)
class Needs:
    """What a method asks of the data, the model and the loop; may depend on its settings."""

    full_labels: bool = False
    negatives: bool = False  # at least one verified negative
    maps: bool = False  # score maps in the outputs, hence images
    class_features: bool = False  # the head's features of every class take the place of the backbone's in the outputs
    strong_view: bool = False  # a second view of every image by data.strong_augment, as batch.strong_view
    same_crop: bool = False  # both views show the same cells: the strong one keeps the first one's crop and flip
    pixels: bool = False  # its loss makes images of its own from those of the batch
    backbone: bool = False  # does nothing for a classifier of which only the head learns
    scored_pass: bool = False  # begin_epoch goes over all training samples (EpochStart.scored)
    epochs: bool = False  # what it does depends on how many epochs the phase has: a run cannot be given more later
    whole_batch: bool = False  # a term needs the global batch at once: two forwards with gradient accumulation
    scores: tuple[str, ...] = ()  # imported score tables that `method.scores` must hold (score_table.py)
    neighbors: bool = False  # the setting `neighbors` names what `lacuna neighbors` made


SettingsT = TypeVar("SettingsT", bound=Settings)


class Method(Generic[SettingsT]):
    """Subclass `Method[YourSettings]`, fill in `loss`, and add the class to METHODS. Losses are float32, from logits.

    A subclass of a finished method that has further settings names them with `settings_type = …`.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    paper: ClassVar[str] = ""
    score: ClassVar[Score] = SIGMOID
    """How logits become the scores that are ranked, thresholded and exported."""
    class_state: ClassVar[dict[str, str]] = {}
    """What `state` holds once a run is under way, name → dtype and shape, for `lacuna methods`."""

    def __init_subclass__(cls) -> None:
        given = [kind for base in cls.__dict__.get("__orig_bases__", ()) for kind in get_args(base)]
        if given and isinstance(given[0], type) and "settings_type" not in cls.__dict__:
            cls.settings_type = given[0]

    def __init__(self, settings: SettingsT, task: Task):
        self.settings, self.task = settings, task

    @classmethod
    def score_with(cls, settings: dict) -> Score:
        """How logits become scores, where that depends on the settings (the config's `method` section)."""
        return cls.score

    def needs(self) -> Needs:
        return Needs()

    def fields(self) -> list[Field]:
        """What the method remembers about every sample; an empty list needs no store."""
        return []

    def initial_rows(self, field: str, labels: np.ndarray, shard: int) -> np.ndarray:
        """First values of a field declared with `Given`, from the shard's labels int8 [rows, L]."""
        raise NotImplementedError(f"{type(self).__name__} declares {field!r} as Given, but gives no rows")

    def initial_counts(self) -> dict[str, np.ndarray]:
        """Histograms int64 [L, 256] of the first values of fields that keep one, where label counts tell them."""
        return {}

    def module(self) -> torch.nn.Module | None:
        """Parameters that learn together with the classifier's head; asked once, kept and checkpointed by the model."""
        return None

    def begin_epoch(self, start: EpochStart) -> None:
        """Called on every rank before the first batch of an epoch, not after a resume inside it.

        Passes over all samples (thresholds, priors, pseudo-labels) belong here.
        """

    def end_phase(self, steps: int) -> None:
        """A phase ended; the next one goes on from the weights and state that it had after `steps` steps."""

    def loss(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def complete_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B]: of further images without state whose labels are complete (train.fully_labelled_weight).

        Binary cross entropy, the mean over classes; a method that reads its logits otherwise says how.
        """
        return F.binary_cross_entropy_with_logits(logits, positive(labels).to(logits.dtype), reduction="none").mean(1)

    def state(self) -> dict[str, torch.Tensor]:
        """Class-level and global state, for the checkpoint."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        assert not state, f"{type(self).__name__} keeps no state, the checkpoint has {sorted(state)}"


def expected_positives(task: Task) -> float:
    """k, the mean number of positives per image, for a method that cannot do without."""
    if task.expected_positives is None:
        raise UserError("model.expected_positives is needed: give the expected number of positives per image, or "
                        "images to estimate it from: data.fully_labelled, or a fully labelled data.val.")
    return task.expected_positives


def positive(labels: torch.Tensor) -> torch.Tensor:
    return labels == POSITIVE


def negative(labels: torch.Tensor) -> torch.Tensor:
    return labels == NEGATIVE


def unknown(labels: torch.Tensor) -> torch.Tensor:
    return labels == UNKNOWN
