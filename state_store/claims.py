"""Claims: which shards each rank of a launch works on, so that two ranks cannot lease one shard.

One small object a rank, rewritten once an epoch: no lock and no request per shard. A rank writes its claim before it
reads the others', so of two that overlap at least one sees it. Claims of older launches mean nothing.
"""

from __future__ import annotations

import json
import uuid

from lacuna.basics import storage
from lacuna.basics.errors import UserError


class Claim:
    def __init__(self, store: str, launch: int, rank: int, world: int):
        self.folder, self.launch, self.rank, self.world = storage.join(store, "claims"), launch, rank, world
        self.id, self.shards = uuid.uuid4().hex, frozenset[int]()
        if not storage.create_exclusive(self._url(rank), self._body(self.shards)):
            raise UserError(f"rank {rank} of launch {launch} already has a session on {store}. Close it first; a new "
                            "launch calls begin_launch().")

    def announce(self, shards: frozenset[int]) -> None:
        """Replace this rank's claim; refused if another rank claims one of the shards."""
        if self.world > 1 and shards != self.shards:
            storage.write_atomic(self._url(self.rank), self._body(shards), durable=False)
            for other in range(self.world):
                both = sorted(shards & self._shards_of(other)) if other != self.rank else []
                if both:
                    storage.write_atomic(self._url(self.rank), self._body(self.shards), durable=False)
                    raise UserError(f"shard {both[0]} is held by rank {other} of this launch; rank {self.rank} may not "
                                    "lease it. Every shard has one owner in an epoch; ranks finish() and exchange "
                                    "deltas before the next one.")
        self.shards = shards

    def close(self) -> None:
        storage.remove([self._url(self.rank)])

    def _shards_of(self, rank: int) -> frozenset[int]:
        try:
            return frozenset(json.loads(storage.read_bytes(self._url(rank)))["shards"])
        except FileNotFoundError:
            return frozenset()

    def _body(self, shards: frozenset[int]) -> bytes:
        return json.dumps({"id": self.id, "shards": sorted(shards)}).encode()

    def _url(self, rank: int) -> str:
        return storage.join(self.folder, f"{self.launch}-{rank}.json")
