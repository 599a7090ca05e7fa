"""Heads that ask the feature map with queries: `build_decoder` makes the one that model.head names."""

from __future__ import annotations

from lacuna.basics.errors import UserError
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.decoders.base import Decoder
from lacuna.trainer.models.decoders.masked import MaskedTransformer
from lacuna.trainer.models.decoders.ml_decoder import MLDecoder
from lacuna.trainer.models.decoders.query2label import Query2Label
from lacuna.trainer.models.decoders.variational import Variational

DECODERS: dict[str, type[Decoder]] = {"query2label": Query2Label, "ml_decoder": MLDecoder, "variational": Variational}


MASKED = "masked_transformer"


def build_decoder(config: ModelConfig, width: int, classes: int, earlier: int = 0) -> Decoder | None:
    """`width`: channels of the feature map; `earlier`: of the one before the last stage. None for the heads that score
    every cell by itself."""
    if config.head not in (*DECODERS, MASKED):
        return None
    refused = {"boost": config.boost != 1, "head_norm": config.head_norm != "none", "bottleneck": config.bottleneck}
    for key in (key for key, found in refused.items() if found):
        instead = {"boost": "model.boost=1: there are no scores of cells to boost",
                   "head_norm": "model.head_norm=none: its layers have norms of their own",
                   "bottleneck": "model.bottleneck=0, and model.decoder.width for a projection"}[key]
        raise UserError(f"model.{key} = {getattr(config, key)!r} is for model.head=linear or csra; this is "
                        f"{config.head!r}. Set {instead}.")
    if config.head == MASKED:
        return MaskedTransformer(config.decoder, (width, earlier), classes)
    return DECODERS[config.head](config.decoder, width, classes)
