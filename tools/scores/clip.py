"""Vision-language models through open_clip: CLIP, SigLIP and their kin. Scores are those of the prompts.

Legend: L classes, D width of the embeddings.
    score = softmax over classes, or sigmoid, of scale · cos(image, text) + bias, as the model was trained
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lacuna.basics.errors import UserError
from lacuna.tools.scores.looking import Look

_TEXTS = 256  # at a time


@dataclass(frozen=True)
class ClipModel:
    name: str  # as open_clip calls it, or hf-hub:… or local-dir:…
    weights: str  # a file, or one of open_clip's tags; "none": random
    digest: str = ""  # of the file
    activation: str | None = None  # default: as it was trained
    temperature: float | None = None  # default: the learnt one
    templates: tuple[str, ...] = ("{}",)
    names: tuple[str, ...] = ()
    text: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32), compare=False)  # [L, D], length 1

    @property
    def facts(self) -> dict:
        return {"open_clip": self.name, "weights": self.digest or self.weights, "activation": self.activation,
                "temperature": self.temperature, "templates": self.templates, "names": self.names}

    def prepared(self) -> ClipModel:
        """With the embeddings of the classes, so that workers need only look at images."""
        model, tokenize = self._open(), self._tokenizer()
        texts = [template.format(name) for name in self.names for template in self.templates]
        with torch.no_grad():
            found = torch.cat([F.normalize(model.encode_text(tokenize(texts[i : i + _TEXTS])).float(), dim=1)
                               for i in range(0, len(texts), _TEXTS)])
        mean = found.view(len(self.names), len(self.templates), -1).mean(1)
        return replace(self, text=F.normalize(mean, dim=1).numpy())

    def load(self, device: torch.device) -> tuple[Look, Callable[[torch.Tensor], torch.Tensor]]:
        from open_clip import get_model_preprocess_cfg

        model = self._open().to(device)
        made_for = get_model_preprocess_cfg(model)
        size = made_for["size"]
        look = Look(size if isinstance(size, int) else max(size), made_for.get("interpolation", "bicubic"),
                    tuple(made_for["mean"]), tuple(made_for["std"]))
        text = torch.from_numpy(self.text).to(device)
        bias = 0.0 if model.logit_bias is None else model.logit_bias.detach().float()
        scale = model.logit_scale.detach().exp().float() if self.temperature is None else 1 / self.temperature
        sigmoid = (self.activation or ("softmax" if model.logit_bias is None else "sigmoid")) == "sigmoid"

        def scores(pixels: torch.Tensor) -> torch.Tensor:
            images = F.normalize(model.encode_image(pixels).float(), dim=1)
            logits = scale * images @ text.T + bias
            return torch.sigmoid(logits) if sigmoid else torch.softmax(logits, 1)

        return look, scores

    def _open(self) -> Any:
        try:
            import open_clip
        except ImportError:
            raise UserError(f"open_clip:{self.name} needs the package open_clip_torch: `pip install "
                            "'lacuna-trainer[clip]'`.") from None
        own = ":" in self.name  # a folder or a hub's repository, which names its weights itself
        wanted = None if own or self.weights == "none" else self.weights
        try:
            return open_clip.create_model(self.name, pretrained=wanted, require_pretrained=wanted is not None).eval()
        except Exception as error:  # open_clip and the hub raise many kinds
            raise UserError(f"open_clip:{self.name} with --weights {self.weights}: {_first(error)}. Give a file of "
                            "weights, one of the tags of `open_clip.list_pretrained()` (which needs a connection), or "
                            "open_clip:local-dir:FOLDER.") from None

    def _tokenizer(self) -> Any:
        import open_clip

        try:
            return open_clip.get_tokenizer(self.name)
        except Exception as error:
            raise UserError(f"open_clip:{self.name}: its tokenizer cannot be had ({_first(error)}). Those of SigLIP "
                            "need the package transformers and, the first time, a connection.") from None


def _first(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:300].rstrip(".")
