"""JSON from files that may be damaged or hostile: every way it can be wrong is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(data: bytes | str) -> Any:
    """Like json.loads; a document nested so deeply that it would exhaust the stack is a ValueError too."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
