"""LL-R and LL-Ct equal their formula, the golden AN value in the first epoch, and finite differences."""

import math

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.large_loss import modified_entries
from tests.helpers.loss_checks import assert_finite, assert_float32_close, assert_formula, random_case, sigmoid, total
from tests.helpers.oracles import LOGITS, OBSERVED, task_of


def oracle_for(name, epoch, delta_percent):
    def loss_of(a, z, n, i):
        return -math.log(sigmoid(a[n, i] if z[n, i] == POSITIVE else -a[n, i]))

    def oracle(a, z, fixed):
        entries = {(n, i): loss_of(a, z, n, i) for n, i in np.ndindex(*a.shape)}
        ranked = {(n, i): loss_of(fixed, z, n, i) if z[n, i] == UNKNOWN else 0.0 for n, i in entries}
        k = math.ceil(a.size * epoch * delta_percent / 100 - 1e-9)
        if k:
            threshold = sorted(ranked.values(), reverse=True)[k - 1]
            for (n, i), value in ranked.items():
                if value >= threshold and z[n, i] == UNKNOWN:
                    entries[n, i] = 0.0 if name == "ll_r" else -math.log(sigmoid(a[n, i]))
        return sum(entries.values()) / a.size
    return oracle


@pytest.mark.parametrize("name", ["ll_r", "ll_ct"])
def test_the_first_epoch_is_plain_an(name):
    assert float(total(name, torch.tensor(LOGITS), OBSERVED)) == pytest.approx(0.369802, abs=2e-6)


@pytest.mark.parametrize("name", ["ll_r", "ll_ct"])
@pytest.mark.parametrize(("epoch", "delta"), [(0, 0.4), (1, 0.4), (3, 2.5), (9, 0.2), (4, 10)])
def test_value_and_gradient_equal_the_formula(name, epoch, delta):
    oracle = oracle_for(name, epoch, delta)
    assert_formula(name, oracle, random_case(9), epoch, delta_percent=delta)
    assert_float32_close(name, oracle, epoch=epoch, delta_percent=delta)


def test_entries_as_large_as_the_threshold_are_all_modified():
    labels = np.full((2, 4), UNKNOWN, np.int8)
    assert float(total("ll_r", torch.zeros(2, 4), labels, epoch=1, delta_percent=10)) == 0


def test_known_entries_are_never_modified():
    """Even if more entries are to be modified than are unknown."""
    labels = np.array([[POSITIVE, NEGATIVE, UNKNOWN, NEGATIVE]], np.int8)
    logits = torch.tensor([[-2.0, 3.0, 1.0, 4.0]], dtype=torch.float64)
    known = sum(math.log1p(math.exp(x)) for x in (2.0, 3.0, 4.0))
    value = total("ll_r", logits, labels, epoch=9, delta_percent=11)
    assert value.item() == pytest.approx(known / 4, rel=1e-12)
    value = total("ll_ct", logits, labels, epoch=9, delta_percent=11)
    assert value.item() == pytest.approx((known + math.log1p(math.exp(-1.0))) / 4, rel=1e-12)


def test_number_of_modified_entries():
    assert [modified_entries(1000, epoch * 0.001) for epoch in range(5)] == [0, 1, 2, 3, 4]
    assert modified_entries(16 * 80, 9 * 0.004) == 47  # 46.08
    assert modified_entries(4, 3.0) == 4


@pytest.mark.parametrize("name", ["ll_r", "ll_ct"])
def test_odd_inputs_stay_finite(name):
    assert_finite(name)
    assert_finite(name, delta_percent=20)
    assert build_method({"name": name}, task_of(OBSERVED)).needs().whole_batch
