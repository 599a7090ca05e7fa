"""Hugging Face `datasets`: Parquet files, images inside, which `load_dataset(DIR)` opens with their features."""

from __future__ import annotations

import io
import json
import posixpath
from collections.abc import Iterator

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.exchange.bundle import Bundle, Marks, read_about

DATA = "data"
_LISTS = ("positives", "negatives", "suggested")


def write(bundle: Bundle, out: str, source: ShardSource | None) -> None:
    """One file per shard; without a source (features, or no images wanted) there is no column of images."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = {name: i for i, name in enumerate(bundle.classes)}
    several = {"feature": {"names": bundle.classes, "_type": "ClassLabel"}, "_type": "Sequence"}
    features: dict = {"key": {"dtype": "string", "_type": "Value"}, **dict.fromkeys(_LISTS, several),
                      "scores": {"feature": {"dtype": "float64", "_type": "Value"}, "_type": "Sequence"}}
    lists = [(name, pa.list_(pa.int64())) for name in _LISTS]
    fields = [("key", pa.string()), *lists, ("scores", pa.list_(pa.float64()))]
    if source is not None:
        features = {"image": {"_type": "Image"}, **features}
        fields = [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), *fields]
    schema = pa.schema(fields).with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parts = list(_parts(bundle, source))
    for at, keys in enumerate(parts):
        rows = []
        pictures = _pictures(source, at) if source is not None and keys else {}
        for key in keys:
            marks = bundle.samples[key]
            names = bundle.ordered(marks.suggested)
            row = {"key": key, "positives": [number[name] for name in marks.positives],
                   "negatives": [number[name] for name in marks.negatives],
                   "suggested": [number[name] for name in names], "scores": [marks.suggested[name] for name in names]}
            rows.append({"image": {"bytes": pictures[key], "path": bundle.files[key]}, **row} if pictures else row)
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer)
        storage.write_atomic(storage.join(out, DATA, f"train-{at:05d}-of-{len(parts):05d}.parquet"), buffer.getvalue())


def _parts(bundle: Bundle, source: ShardSource | None) -> Iterator[list[str]]:
    if source is None:
        yield list(bundle.samples)
        return
    for shard in range(len(source.index.shards)):
        yield [key for key in source.index.members(shard).keys if key in bundle.samples]


def _pictures(source: ShardSource, shard: int) -> dict[str, bytes]:
    opened = source.open(shard)
    return {key: opened.read(row) for row, key in enumerate(opened.members.keys)}


def read(folder: str) -> Bundle:
    """Ours, or a data set of others with a list of classes in `positives` or `labels`, or one class in `label`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = storage.join(folder, DATA)
    files = sorted(name for name in storage.list_names(where) if name.endswith(".parquet"))
    if not files:
        raise UserError(f"{where}: no Parquet file. Give the folder of a data set, with data/*.parquet in it.")
    samples: dict[str, Marks] = {}
    classes: list[str] = []
    for file in files:
        try:
            parquet = pq.ParquetFile(io.BytesIO(storage.read_bytes(storage.join(where, file))))
            schema = parquet.schema_arrow
            classes = _classes(schema.metadata or {}, f"{where}/{file}")
            columns = [name for name in schema.names if name != "image"]
            keyed = "key" in columns
            rows = parquet.read(columns if keyed else None).to_pylist()
            for row in rows:
                key = row["key"] if keyed else posixpath.splitext(row["image"]["path"])[0]
                given = row.get("positives", row.get("labels"))
                positives = [row["label"]] if given is None else given
                scores = zip(row.get("suggested") or (), row.get("scores") or (), strict=True)
                samples[str(key)] = Marks([classes[i] for i in positives],
                                          [classes[i] for i in row.get("negatives") or ()],
                                          {classes[i]: float(score) for i, score in scores})
        except (pa.ArrowException, KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{where}/{file}: cannot be read as labels of images ({type(error).__name__}: {error})."
                            ) from None
    return Bundle(classes or read_about(folder).get("classes", []), samples)


def _classes(metadata: dict[bytes, bytes], where: str) -> list[str]:
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    for name in ("positives", "labels", "label"):
        found = features.get(name, {})
        names = found.get("names") or found.get("feature", {}).get("names")
        if names:
            return [str(one) for one in names]
    raise UserError(f"{where}: no column positives, labels or label with names of classes (ClassLabel).")
