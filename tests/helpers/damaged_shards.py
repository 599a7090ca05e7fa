"""Shards with a sample that cannot be decoded."""

from lacuna.data_pipelines.index import ShardIndex


def blank_out(index: ShardIndex, shard: int, row: int) -> None:
    """Zeros in the place of a member's bytes."""
    members = index.members(shard)
    with open(index.shard_url(shard), "r+b") as tar:
        tar.seek(int(members.offsets[row]))
        tar.write(bytes(int(members.sizes[row])))
