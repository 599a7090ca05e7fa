"""What a run remembers about its samples, as numpy and as a pandas table: state_as_tables.py RUN."""

import sys

import lacuna

run = lacuna.open_run(sys.argv[1])
state = run.state()
print("snapshots:", state.snapshots)
field = next(iter(state.fields))
values = state.read(field, shard=0)  # numpy, one row per sample of the first shard
print(field, values.shape, values.dtype)
table = state.frame(field)  # one line per sample, named by its key
print(table.describe().T.head())
