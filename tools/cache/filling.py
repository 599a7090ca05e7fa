"""Filling a cache ahead of training, on Ray: a shard at a time, by the stream that training fills it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import BadSample
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.tools.passes.parts import absolute, fingerprint_of
from lacuna.tools.passes.pool import Pool, PoolSettings, open_pool
from lacuna.tools.passes.scoring import Arrays, bad_of, pack_bad, shard_rows
from lacuna.trainer.assemble import load_sources, place_model, task_of
from lacuna.trainer.cache.cost import cost_problem
from lacuna.trainer.cache.phase_cache import Views, cut_of, fixed_part
from lacuna.trainer.cache.stream import CachedStream
from lacuna.trainer.cache.views import View, cache_url
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.evaluate import judge_bad
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Needs
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.models.parts import learning
from lacuna.trainer.models.weights import is_file
from lacuna.trainer.world import World

_BATCH = 64


@dataclass(frozen=True)
class FillJob:
    """Parts with `rows`, the number of samples, and `bad`; the numbers themselves go where training looks for them."""

    config: Config
    phase: int
    view: View
    needs: Needs

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(job="cache", url=self.view.url)

    def build(self) -> Callable[[int], Arrays]:
        torch.set_num_threads(1)
        world = World(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        model = place_model(self.config, load_sources(self.config)["train"], world).eval()
        model.cut = cut_of(model, self.config, self.phase, self.needs)
        found, wanted = fixed_part(model, self.config).weights, self.view.facts["weights"]
        if found != wanted:
            raise UserError(f"model.weights = {self.config.model.weights!r} are other ones on this node (hash "
                            f"{found[:12]} instead of {wanted[:12]}). Give all nodes the same file.")

        def work(shard: int) -> Arrays:
            counts = np.zeros_like(self.view.source.counts)
            counts[shard] = self.view.source.counts[shard]
            plan = EpochPlan(counts, 0, 0, 1, _BATCH, open_shards=1, shuffle=False)
            samples, bad = 0, list[BadSample]()
            with CachedStream(self.view, model, self.config, world, plan) as stream:
                for batch in stream:
                    samples, bad = samples + len(batch), bad + batch.bad
            return {"rows": np.array(samples), "bad": pack_bad(bad)}

        return work


def fill(config: Config, settings: PoolSettings) -> list[dict]:
    """What was filled, view by view."""
    config = _placed(config)
    if all(phase.cache is None for phase in config.phases):
        raise UserError("no phase has a cache. Give one, e.g. phases.0.cache={views: 0}, whose learning part lies at "
                        "the end (phases.0.trainable=head).")
    sources, world = load_sources(config), World(torch.device("cpu"))
    model = place_model(config, sources["train"], world)
    needs = build_method(config.method, task_of(config, sources, model)).needs()
    found: dict[str, dict] = {}
    with open_pool(settings) as pool:
        for number, phase in enumerate(config.phases):
            if phase.cache is None:
                continue
            model.cut = cut_of(model, config, number, needs)
            if earlier := _changed_before(model, config, number):
                print(f"phase {phase.name!r}: what it caches depends on what phase {earlier!r} learns; it is filled "
                      "while it trains", flush=True)
                continue
            views = Views(config, fixed_part(model, config), phase.cache, needs).all_of(sources, phase.epochs)
            if problem := cost_problem(config, number, views):
                raise UserError(problem)
            for view in views:
                if view.url not in found:
                    found[view.url] = _fill(pool, FillJob(config, number, view, needs), settings)
    return list(found.values())


def _fill(pool: Pool, job: FillJob, settings: PoolSettings) -> dict:
    view, rows = job.view, shard_rows(job.view.source)
    seen = "the view of evaluation" if view.facts["view"] is None else f"view {view.facts['view']}"
    folder = settings.parts or storage.join(view.url, "parts")
    parts = pool.run(job, rows, folder, f"{seen} of {view.source.index.url}")
    samples, bad = 0, list[BadSample]()
    for _, part in parts.read_all(list(rows)):
        samples, bad = samples + int(part["rows"]), bad + bad_of(part)
    judge_bad(bad, sum(rows.values()), job.config.data.max_bad_fraction, view.source.index.url)
    parts.remove(list(rows))  # the shards themselves say what is filled: a rerun looks there
    return {"address": view.url.rsplit("/", 1)[-1], "phase": job.config.phases[job.phase].name, "view": seen,
            "cut": view.facts["cut"], "data": view.source.index.url, "samples": samples, "bytes": view.bytes}


def _placed(config: Config) -> Config:
    """Workers run elsewhere: a local path must not depend on the current folder."""
    body = config.model_dump(mode="json")
    body["train"]["cache_url"] = absolute(cache_url(config))
    for split in ("train", "val", "test", "fully_labelled"):
        if body["data"][split]:
            body["data"][split]["url"] = absolute(body["data"][split]["url"])
    if is_file(config.model.weights):
        body["model"]["weights"] = absolute(config.model.weights)
    return parse_config(body, "the config")


def _changed_before(model: Classifier, config: Config, number: int) -> str | None:
    """The name of an earlier phase that teaches something that this one holds fixed."""
    assert model.cut is not None
    for phase in config.phases[:number]:
        if any(not model.cut.learns(name) for name in learning(model.names, phase.trainable)
               if name in dict(model.backbone.named_parameters())):
            return phase.name
    return None
