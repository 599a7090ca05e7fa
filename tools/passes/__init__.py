"""Passes of a model over all shards of a dataset, on Ray: one actor a worker, one part file a shard.

parts.py: the files and their fingerprint. pool.py: Ray. scoring.py: a run's model and its scores of one shard.
"""
