"""Stateless randomness: every draw is a hash of what it belongs to, so it is the same after a resume, on any rank.

NumPy's generators may change their streams between versions; this mix (splitmix64's finaliser) cannot.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*parts: int) -> int:
    """One 64-bit hash of a tuple of integers; their order matters."""
    h = 0
    for part in parts:
        h = (h ^ (part & _MASK)) + _GOLDEN & _MASK
        h = (h ^ (h >> 30)) * _A & _MASK
        h = (h ^ (h >> 27)) * _B & _MASK
        h ^= h >> 31
    return h


def mix_array(seed: int, values: np.ndarray) -> np.ndarray:
    """uint64 hash of every value under a 64-bit seed: `mix_array(mix(a, b), [c])[0] == mix(a, b, c)`."""
    with np.errstate(over="ignore"):
        return mix64((values.astype(np.uint64) ^ np.uint64(seed & _MASK)) + np.uint64(_GOLDEN))


def mix64(values: np.ndarray) -> np.ndarray:
    """The finaliser alone: a bijection of uint64 in which every input bit reaches every output bit."""
    z = np.array(values, dtype=np.uint64, copy=True)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_A)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_B)
    z ^= z >> np.uint64(31)
    return z


def uniform_array(seed: int, values: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for every value."""
    return (mix_array(seed, values) >> np.uint64(11)).astype(np.float64) * 2.0**-53
