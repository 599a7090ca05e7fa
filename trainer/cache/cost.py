"""What a cache takes on storage, and whether it may."""

from __future__ import annotations

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.free_disk import free_disk
from lacuna.trainer.cache.views import View, cache_url
from lacuna.trainer.config.sections import Config
from lacuna.trainer.world import World


def check_cost(config: Config, number: int, views: list[View], world: World) -> None:
    """On every rank alike: rank 0 asks the storage."""
    if problem := world.broadcast(cost_problem(config, number, views) if world.main else None):
        raise UserError(problem)


def cost_problem(config: Config, number: int, views: list[View]) -> str | None:
    """Why the views of a phase do not fit, with the numbers; None: they do."""
    needed, there = sum(view.bytes for view in views), sum(map(bytes_there, views))
    url, budget, free = cache_url(config), config.train.cache_budget_gb, free_disk(cache_url(config))
    each = f"{views[0].row.itemsize / 1e3:.1f} kB per sample and view"
    text = (f"phases.{number}.cache: {len(views)} views (training, validation, test) take {needed / 1e9:.3f} GB, "
            f"{each}, of which {there / 1e9:.3f} GB are there;")
    advice = "Use fewer views or smaller images, or leave the cache out."
    if budget is not None and needed > budget * 1e9:
        return f"{text} train.cache_budget_gb allows {budget:g}. Raise it. Or: {advice}"
    if free is not None and needed - there > free:
        return (f"{text} {url} has {free / 1e9:.3f} GB free. Make room (`lacuna cache --prune`), or set "
                f"train.cache_url to other storage. Or: {advice}")
    return None


def bytes_there(view: View) -> int:
    """Of shards that have been filled, or begun."""
    return len(storage.list_names(storage.join(view.url, "shards"))) * view.schema.shard_bytes
