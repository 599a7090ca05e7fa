"""Files with a row per class: an .npz that carries the class names, or a bare .npy in class order."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.npy_header import alone


def write_class_array(url: str, name: str, values: np.ndarray, classes: Sequence[str], source: str) -> None:
    buffer = io.BytesIO()
    arrays = {name: values.astype(np.float32), "classes": np.array(classes), "source": np.array(source)}
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    storage.write_atomic(url, buffer.getvalue())


def read_class_array(url: str, name: str, where: str, hint: str) -> tuple[np.ndarray, list[str]]:
    """(numbers, class names; none of a bare .npy). `where` begins the messages, `hint` ends them."""
    try:
        data = storage.read_bytes(url)
        found = alone(lambda: np.load(io.BytesIO(data), allow_pickle=False))
        if isinstance(found, np.lib.npyio.NpzFile):
            arrays = alone(lambda: {key: found[key] for key in (name, "classes")})
            values, names = arrays[name], arrays["classes"].astype(str).tolist()
        else:
            values, names = found, []
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({(error.strerror or str(error)).lower()}). {hint}") from None
    except (ValueError, EOFError, SyntaxError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{where}: no .npy file of numbers, nor an .npz file with `{name}` and `classes` ({error}). "
                        f"{hint}") from None
    if values.dtype.kind not in "fiu":
        raise UserError(f"{where}: no .npy file of numbers, but of {values.dtype}. {hint}")
    return values, names
