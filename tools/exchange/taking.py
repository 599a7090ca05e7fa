"""From a bundle's names to a data set's entries: a sidecar, a table of suggestions, decisions; and the way there."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import UNLISTED_WORDS, ShardIndex, Sidecar, SidecarWriter, sidecar_names
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.exchange.bundle import Bundle
from lacuna.tools.explore.decisions import ACCEPT, REJECT, Action, Decisions, Entry
from lacuna.tools.report.beliefs import belief_field, state_view
from lacuna.tools.report.recorded_run import RecordedRun
from lacuna.tools.run_files import output_folder, while_written
from lacuna.tools.suggest.evidence import decisions_of
from lacuna.tools.suggest.table import check_format, write_sidecar, write_table


@dataclass(frozen=True)
class Taken:
    index: ShardIndex
    base: Sidecar | None
    labels: dict[Entry, int]
    suggested: dict[Entry, float]
    keys: dict[tuple[int, int], str]
    strangers: int  # samples of the files that the shards do not have

    def save_suggestions(self, url: str) -> None:
        check_format(url, "--suggestions")
        entries = sorted(self.suggested)
        ids = self.index.class_ids or [""] * len(self.index.classes)
        write_table(url, {"key": [self.keys[s, r] for s, r, _ in entries], "shard": [e[0] for e in entries],
                          "row": [e[1] for e in entries], "class": [e[2] for e in entries],
                          "class_id": [ids[e[2]] for e in entries],
                          "name": [self.index.classes[e[2]] for e in entries],
                          "score": [self.suggested[e] for e in entries]})

    def record(self, run: str, who: str) -> int:
        """What differs from the base, as decisions; how many."""
        if self.base is None:
            raise UserError("--decisions needs --base: what differs from it was decided.")
        home = os.path.join(output_folder(run), "explore")
        os.makedirs(home, exist_ok=True)
        made = Decisions(os.path.join(home, f"decisions-{self.base.name}.jsonl"), self.base)
        words = {POSITIVE: ACCEPT, NEGATIVE: REJECT}
        actions = [Action(words[value], entry, who) for shard in range(len(self.index.shards))
                   for entry, value in _changes(self.base, shard, self.labels)]
        made.act(actions)
        return len(actions)


def _changes(base: Sidecar, shard: int, labels: dict[Entry, int]) -> list[tuple[Entry, int]]:
    here = [(entry, value) for entry, value in labels.items() if entry[0] == shard]
    dense = base.labels(shard).dense(len(base.index.classes)) if here else np.zeros((0, 0))
    return [(entry, value) for entry, value in here if dense[entry[1], entry[2]] != value]


def take(bundle: Bundle, index: ShardIndex, name: str, base_name: str | None, where: str) -> Taken:
    """Makes the sidecar `name`."""
    places = {key: (shard, row) for shard in range(len(index.shards))
              for row, key in enumerate(index.members(shard).keys)}
    numbers = {**{word: i for i, word in enumerate(index.class_ids) if word},
               **{word: i for i, word in enumerate(index.classes)}}
    labels: dict[Entry, int] = {}
    suggested: dict[Entry, float] = {}
    found = 0
    for key, marks in bundle.samples.items():
        if key not in places:
            continue
        found += 1
        for names, value in ((marks.positives, POSITIVE), (marks.negatives, NEGATIVE)):
            for word in names:
                entry = (*places[key], _number(numbers, word, where, index))
                if labels.setdefault(entry, value) != value:
                    raise UserError(f"{where}: sample {key!r} has {word!r} as positive and as negative.")
        suggested |= {(*places[key], _number(numbers, word, where, index)): score
                      for word, score in marks.suggested.items()}
    if bundle.samples and not found:
        raise UserError(f"{where}: none of its {len(bundle.samples):,} samples is in {index.url}; the first is "
                        f"{next(iter(bundle.samples))!r}, the shards have {next(iter(places), '')!r}.")
    base = Sidecar.load(index, base_name) if base_name else None
    _write_labels(index, base, name, labels, UNLISTED_WORDS[bundle.unlisted], where)
    return Taken(index, base, labels, suggested, {place: key for key, place in places.items()},
                 len(bundle.samples) - found)


def _number(numbers: dict[str, int], word: str, where: str, index: ShardIndex) -> int:
    if word not in numbers:
        raise UserError(f"{where}: class {word!r} is not one of {index.url}: {', '.join(index.classes[:8])}, …")
    return numbers[word]


def _write_labels(index: ShardIndex, base: Sidecar | None, name: str, labels: dict[Entry, int], unlisted: int,
                  where: str) -> None:
    source = {"by": "lacuna exchange", "from": where}
    if base is not None:
        write_sidecar(base, name, labels, source)
        return
    if name in sidecar_names(index):
        raise UserError(f"--sidecar {name}: there is one already. Choose another name.")
    writer = SidecarWriter(index, name, unlisted, source)
    rows: list[list[tuple[list[int], list[int]]]] = [[([], []) for _ in range(s.count)] for s in index.shards]
    for (shard, row, cls), value in sorted(labels.items()):
        rows[shard][row][value != POSITIVE].append(cls)
    for shard, lists in enumerate(rows):
        writer.write(shard, SparseLabels.from_lists([p for p, _ in lists], [n for _, n in lists], unlisted))
    writer.close()


def read_suggestions(path: str, source: ShardSource) -> dict[Entry, float]:
    """Of a table with the columns shard, row, class and score, as `lacuna suggest` and `lacuna select` write them."""
    check_format(path, "--suggestions")
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet as pq

            rows = pq.read_table(path).to_pylist()
        else:
            with open(path, encoding="utf-8", newline="") as f:
                rows = list(csv.DictReader(f))
        found = {(int(r["shard"]), int(r["row"]), int(r["class"])): float(r["score"]) for r in rows}
    except FileNotFoundError:
        raise UserError(f"--suggestions {path}: no such file.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--suggestions {path}: no table of suggestions ({type(error).__name__}: {error}).") from None
    index = source.index
    for shard, row, cls in found:
        if not (0 <= shard < len(index.shards) and 0 <= row < index.shards[shard].count and 0 <= cls < source.classes):
            raise UserError(f"--suggestions {path}: shard {shard}, row {row}, class {cls} is not in {index.url}.")
    return found


def suggested_keys(suggested: dict[Entry, float], source: ShardSource) -> list[str]:
    """Of the samples that are suggested something, in the order of their first suggestion."""
    keys = {shard: source.index.members(shard).keys for shard in {entry[0] for entry in suggested}}
    return list(dict.fromkeys(keys[shard][row] for shard, row, _ in suggested))


def decided_of(run: str, source: ShardSource) -> dict[Entry, int]:
    return {entry: POSITIVE if right else NEGATIVE
            for entry, right in decisions_of(run, source.sidecar)[0].items()}


def beliefs_of(run: str, source: ShardSource, least: float) -> dict[Entry, float]:
    """Unknown entries that the newest snapshot of a run's state believes at least so much."""
    def look() -> dict[Entry, float]:
        store = RecordedRun.open(run).store
        field = belief_field(store)
        if store is None or field is None or not store.snapshots():
            raise UserError(f"--beliefs {run}: its method remembers no scores of all classes. Use `lacuna suggest` and "
                            "--suggestions.")
        view = state_view(store, store.snapshots()[-1].name, field, source)
        found: dict[Entry, float] = {}
        for shard in range(len(source.index.shards)):
            seen = view.shard(shard)
            if seen is not None:
                labels = source.sidecar.labels(shard).dense(source.classes, seen[1])
                for at, cls in np.argwhere((labels == UNKNOWN) & (seen[0] >= least)).tolist():
                    found[shard, int(seen[1][at]), cls] = float(seen[0][at, cls])
        return found

    return while_written(run, look)
