"""Where the package lies: in a clone `src/lacuna` (whose rooms are links to the top-level folders), or installed."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIGS = os.path.join(PACKAGE, "configs")
RUN_SCRIPT = os.path.join(PACKAGE, "trainer", "run.py")
START_SCRIPT = os.path.join(PACKAGE, "trainer", "start_ranks.py")
