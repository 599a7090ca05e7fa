"""Out-of-core per-sample state: fields stored by (shard, row), leased with the data, committed as snapshots."""

from lacuna.state_store.fields import Constant, Draw, Field, Given
from lacuna.state_store.manifest import Delta
from lacuna.state_store.session import Session
from lacuna.state_store.store import StateStore, create, open, prepare

__all__ = ["Constant", "Delta", "Draw", "Field", "Given", "Session", "StateStore", "create", "open", "prepare"]
