"""The likelihood of shown labels, its posterior and gradient equal sums over all label sets, also in odd cases."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods.selection.likelihood import fixed, independent
from tests.helpers.label_sets import by_enumeration
from tests.helpers.oracles import LOGITS, OBSERVED


def random_rows(seed, classes, rows=6, dtype=torch.float64):
    """Rows with any number of shown positives and negatives, none included."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet([1, 1, 2], rows)
    labels = np.stack([rng.choice([POSITIVE, NEGATIVE, UNKNOWN], classes, p=share) for share in shares])
    return torch.tensor(rng.normal(0, 2, (rows, classes)), dtype=dtype), torch.tensor(labels, dtype=torch.int8)


def gradient_of(likelihood, logits, labels, *more):
    leaf = logits.clone().requires_grad_()
    loss = likelihood(leaf, labels, *more).loss(leaf)
    loss.sum().backward()
    return loss.detach(), leaf.grad


def assert_enumerated(likelihood, logits, labels, q=None, rtol=1e-5):
    more = () if q is None else (torch.tensor(q, dtype=torch.float64),)
    found = likelihood(logits, labels, *more)
    classes = logits.shape[1]
    loss, gradient = gradient_of(likelihood, logits, labels, *more)
    p = torch.sigmoid(logits).double().numpy()
    each = None if q is None else np.broadcast_to(q, classes)
    for row in range(len(logits)):
        surprise, posterior = by_enumeration(logits[row].double().numpy(), labels[row].numpy(), each)
        np.testing.assert_allclose(loss[row].item(), surprise / classes, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(found.posterior(logits)[row].numpy(), posterior, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(gradient[row].numpy() * classes, p[row] - posterior, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_m_shown_positives_equal_all_label_sets(seed, classes):
    assert_enumerated(fixed, *random_rows(seed, classes))
    assert_enumerated(fixed, *random_rows(seed + 100, classes, dtype=torch.float32))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_positives_shown_one_by_one_equal_all_label_sets(seed, classes):
    rng = np.random.default_rng(seed)
    logits, labels = random_rows(seed, classes)
    assert_enumerated(independent, logits, labels, rng.uniform(0.01, 0.99), rtol=1e-10)
    assert_enumerated(independent, logits, labels, rng.uniform(0.01, 0.99, classes), rtol=1e-10)


def test_golden_values():
    logits, labels = torch.tensor(LOGITS), torch.tensor(OBSERVED)
    found = fixed(logits, labels)
    np.testing.assert_allclose(found.surprise, [0.640264, 0.722635], atol=1e-6)
    loss, gradient = gradient_of(fixed, logits, labels)
    assert loss.mean().item() == pytest.approx(0.170362, abs=1e-6)
    np.testing.assert_allclose(gradient[0] * 4, [-0.119203, 0.093325, 0.156173, 0.018472], atol=1e-6)
    np.testing.assert_allclose(found.posterior(logits), [[1, 0.175617, 0.466287, 0.028954],
                                                         [0.255447, 1, 0.074171, 0.354466]], atol=1e-6)
    both = torch.tensor([[POSITIVE, UNKNOWN, POSITIVE, UNKNOWN]], dtype=torch.int8)
    found = fixed(logits[:1], both)
    assert found.surprise.item() == pytest.approx(0.829832, abs=1e-6)
    np.testing.assert_allclose(found.posterior(logits[:1]), [[1, 0.110025, 1, 0.017201]], atol=1e-6)


@pytest.mark.parametrize("likelihood", [fixed, lambda *rows: independent(*rows, torch.tensor(0.3))])
@pytest.mark.parametrize("classes", [7, 700])
def test_rows_do_not_depend_on_their_batch(likelihood, classes):
    logits, labels = random_rows(1, classes, rows=300, dtype=torch.float32)
    together = likelihood(logits, labels)
    for row in (0, 1, 150, 299):
        alone = likelihood(logits[row : row + 1], labels[row : row + 1])
        torch.testing.assert_close(together.surprise[row : row + 1], alone.surprise, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together.residual[row : row + 1], alone.residual, rtol=1e-6, atol=1e-7)


def test_without_a_shown_positive_unknown_entries_say_nothing_if_the_number_is_fixed():
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    labels = torch.tensor([[UNKNOWN, NEGATIVE, UNKNOWN]], dtype=torch.int8)
    loss, gradient = gradient_of(fixed, logits, labels)
    torch.testing.assert_close(loss, F.softplus(torch.tensor([-2.0])) / 3)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, torch.sigmoid(torch.tensor(-2.0)) / 3, 0.0]]))
    assert (gradient_of(independent, logits, labels, torch.tensor(0.5))[1] > 0).all()  # but here they do


@pytest.mark.parametrize("likelihood", [fixed, lambda *rows: independent(*rows, torch.tensor(1 - 1e-7))])
def test_full_labels_are_binary_cross_entropy(likelihood):
    logits, labels = random_rows(5, 400, dtype=torch.float32)
    labels = torch.where(labels == UNKNOWN, NEGATIVE, labels)
    leaf = logits.clone().requires_grad_()
    expected = F.binary_cross_entropy_with_logits(leaf, labels.float(), reduction="none").mean(1)
    expected.sum().backward()
    loss, gradient = gradient_of(likelihood, logits, labels)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-9)


def test_bfloat16_logits_are_computed_in_float32():
    logits, labels = random_rows(3, 300, dtype=torch.bfloat16)
    loss, gradient = gradient_of(fixed, logits, labels)
    exact, slopes = gradient_of(fixed, logits.float(), labels)
    assert torch.equal(loss, exact)
    assert torch.equal(gradient, slopes.bfloat16())


@pytest.mark.parametrize("likelihood", [fixed, lambda *rows: independent(*rows, torch.tensor(0.3))])
@pytest.mark.parametrize("classes", [1, 4, 300])
@pytest.mark.parametrize("size", [30.0, 100.0, 1e4])
def test_extreme_logits_stay_finite(likelihood, classes, size):
    logits, labels = random_rows(2, classes, rows=40, dtype=torch.float32)
    logits = logits.sign() * size
    loss, gradient = gradient_of(likelihood, logits, labels)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient.abs() <= 1 / classes + 1e-6).all()
    wrong = (labels != UNKNOWN) & ((labels == POSITIVE) != (logits > 0))
    assert (loss >= wrong.sum(1) * size / classes * (1 - 1e-6)).all()  # every wrong known entry costs its logit


def test_an_empty_batch():
    found = fixed(torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.int8))
    assert found.surprise.shape == (0,)
    assert found.residual.shape == (0, 5)


class Recorded(TorchDispatchMode):
    """Names of all operations, and the most entries that one of them returned."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("likelihood", [fixed, lambda *rows: independent(*rows, torch.tensor(0.3))])
@pytest.mark.parametrize("classes", [80, 9600])
def test_no_result_outgrows_the_logits_and_the_host_waits_for_none(likelihood, classes):
    logits, labels = random_rows(4, classes, rows=64, dtype=torch.float32)
    with Recorded() as recorded:
        gradient_of(likelihood, logits, labels)
    assert recorded.largest <= max(64 * classes, 1 << 17)
    assert "sigmoid" in recorded.names
    assert not recorded.names & {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal",
                                 "_unique2", "repeat_interleave"}
