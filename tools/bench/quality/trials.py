"""What `bench quality` tries: the same number of settings of every method, on each annotation of the same features.

Two protocols. *As published*: the head as the papers have it, six settings per method (learning rates and the method's
own). *Tuned* (sets ending in _tuned): bias at the prior, normalised features and decay for every method, AN and the
oracle included, eight settings each of learning rate × decay × at most one setting of the method's own.

No trial uses an oracle: K and k come from the validation images, the class prior from a model trained with Ignore.
Methods whose authors give one setting get six learning rates, the others three learning rates and two settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lacuna.tools.bench.quality import recipe
from lacuna.trainer.methods import METHODS, example

_SIX = (3e-4, 1e-4, 1e-3, 3e-5, 3e-3, 1e-5)  # likely ones first: others are measured by them
_THREE = (3e-4, 1e-4, 1e-3)
# λ of λ/2·‖W‖² beside a loss that sums over classes.
_DECAYS = (0.003, 0.01, 0.03, 0.1)
# {"lr": …, "method": {…}} and, if they are not the usual ones, "labels": sidecar, "teacher": name in TEACHERS, and in
# the tuned protocol "decay": λ and "full_weight": train.fully_labelled_weight of the subset full300
Trial = dict


@dataclass(frozen=True)
class Annotation:
    """One way in which the training images are labelled, and what is compared on it."""

    labels: str  # sidecar
    trials: dict[str, list[Trial]]
    low: str  # the method that closes 0 of the gap; `oracle` closes 1
    priors: tuple[str, ...] = ()  # methods whose mean predictions are compared with the true class frequencies
    after: dict[str, str] = field(default_factory=dict)  # method → the one whose prior it needs
    tuned: bool = False  # which of the two protocols


def _trials(name: str, *settings: dict, **other: str) -> list[Trial]:
    """Six learning rates of the defaults, or three of each of two settings."""
    lrs = _SIX if len(settings) < 2 else _THREE
    return [{"lr": lr, "method": {"name": name, **s}, **other} for lr in lrs for s in settings or ({},)]


def _consistency(name: str) -> list[Trial]:
    return _trials(name, {"gamma": 0.1}, {"gamma": 1.0})


_ORACLE = _trials("bce", labels="labels")
_COCO_GR = {"slope": [0.0, 10.0], "offset": [-2.0, -8.0]}
# Whose scores take the place of a vision-language model's: the settings that are chosen for the methods themselves.
TEACHERS: dict[str, Trial] = {"an": {"lr": 1e-4, "method": {"name": "an"}},
                              "role": {"lr": 1e-4, "method": {"name": "role", "lr": 3e-2}}}
TUNED_TEACHER: Trial = {"lr": 1e-3, "decay": 0.03, "method": {"name": "an"}}  # likewise in the tuned protocol
_PLAIN = {"gamma_positive": 0, "gamma_negative": 0, "gamma_unknown": 0}
_FOCAL = {"gamma_positive": 0, "gamma_negative": 3, "gamma_unknown": 4}  # the authors' on COCO with FPC
SINGLE = {
    "oracle": _ORACLE,
    "an": _trials("an"),
    "role": _trials("role", {"lr": 1e-2}, {"lr": 3e-2}),
    "en": _trials("en"),
    "en_cl": _consistency("en_cl"),
    "an_ls": _trials("an_ls", {"smoothing": 0.1}, {"smoothing": 0.05}),
    "wan": _trials("wan"),
    "epr": _trials("epr"),
    "em": _trials("em", {"entropy_weight": 0.1}, {"entropy_weight": 0.2}),
    "gr": _trials("gr", {}, _COCO_GR),
    "ll_r": _trials("ll_r", {"delta_percent": 0.2}, {"delta_percent": 0.4}),
    "hill": _trials("hill"),
    "splc": _trials("splc"),
    "asl": _trials("asl", {"gamma_positive": 0.0}, {"gamma_positive": 1.0}),
    "ll_ct": _trials("ll_ct", {"delta_percent": 0.2}, {"delta_percent": 0.4}),
    "an_cl": _consistency("an_cl"),
    "epr_cl": _consistency("epr_cl"),
    "ep": _trials("ep"),
    "ep_cl": _consistency("ep_cl"),
    "pr": _trials("pr"),
    "iu": _trials("iu", labels="iu"),  # it is told a negative of every image, too
    "iun": _trials("iun", labels="iun"),  # it is told all negatives
    "bce_ls": _trials("bce_ls", labels="labels"),
    "ll_cp": _trials("ll_cp", {"delta_percent": 0.1}, {"delta_percent": 0.2}),
    "em_apl": _trials("em_apl", {"pseudo_weight": 0.2}, {"pseudo_weight": 0.9}),
    "vlpl": _trials("vlpl", {}, {"threshold": 0.1}),  # with AN as the teacher, which gives an image about one positive
    "gpr": _trials("gpr", {}, {**_COCO_GR, "threshold": 0.1}),
    "ccd": _trials("ccd", {"consistency": 0}, {"consistency": 0, "max_entropy": 4.0}),  # features have one view
    # ROLE's scores add up to 6 positives an image, AN's to 1.
    "vlpl_role": _trials("vlpl", {"threshold": 0.5}, {"threshold": 0.3}, teacher="role"),
    "gpr_role": _trials("gpr", *({**_COCO_GR, "threshold": t} for t in (0.5, 0.3)), teacher="role"),
    "crisp": _trials("crisp", {"positive_mean": "batch"}, {"positive_mean": "data"}),
}


def _tuned(name: str, *settings: dict, **other: str) -> list[Trial]:
    return recipe.trials(name, _DECAYS, (2e-3, 1e-3), *settings, **other)


TUNED = {
    "oracle": _tuned("bce", labels="labels"),
    "an": _tuned("an"),
    "selection": _tuned("selection"),
    "softmax": _tuned("softmax"),
    "role": _tuned("role", {"lr": 1e-1}, {"lr": 3e-1}),
    "en": _tuned("en"),
    "en_cl": _tuned("en_cl", {"gamma": 0.1}, {"gamma": 1.0}),
    "iun": _tuned("iun", labels="iun"),
    "an_ls": _tuned("an_ls", {"smoothing": 0.1}, {"smoothing": 0.05}),
    "wan": _tuned("wan"),
    "em": _tuned("em", {"entropy_weight": 0.1}, {"entropy_weight": 0.2}),
    "gr": _tuned("gr", {}, _COCO_GR),
    "ll_r": _tuned("ll_r", {"delta_percent": 0.2}, {"delta_percent": 0.4}),
    "hill": _tuned("hill"),
    "splc": _tuned("splc"),
    "asl": _tuned("asl", {"gamma_positive": 0.0}, {"gamma_positive": 1.0}),
    "epr": _tuned("epr"),
    "crisp": _tuned("crisp"),
    "ll_ct": _tuned("ll_ct", {"delta_percent": 0.2}, {"delta_percent": 0.4}),
    "ll_cp": _tuned("ll_cp", {"delta_percent": 0.1}, {"delta_percent": 0.2}),
    "em_apl": _tuned("em_apl", {"pseudo_weight": 0.2}, {"pseudo_weight": 0.9}),
    "gpr": _tuned("gpr", {}, {**_COCO_GR, "threshold": 0.1}),
    "vlpl": _tuned("vlpl", {}, {"threshold": 0.1}),
    "ccd": _tuned("ccd", {"consistency": 0}, {"consistency": 0, "max_entropy": 4.0}),
    "ep": _tuned("ep"),
    "pr": _tuned("pr"),
    "mime": _tuned("mime"),
    "epr_cl": _tuned("epr_cl", {"gamma": 0.1}, {"gamma": 1.0}),
    "ep_cl": _tuned("ep_cl", {"gamma": 0.1}, {"gamma": 1.0}),
    "an_cl": _tuned("an_cl", {"gamma": 0.1}, {"gamma": 1.0}),
    "iu": _tuned("iu", labels="iu"),
    "bce_ls": _tuned("bce_ls", labels="labels"),
}
# Where every positive is shown or hidden on its own.
_PARTIAL = {**{name: TUNED[name] for name in ("oracle", "an", "softmax", "en", "role")},
            "selection": _tuned("selection", {"shown": "independent"})}
# What is chosen for them above, and how much 300 fully labelled training images count beside.
_WITH_FULL = {"an": (1e-3, 0.03), "softmax": (1e-3, 0.03), "selection": (1e-3, 0.01)}
FULL300 = {name: [{"lr": lr, "decay": decay, "method": {"name": name}, "full_weight": weight}
                  for weight in (0.01, 0.03, 0.1)] for name, (lr, decay) in _WITH_FULL.items()}
ANNOTATIONS = {
    "features": Annotation("single", SINGLE, "an"),
    "features_tuned": Annotation("single", TUNED, "an", tuned=True),
    "features_full300": Annotation("single", FULL300, "an", tuned=True),
    "fpc300_tuned": Annotation("fpc300", {
        **_PARTIAL, "csl": _tuned("csl", {"mode": "negative", **_PLAIN}, {"mode": "negative", **_FOCAL}),
    }, "an", tuned=True),
    "pos10_tuned": Annotation("pos10", {
        **_PARTIAL, "se": _tuned("se", {}, {"positive_weight": 5.0}),
    }, "an", tuned=True),
    "fpc300": Annotation("fpc300", {
        "oracle": _ORACLE,
        # A class prior is a mean of probabilities, so both models that it is estimated with are trained with plain
        # cross entropy: focal weights push predictions towards ½ (20 priors above η = ½ instead of one).
        "csl_ignore": _trials("csl", {"mode": "ignore", **_PLAIN}),
        "csl_negative": _trials("csl", {"mode": "negative", **_PLAIN}),
        "pasl_negative": _trials("csl", {"mode": "negative", **_FOCAL}),
        "csl_selective": _trials("csl", *({"mode": "selective", **_FOCAL, "top": k, "prior_threshold": 0.5}
                                          for k in (5, 1))),
    }, "csl_ignore", priors=("csl_ignore", "csl_negative", "pasl_negative"), after={"csl_selective": "csl_ignore"}),
    "pos10": Annotation("pos10", {
        "oracle": _ORACLE,
        "ne": _trials("ne"),
        "wne": _trials("wne"),
        "fe": _trials("fe"),
        "ls": _trials("ls", {"temperature": 5.0}, {"temperature": 20.0}),
        "se_i": _trials("se_i", {}, {"positive_weight": 5.0}),
        "se_l": _trials("se_l", {}, {"side": "negative"}),
        "se": _trials("se", {}, {"positive_weight": 5.0}),
    }, "ne"),
}


def _remaining() -> dict[str, list[Trial]]:
    """Methods for one positive per image that have no line of their own: six learning rates of the defaults."""
    named = {trial["method"]["name"] for a in ANNOTATIONS.values() if not a.tuned for trials in a.trials.values()
             for trial in trials}
    return {name: _trials(name) for name, kind in METHODS.items() if name not in named and on_vectors(name)
            and not any(f.is_required() for key, f in kind.settings_type.model_fields.items() if key != "name")}


def on_vectors(name: str) -> bool:
    """Whether a method can learn from single positives on vectors: it needs neither score maps nor a second view of the
    image, nor tables of another model, nor verified negatives."""
    needs = example(name).needs()
    return not (needs.maps or needs.strong_view or needs.scores or needs.negatives)


SINGLE.update(_remaining())
