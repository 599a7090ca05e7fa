"""Several people at one list: what one of them was just shown is kept from the others for a while."""

from __future__ import annotations

import threading
import time

from lacuna.tools.explore.decisions import Decisions, Entry

MINUTES = 5.0  # after which an entry that was shown and not decided may be shown to somebody else
_MOST = 200_000
now = time.monotonic


class Sharing:
    def __init__(self, decisions: Decisions):
        self.decisions = decisions
        self._shown: dict[Entry, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def take(self, entry: Entry, who: str) -> bool:
        """Whether the person may have the entry; then it is theirs for some minutes. Without a name everything is."""
        votes = self.decisions.votes.get(entry, {})
        if not who or who in votes:
            return True
        if votes:
            return False  # somebody has decided it: the view "second looks" shows it
        moment = now()
        with self._lock:
            owner, until = self._shown.get(entry, (who, 0.0))
            if owner != who and until > moment:
                return False
            if len(self._shown) >= _MOST:
                self._shown = {e: held for e, held in self._shown.items() if held[1] > moment}
            self._shown[entry] = (who, moment + 60 * MINUTES)
        return True
