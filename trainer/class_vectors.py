"""One vector per class, such as a language model's embeddings of the class names.

    .npz   arrays `embeddings` [L, D] and `classes`, as `lacuna scores` writes it: rows are matched by name
    .npy   the vectors alone, in class order
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.trainer.class_arrays import read_class_array, write_class_array


def write_class_vectors(url: str, vectors: np.ndarray, classes: Sequence[str], source: str) -> None:
    write_class_array(url, "embeddings", vectors, classes, source)


def read_class_vectors(url: str, classes: Sequence[str], flag: str) -> np.ndarray:
    """float32 [L, D] in the order of `classes`; `flag` names what the URL was given to, for messages."""
    where = f"{flag} {url}"
    vectors, names = read_class_array(url, "embeddings", where, "`lacuna scores` writes one.")
    names = names or list(classes)
    if vectors.ndim != 2 or len(vectors) != len(names):
        raise UserError(f"{where}: {vectors.dtype} of shape {list(vectors.shape)}, expected numbers "
                        f"[{len(names)}, any width]: one row for every class.")
    place = {name: row for row, name in enumerate(names)}
    lacking = [name for name in classes if name not in place]
    if lacking:
        raise UserError(f"{where}: no vector for class {lacking[0]!r} and {len(lacking) - 1} others of the data; it is "
                        f"about {names[:3]} …. Make it for these classes.")
    chosen = vectors[[place[name] for name in classes]].astype(np.float32)
    if not np.isfinite(chosen).all():
        raise UserError(f"{where}: holds numbers that are not finite. Make it again.")
    return chosen
