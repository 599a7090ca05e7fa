"""The classifier: a backbone and a 1x1 head over the feature map that gives logits and, on demand, score maps.

Legend: B batch, D feature width, L classes, G grid side of the feature map.
Pooling and the linear head commute, so logits are computed from pooled features; maps cost extra only when asked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lacuna.basics.errors import UserError
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.attention import Attention
from lacuna.trainer.models.backbones import SOURCES
from lacuna.trainer.models.cuts import Cut
from lacuna.trainer.models.decoders import MASKED, build_decoder
from lacuna.trainer.models.decoders.base import Decoder
from lacuna.trainer.models.decoders.masked import MaskedTransformer
from lacuna.trainer.models.head_norm import HeadNorm
from lacuna.trainer.models.parts import learning, published_names
from lacuna.trainer.models.stages import Stages, find_stages
from lacuna.trainer.models.weights import is_file, load_weights

_NORMS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "centered": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


class Classifier(nn.Module):
    """Inputs: uint8 [B, 3, H, W] (normalised here, on the device), or float [B, D] features; in a phase with a cache
    also float16, what the fixed part before the cut made of images."""

    mean: torch.Tensor
    std: torch.Tensor
    head_start: torch.Tensor | None  # what model.head_init made of the head's weights

    def __init__(self, backbone: nn.Module, width: int, classes: int, config: ModelConfig, normalize: str,
                 names: dict[str, str] | None = None, stages: Stages | None = None, earlier: int = 0):
        """`names`: how the publisher of the backbone calls its modules and parameters; `stages`: for a head that also
        looks at an earlier map, of so many channels."""
        super().__init__()
        self.backbone = backbone
        self.names = names or published_names(backbone, backbone)
        self.neck = nn.Linear(width, config.bottleneck) if config.bottleneck else nn.Identity()
        self.stages = stages
        self.head: nn.Linear | Decoder = (build_decoder(config, width, classes, earlier)
                                          or nn.Linear(config.bottleneck or width, classes))
        self.head_norm = HeadNorm(config.bottleneck or width) if config.head_norm == "l2" else None
        self.width = width
        self.extra: nn.Module | None = None  # what a method trains beside the head
        self.boost = config.boost
        self.attention = Attention(config.csra_weight, config.csra_temperature) if config.head == "csra" else None
        self.cut: Cut | None = None  # where half-precision inputs enter: what the part before it made of images
        self.graph: Callable = Classifier.outputs
        self.freeze_statistics = config.batchnorm == "frozen"
        self.set_trainable("all")
        self.register_buffer("head_start", None, persistent=False)
        mean, std = _NORMS[normalize]
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1) * 255, persistent=False)

    def forward(self, inputs: torch.Tensor, with_maps: bool = False, of_classes: bool = False,
                **look) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """logits [B, L], score-map logits [B, L, G, G] (None unless asked), and the features themselves; `of_classes`
        [B, L, W] instead of those of the backbone, for heads that have them. With `look`, what decoders/masked.py says
        when it is asked so: logits, an activation [B, G, G], vectors [B, W]."""
        if look:
            assert isinstance(self.head, MaskedTransformer)
            return self.head.look(self.two_maps(inputs), **look)
        return self.graph(self, inputs, with_maps, of_classes)

    def compile(self, **options) -> None:
        """Only what is computed: DeepSpeed's hooks count steps, and a graph with them would be made anew every time."""
        self.graph = torch.compile(Classifier.outputs, **options)

    def outputs(self, inputs: torch.Tensor, with_maps: bool,
                of_classes: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if isinstance(self.head, MaskedTransformer):
            last, earlier = self.two_maps(inputs)
            return self.head.look((last, earlier))[0], None, last
        features = self.features(inputs)
        if isinstance(self.head, Decoder):
            scores, attended, gathered = self.head(features, with_maps)
            return scores, attended, gathered if of_classes else features
        pooled = self.pooled(features)
        factor = None if self.head_norm is None else self.head_norm.factor(pooled)
        of_maps = features.ndim == 4 and (self.boost != 1 or self.attention is not None)
        logits = None if of_maps else self.classify(pooled, factor)
        if features.ndim == 2 or (logits is not None and not with_maps):
            assert logits is not None
            return logits, None, features
        maps = self.classify(self.neck(features.permute(0, 2, 3, 1)), factor).permute(0, 3, 1, 2)
        if logits is None:  # boosted or attended scores do not commute with pooling
            maps = torch.where(maps > 0, self.boost * maps, maps) if self.boost != 1 else maps
            logits = maps.mean((2, 3)) if self.attention is None else self.attention(maps, self.head.bias.float())
        return logits, maps if with_maps else None, features

    def pooled(self, features: torch.Tensor) -> torch.Tensor:
        """[B, D']: what enters the head, before its norm."""
        return self.neck(features.mean((2, 3)) if features.ndim == 4 else features)

    def classify(self, x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        """Float32 logits of pooled vectors [B, D'], or of the cells of feature maps [B, G, G, D']."""
        if self.head_norm is not None and factor is not None:
            x = self.head_norm(x, factor)
        assert isinstance(self.head, nn.Linear)
        if self.attention is not None:
            return F.linear(x, F.normalize(self.head.weight, dim=1), self.head.bias).float()
        return self.head(x).float()

    @property
    def class_width(self) -> int:
        """Of the features that the head has of every class; 0 if it has none."""
        return self.head.width if isinstance(self.head, Decoder) and self.head.of_classes and not self.draws else 0

    @property
    def draws(self) -> bool:
        """Whether the head's features of a class are what a draw of its logit needs (decoders/variational.py)."""
        return isinstance(self.head, Decoder) and self.head.draws

    @property
    def vector_width(self) -> int:
        """Of the vector that the head has of a whole image, also through masks; 0 if it has none."""
        return self.head.width if isinstance(self.head, MaskedTransformer) else 0

    @property
    def has_maps(self) -> bool:
        """Whether images have a score map for every class."""
        return not isinstance(self.head, Decoder) or self.head.of_classes

    @property
    def blank(self) -> tuple[int, int, int]:
        """The colour that is 0 after normalisation."""
        red, green, blue = self.mean.flatten().round().int().tolist()
        return red, green, blue

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Weights of a run whose method trained something beside the head load without it where no method is."""
        if self.extra is None:
            state_dict = {name: tensor for name, tensor in state_dict.items() if not name.startswith("extra.")}
        has_norm = any(name.startswith("head_norm.") for name in state_dict)
        if strict and has_norm != (self.head_norm is not None):
            raise UserError(f"model.head_norm = {'none' if has_norm else 'l2'}, but these weights were trained "
                            f"with{'' if has_norm else 'out'} it. Set model.head_norm={'l2' if has_norm else 'none'}.")
        return super().load_state_dict(state_dict, strict, assign)

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        """[B, D, G, G], or [B, D] for feature shards."""
        if self.cut is not None and inputs.dtype == torch.float16:
            return self.cut.rest(inputs.float())
        inputs = self.normalized(inputs)
        if not self.learning:
            with torch.no_grad():
                return self.backbone(inputs)
        return self.backbone(inputs)

    def two_maps(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last map and the earlier one, for heads that look at both."""
        assert self.stages is not None
        with torch.set_grad_enabled(bool(self.learning) and torch.is_grad_enabled()):
            kept = self.cut is not None and inputs.dtype == torch.float16
            earlier = inputs.float() if kept else self.stages.first(self.normalized(inputs))
            return self.stages.second(earlier), earlier

    def before_cut(self, images: torch.Tensor) -> torch.Tensor:
        """What the fixed part makes of uint8 images: what a cache keeps."""
        assert self.cut is not None
        with torch.no_grad():
            return self.cut.fixed(self.normalized(images))

    def normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.float() - self.mean) / self.std if inputs.dtype == torch.uint8 else inputs

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        for name, module in self.backbone.named_modules():
            if name not in self.learning:
                module.training = False
        if self.freeze_statistics:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def set_trainable(self, trainable: str | tuple[str, ...]) -> None:
        """'head', 'all', or the head and parts of the backbone by name; what is fixed stays in evaluation mode."""
        self.learning = learning(self.names, trainable)
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name in self.learning)


def build_model(config: ModelConfig, data: DataConfig, classes: int, feature_width: int) -> Classifier:
    """`feature_width` is the vector length of feature shards, 0 for images."""
    source, _, name = config.backbone.partition(":")
    if (source == "features") != bool(feature_width):
        found = "feature vectors" if feature_width else "images"
        raise UserError(f"model.backbone = {config.backbone!r}, but data.train holds {found}. Use 'features' for "
                        "feature shards, and 'torchvision:NAME' or 'timm:NAME' for images.")
    if config.head == "csra" and config.boost != 1:
        raise UserError(f"model.boost = {config.boost} is for model.head=linear; this is 'csra'. Set model.boost=1.")
    if config.head != "linear" and source == "features":
        raise UserError(f"model.head = {config.head!r} attends over the cells of a feature map: it needs image shards. "
                        "For feature shards use model.head=linear.")
    if source == "features" and config.boost != 1:
        raise UserError(f"model.boost = {config.boost} boosts score maps, but data.train holds feature vectors. Use "
                        "image shards, or model.boost=1.")
    if source == "features":
        return Classifier(nn.Identity(), feature_width, classes, config, data.normalize)
    if source not in SOURCES or not name:
        raise UserError(f"model.backbone = {config.backbone!r}: write 'torchvision:NAME', 'timm:NAME' or 'features'.")
    body, backbone = SOURCES[source](name, config.weights, data.image_size)
    if is_file(config.weights):
        load_weights(body, backbone, config.weights)
    names, stages, earlier = published_names(body, backbone), None, 0
    width = _probe(backbone, config, data.image_size)
    if config.head == MASKED:
        stages = find_stages(backbone, names, config.decoder.earlier, data.image_size, config.head)
        with torch.no_grad():
            earlier = stages.first(torch.zeros(1, 3, data.image_size, data.image_size)).shape[1]
    return Classifier(backbone, width, classes, config, data.normalize, names, stages, earlier)


def _probe(backbone: nn.Module, config: ModelConfig, size: int) -> int:
    """The feature width D, from a blank image; a backbone that cannot take the size is named here, not in step 1."""
    try:
        with torch.no_grad():
            shape = backbone.eval()(torch.zeros(1, 3, size, size)).shape
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"model.backbone = {config.backbone!r} cannot take data.image_size = {size}: {error}. "
                        "Use the size it was made for, or another backbone.") from None
    if len(shape) != 4 or shape[2] != shape[3]:
        raise UserError(f"model.backbone = {config.backbone!r} gives {list(shape)} instead of a square feature map. "
                        "Use another backbone.")
    return shape[1]


def spatial_side(model: Classifier, size: int) -> int:
    """G, the side of the score maps for images of `size`."""
    blank = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=model.mean.device)
    with torch.no_grad():
        return model.eval().features(blank).shape[-1]


def set_head_bias(model: Classifier, kind: str, frequencies: torch.Tensor) -> None:
    """Where the head starts: see model.head_bias. Frequencies [L] of the classes, for `prior`."""
    if kind == "default":
        return
    start = torch.zeros_like(frequencies) if kind == "zero" else torch.logit(frequencies, 1e-6)
    with torch.no_grad():
        model.head.bias.copy_(start)


def head_and_blocks(model: Classifier) -> tuple[list[nn.Parameter], list[list[nn.Parameter]]]:
    """Learning parameters of the head (with bottleneck and a method's own module), and of the backbone block by block.

    A block is a numbered part or a part of its own by its publisher's names, such as `blocks.3` or `layer2.1`.
    """
    blocks: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.backbone.named_parameters():
        words = model.names[name].split(".")
        numbered = len(words) > 1 and words[1].isdigit()
        block = blocks.setdefault(".".join(words[:2] if numbered else words[:1]), [])
        if parameter.requires_grad:
            block.append(parameter)
    extra = model.extra.parameters() if model.extra is not None else ()
    head = [p for p in model.head.parameters() if p.requires_grad]  # a slow copy follows by itself
    return [*model.neck.parameters(), *head, *extra], list(blocks.values())
