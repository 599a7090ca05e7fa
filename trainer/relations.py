"""Relations of the classes: a matrix [L, L] whose rows sum to 1, with the class list that it was made for.

    .npz   arrays `relation` and `classes`, as `lacuna relation` writes it: the names are checked
    .npy   the matrix alone, made elsewhere, in class order
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.trainer.class_arrays import read_class_array, write_class_array

_HINT = "`lacuna relation` makes one."


def write_relation(url: str, relation: np.ndarray, classes: Sequence[str], source: str) -> None:
    write_class_array(url, "relation", relation, classes, source)


def read_relation(url: str, classes: int, names: Sequence[str] = ()) -> torch.Tensor:
    """float32 [L, L]. `names`: the data's class list, compared with the file's where both are known."""
    where = f"method.relation = {url!r}"
    matrix, made_for = read_class_array(url, "relation", where, _HINT)
    if matrix.shape != (classes, classes):
        raise UserError(f"{where}: of shape {list(matrix.shape)}, the data needs {[classes, classes]}: a row and a "
                        "column for every class.")
    wrong = next((place for place, (a, b) in enumerate(zip(made_for, names, strict=False)) if a != b), None)
    if wrong is not None:
        raise UserError(f"{where}: made for another class list: its class {wrong} is {made_for[wrong]!r}, the data's "
                        f"is {names[wrong]!r}. Make it again for these shards with `lacuna relation`.")
    values = torch.from_numpy(matrix.astype(np.float32))
    if not ((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all()):
        raise UserError(f"{where}: rows must be at least 0 and sum to 1, as a softmax makes them. {_HINT}")
    return values
