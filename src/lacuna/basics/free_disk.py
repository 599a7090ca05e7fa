"""How much room is left where something will be written."""

from __future__ import annotations

import os
import shutil

from lacuna.basics import storage


def free_disk(url: str) -> int | None:
    """Free bytes where a local folder is or will be; None on object storage."""
    if not storage.is_local(url):
        return None
    path = os.path.abspath(storage.local_path(url))
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free
