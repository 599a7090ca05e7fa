"""CSL equals its formula in every mode, selects exactly K, also among ties and in short rows, and checks priors."""

import json
import math

import numpy as np
import pytest
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Outputs
from lacuna.trainer.methods.top_entries import top_entries
from lacuna.trainer.priors import read_prior, write_prior
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid, total
from tests.helpers.oracles import batch_of, step_of, task_of

PRIOR = np.array([0.5, 0.01, 0.04, 0.2, 0.0, 0.06, 0.03, 0.9, 0.05])


def selection(a, z, mode, top, budget, prior, prior_threshold, soft_prior):
    """ω by definition: entry lists and sorting."""
    omega = np.ones(a.shape)
    unknown = [place for place in np.ndindex(*a.shape) if z[place] == UNKNOWN]
    for n, i in unknown:
        if mode in ("ignore", "ignore_normalized"):
            omega[n, i] = 0
        elif mode == "selective" and prior is not None:
            if soft_prior:
                omega[n, i] = math.exp(-soft_prior * prior[i])
            elif prior_threshold and prior[i] > prior_threshold:
                omega[n, i] = 0
    if mode == "ignore_normalized":
        for n in range(len(a)):
            omega[n] *= 1 + 1 / (1 + sum(z[n] != UNKNOWN))
    if mode == "selective" and budget == "batch":
        for place in sorted(unknown, key=lambda place: -a[place])[: top * len(a)]:
            omega[place] = 0
    elif mode == "selective":
        for n in range(len(a)):
            for place in sorted((u for u in unknown if u[0] == n), key=lambda place: -a[place])[:top]:
                omega[place] = 0
    return omega


def oracle_for(mode="selective", gammas=(0, 1, 2), alphas=(1, 1, 1), clip=0.0, top=5, budget="per_image", prior=None,
               prior_threshold=0.05, soft_prior=0.0):
    def oracle(a, z, fixed):
        omega = selection(fixed, z, mode, top, budget, prior, prior_threshold, soft_prior)
        kinds = {POSITIVE: 0, NEGATIVE: 1, UNKNOWN: 2}
        loss = 0.0
        for n, i in np.ndindex(*a.shape):
            kind = kinds[int(z[n, i])]
            p, held = sigmoid(a[n, i]), sigmoid(fixed[n, i])
            right, held = (p, held) if kind == 0 else (min(1 - p + clip, 1), min(1 - held + clip, 1))
            loss -= alphas[kind] * math.log(max(right, 1e-8)) * (1 - held) ** gammas[kind] * omega[n, i]
        return loss
    return oracle


def settings_of(gammas=(0, 1, 2), alphas=(1, 1, 1), **rest):
    kinds = ("positive", "negative", "unknown")
    return {**{f"gamma_{k}": g for k, g in zip(kinds, gammas, strict=True)},
            **{f"alpha_{k}": g for k, g in zip(kinds, alphas, strict=True)}, **rest}


CASES = [
    {"mode": "negative"},
    {"mode": "ignore", "gammas": (1, 2, 7)},
    {"mode": "ignore_normalized", "gammas": (1, 2, 7)},
    {"mode": "negative", "gammas": (1, 2, 7), "alphas": (2.0, 0.5, 0.1), "clip": 0.05},
    {"mode": "negative", "gammas": (0.5, 1.5, 2.5), "clip": 0.2},
    {"top": 2, "gammas": (1, 2, 7)},
    {"top": 2, "budget": "batch", "gammas": (1, 2, 7)},
    {"top": 1, "budget": "batch", "clip": 0.05},
    {"top": 0},
    {"top": 100},
    {"top": 100, "budget": "batch"},
]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_formula(case):
    assert_formula("csl", oracle_for(**case), random_case(1), **settings_of(**case))
    assert_float32_close("csl", oracle_for(**case), **settings_of(**case))


@pytest.mark.parametrize("ending", [".csv", ".json"])
@pytest.mark.parametrize("case", [
    {"top": 2}, {"top": 1, "budget": "batch"}, {"top": 0, "prior_threshold": 0.5}, {"top": 2, "prior_threshold": 0.0},
    {"top": 2, "soft_prior": 10.0}, {"top": 1, "budget": "batch", "soft_prior": 3.0},
])
def test_priors(case, ending, tmp_path):
    path = str(tmp_path / f"prior{ending}")
    write_prior(path, [f"class {i}" for i in range(9)], PRIOR)
    held = PRIOR.astype(np.float32).astype(np.float64)
    assert_formula("csl", oracle_for(prior=held, **case), random_case(2), **settings_of(prior=path, **case))


def test_entries_that_the_prior_ignores_use_up_the_budget(tmp_path):
    """As in the released code: the likeliest entry is ignored twice, so that the second is not."""
    path = str(tmp_path / "prior.csv")
    write_prior(path, "abc", np.array([0.9, 0.0, 0.0]))
    logits, labels = torch.tensor([[3.0, 2.0, 1.0]]), np.full((1, 3), UNKNOWN, np.int8)
    value = total("csl", logits, labels, prior=path, top=1, gamma_unknown=0)
    assert value.item() == pytest.approx(float(torch.nn.functional.softplus(logits[0, 1:]).sum()), rel=1e-6)


@pytest.mark.parametrize("budget", ["per_image", "batch"])
def test_ties_are_cut_at_exactly_k(budget):
    logits = torch.zeros(4, 50)
    labels = np.full((4, 50), UNKNOWN, np.int8)
    value = total("csl", logits, labels, top=7, budget=budget, gamma_unknown=0)
    assert value.item() == pytest.approx(4 * 43 * math.log(2), rel=1e-6)


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (5, 9), (17, 1), (100, 3), (997, 10), (9600, 200), (40, 0)])
def test_top_entries_are_those_of_a_full_sort(columns, k):
    generator = torch.Generator().manual_seed(columns)
    for rows in (3, 1, 0):
        for values in (torch.randn(rows, columns, generator=generator),
                       torch.randn(rows, columns, generator=generator).round(),
                       torch.full((rows, columns), -math.inf)):
            found, column = top_entries(values, k)
            expected = values.sort(1, descending=True).values[:, :k]
            assert torch.equal(found.sort(1, descending=True).values, expected)
            assert torch.equal(values.gather(1, column), found)
            if values.isfinite().all():
                assert all(len(set(row.tolist())) == len(row) for row in column)


def test_openimages_size_equals_torch_topk():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 9600, generator=generator, dtype=torch.float64) * 2 - 4
    labels = np.full((8, 9600), UNKNOWN, np.int8)
    labels[:, ::1000], labels[:, 1::1000] = POSITIVE, NEGATIVE
    masked = logits.masked_fill(torch.as_tensor(labels) != UNKNOWN, -math.inf)
    entries = torch.nn.functional.softplus(logits) * logits.sigmoid() ** 7
    kept = entries.masked_fill(masked >= masked.topk(200).values[:, -1:], 0)[masked > -math.inf].sum()
    annotated = total("csl", logits, labels, mode="ignore", **{f"gamma_{k}": 2 for k in ("positive", "negative")})
    value = total("csl", logits, labels, top=200, gamma_positive=2, gamma_negative=2, gamma_unknown=7)
    assert value.item() == pytest.approx((kept + annotated).item(), rel=1e-9)


@pytest.mark.parametrize("case", [*CASES, {"gammas": (0, 0, 0), "clip": 0.05, "top": 1}])
def test_odd_inputs_stay_finite(case):
    assert_finite("csl", epochs=(0,), **settings_of(**case))


def test_far_below_the_floor_there_is_no_gradient():
    logits = torch.tensor([[-40.0, 40.0, 3.0]], requires_grad=True)
    value = total("csl", logits, [[POSITIVE, NEGATIVE, POSITIVE]], gamma_negative=0, mode="ignore")
    value.backward()
    assert value.item() == pytest.approx(-2 * math.log(1e-8) + math.log1p(math.exp(-3)), rel=1e-6)
    assert logits.grad[0, :2].tolist() == [0, 0]


def test_only_the_batch_budget_is_coupled_and_the_prior_is_in_the_checkpoint(tmp_path):
    task = task_of(np.full((1, 3), UNKNOWN, np.int8))
    path = str(tmp_path / "prior.json")
    write_prior(path, "abc", np.array([0.25, 0.5, 0.0]))
    first = build_method({"name": "csl", "prior": path}, task)
    assert not first.needs().whole_batch
    assert build_method({"name": "csl", "budget": "batch"}, task).needs().whole_batch
    assert not build_method({"name": "csl", "budget": "batch", "mode": "negative"}, task).needs().whole_batch
    write_prior(path, "abc", np.array([0.0, 0.0, 0.0]))
    resumed = build_method({"name": "csl", "prior": path}, task)
    resumed.load_state(first.state())
    assert resumed.state()["prior"].tolist() == [0.25, 0.5, 0.0]
    terms = resumed.loss(Outputs(torch.zeros(1, 3)), batch_of(np.full((1, 3), UNKNOWN, np.int8)), step_of(1))
    assert terms.per_sample.item() == 0  # K = 5 ignores all three


@pytest.mark.parametrize(("file", "text", "message"), [
    ("p.csv", "Classes,avg_pred\na,0.1\nb,0.2\na,0.3\n", "class 'a' has 2 rows"),
    ("p.csv", "Classes,avg_pred\na,0.1\nb,0.2\n", "2 classes, the data has 3"),
    ("p.csv", "class,prior\na,0.1\nb,0.2\nc,0.3\n", "the first line is 'class,prior'"),
    ("p.csv", "", "the first line is ''"),
    ("p.csv", "Classes,avg_pred\na,0.1\nb,x\nc,0.3\n", "could not convert string to float: 'x'"),
    ("p.csv", "Classes,avg_pred\na,0.1\nb,1.5\nc,0.3\n", "class 'b' has 1.5"),
    ("p.csv", "Classes,avg_pred\na,0.1\nb,nan\nc,0.3\n", "class 'b' has nan"),
    ("p.csv", "Classes,avg_pred\na,0.1\nb\nc,0.3\n", "line 3 has 1 columns"),
    ("p.json", json.dumps({"classes": ["a", "b", "b"], "prior": [0.1, 0.2, 0.3]}), "class 'b' has 2 rows"),
    ("p.json", json.dumps({"classes": ["a", "b"], "prior": [0.1, 0.2, 0.3]}), "ValueError"),
    ("p.json", json.dumps({"classes": ["a", "b", "c"]}), "KeyError: 'prior'"),
    ("p.json", "[1, 2", "JSONDecodeError"),
    ("missing.csv", None, "no such file"),
])
def test_bad_prior_files_are_named(file, text, message, tmp_path):
    path = tmp_path / file
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="prior .*" + file) as error:
        build_method({"name": "csl", "prior": str(path)}, task_of(np.full((1, 3), UNKNOWN, np.int8)))
    assert message in str(error.value)


def test_prior_rows_are_matched_by_name_where_names_are_known(tmp_path):
    path = str(tmp_path / "prior.csv")
    write_prior(path, ["cat", "a dog, say", "owl"], np.array([0.1, 0.2, 0.3]))
    assert read_prior(path, 3).tolist() == [0.1, 0.2, 0.3]
    assert read_prior(path, 3, ["owl", "cat", "a dog, say"], []).tolist() == [0.3, 0.1, 0.2]
    assert read_prior(path, 3, ["m1", "m2", "m3"], ["owl", "cat", "a dog, say"]).tolist() == [0.3, 0.1, 0.2]
    with pytest.raises(UserError, match="'a dog, say' is not a class"):
        read_prior(path, 3, ["owl", "cat", "emu"])


def test_bad_settings_are_named():
    task = task_of(np.full((1, 3), UNKNOWN, np.int8))
    for settings, message in (({"mode": "selectiv"}, "mode"), ({"soft_prior": 10}, "soft_prior needs a file"),
                              ({"mode": "ignore", "prior": "x.csv"}, "no effect in mode 'ignore'"),
                              ({"gamma_unkown": 2}, "did you mean 'gamma_unknown'")):
        with pytest.raises(UserError, match=message):
            build_method({"name": "csl", **settings}, task)
