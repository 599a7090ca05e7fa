"""Every method by its config name; a method is added by adding one file and its line here."""

from __future__ import annotations

import difflib

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import (
    asl,
    cap,
    ccd,
    cole,
    crisp,
    csl,
    entropy,
    gpr,
    gr,
    hill,
    ignore,
    lac,
    large_loss,
    mime,
    scob,
    scpnet,
    softmax,
    verelst,
    vlpl,
)
from lacuna.trainer.methods.base import Method, Task
from lacuna.trainer.methods.role import method as role
from lacuna.trainer.methods.selection import method as selection
from lacuna.trainer.methods.soft_exposure import baselines as soft_exposure
from lacuna.trainer.methods.soft_exposure import neighbors as se
from lacuna.trainer.scores import Score

_GRID, _WIDTH = 14, 2048  # of an example: a ResNet-50 on 448-pixel images
METHODS: dict[str, type[Method]] = {
    "bce": cole.Bce,
    "bce_ls": cole.BceSmoothed,
    "iu": cole.IgnoreUnknown,
    "iun": cole.IgnoreUnknownAllNegatives,
    "an": cole.AssumeNegative,
    "an_ls": cole.AssumeNegativeSmoothed,
    "wan": cole.WeakAssumeNegative,
    "epr": cole.ExpectedPositives,
    "pr": cole.PairwiseRanking,
    "role": role.Role,
    "en": verelst.compose("en", ""),
    "ep": verelst.compose("ep", ""),
    **{f"{first}_{second}": verelst.compose(first, second) for first in ("an", "en", "ep", "epr")
       for second in ("cl", "scl")},
    "csl": csl.Csl,
    "ne": soft_exposure.NoExposure,
    "wne": soft_exposure.WeightedNoExposure,
    "fe": soft_exposure.FullExposure,
    "ls": soft_exposure.LabelSoftening,
    "se_i": se.SoftExposureByImages,
    "se_l": se.SoftExposureByLabels,
    "se": se.SoftExposure,
    "ll_r": large_loss.Reject,
    "ll_ct": large_loss.CorrectTemporarily,
    "ll_cp": large_loss.CorrectPermanently,
    "em": entropy.EntropyMaximization,
    "em_apl": entropy.PseudoNegatives,
    "asl": asl.Asl,
    "cap": cap.Cap,
    "hill": hill.Hill,
    "splc": hill.Splc,
    "gr": gr.GeneralizedRobust,
    "crisp": crisp.Crisp,
    "mime": mime.Mime,
    "ignore": ignore.Ignore,
    "lac": lac.Lac,
    "vlpl": vlpl.Vlpl,
    "gpr": gpr.Gpr,
    "aevlp": gpr.Aevlp,
    "scob": scob.Scob,
    "scpnet": scpnet.Scpnet,
    "ccd": ccd.Ccd,
    "selection": selection.Selection,
    "softmax": softmax.Softmax,
}


def score_of(body: dict) -> Score:
    """How the method of a config's `method` section makes scores of logits."""
    return METHODS.get(body["name"], Method).score_with(body)  # a method registered elsewhere is not here to say


def build_method(body: dict, task: Task) -> Method:
    """From the config's `method` section."""
    name = body.get("name")
    if name not in METHODS:
        close = difflib.get_close_matches(str(name), METHODS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"method.name = {name!r}: {hint}legal: {', '.join(METHODS)}.")
    kind = METHODS[name]
    method = kind(validated(kind.settings_type, body, f"method {name!r}"), task)
    needs = method.needs()
    if needs.full_labels and not task.fully_annotated:
        raise UserError(f"method.name = {name!r} needs full labels, but the sidecar of data.train has unknown entries. "
                        "Use a fully annotated sidecar (data.train.labels=…), or a method for partial labels: 'an'.")
    if needs.negatives and not task.negatives.any():
        raise UserError(f"method.name = {name!r} needs verified negatives, but the sidecar of data.train has none. "
                        "Make one with `lacuna annotate … --scheme single_positive --num-neg 1` (iu), or with "
                        "`--num-neg -1` (iun).")
    if needs.neighbors and body.get("neighbors") is None:
        raise UserError(f"method.name = {name!r} needs method.neighbors: what `lacuna neighbors` made for the shards, "
                        "labels and subset of data.train.")
    if needs.scores and not body.get("scores"):
        raise UserError(f"method.name = {name!r} needs tables of scores: {', '.join(needs.scores)}. Make them "
                        "with `lacuna scores`, or read yours with `lacuna import-scores`, and set method.scores to the "
                        "store's URL.")
    if needs.maps and not task.has_maps:
        raise UserError(f"method.name = {name!r} needs a score map for every class, but model.head = 'ml_decoder' has "
                        f"fewer queries than the {task.classes} classes. Set model.decoder.groups={task.classes}, "
                        "or use another head or method.")
    if (needs.maps or needs.strong_view) and not task.grid:
        wanted = "score maps" if needs.maps else "two views of an image"
        raise UserError(f"method.name = {name!r} needs {wanted}, which feature shards do not have. Use image shards, "
                        "or another method.")
    return method


def example(name: str, classes: int = 80) -> Method:
    """An instance for asking questions; settings without a default are 1, which neither needs nor shapes depend on."""
    kind = METHODS[name]
    required = {key: 1 for key, field in kind.settings_type.model_fields.items() if field.is_required()}
    ones = np.ones(classes, np.int64)
    task = Task(classes, 1, ones, ones, fully_annotated=True, grid=_GRID, expected_positives=1.0, width=_WIDTH)
    return kind(validated(kind.settings_type, {**required, "name": name}, f"method {name!r}"), task)
