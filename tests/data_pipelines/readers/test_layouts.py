"""Proves that datasets are read as people really have them: other folders, other line ends, gone and twin files."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import coco, cub, features, folder, imagenet, lvis, nuswide, openimages, tsv, voc
from tests.helpers.annotations import CATEGORIES, VAL, WNIDS, box
from tests.helpers.pictures import write_pictures

HOST = "http://images.example"
V05 = [{"id": 9, "file_name": "COCO_val2014_000000000009.jpg", "coco_url": f"{HOST}/val2017/000000000009.jpg"},
       {"id": 10, "file_name": "COCO_train2014_000000000010.jpg", "coco_url": f"{HOST}/train2017/000000000010.jpg"}]
V1 = [{key: value for key, value in image.items() if key != "file_name"} for image in V05]
LAYOUTS = {
    "2017 folders": ["val2017/000000000009.jpg", "train2017/000000000010.jpg"],
    "2014 folders": ["val2014/COCO_val2014_000000000009.jpg", "train2014/COCO_train2014_000000000010.jpg"],
    "all 2017 pictures in one": ["000000000009.jpg", "000000000010.jpg"],
    "all 2014 pictures in one": ["COCO_val2014_000000000009.jpg", "COCO_train2014_000000000010.jpg"],
}
KEYS = {"v0.5": ["COCO_val2014_000000000009", "COCO_train2014_000000000010"],
        "v1": ["val2017/000000000009", "train2017/000000000010"]}


def lvis_file(folder, images):
    body = {"images": [{**image, "neg_category_ids": [90]} for image in images], "categories": CATEGORIES,
            "annotations": [box(9, 1), box(10, 3)]}
    (folder / "lvis.json").write_text(json.dumps(body))
    return str(folder / "lvis.json")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", ["v0.5", "v1"])
def test_lvis_in_every_release_of_coco(tmp_path, version, layout):
    write_pictures(tmp_path / "coco", LAYOUTS[layout])
    dataset = lvis.read(lvis_file(tmp_path, V05 if version == "v0.5" else V1), str(tmp_path / "coco"))
    assert [s.source for s in dataset.samples] == [f"{tmp_path}/coco/{name}" for name in LAYOUTS[layout]]
    assert [s.key for s in dataset.samples] == KEYS[version], "the key does not depend on the place"
    assert dataset.labels.dense(3).tolist() == [[POSITIVE, UNKNOWN, NEGATIVE], [UNKNOWN, POSITIVE, NEGATIVE]]


def test_lvis_with_one_of_the_folders_only(tmp_path):
    write_pictures(tmp_path / "coco", LAYOUTS["2017 folders"][:1])
    path = lvis_file(tmp_path, V05)
    with pytest.raises(UserError, match=r"1 of 2 image files do not exist.*train2014 and val2014.*--skip-missing"):
        lvis.read(path, str(tmp_path / "coco"))
    assert [s.key for s in lvis.read(path, str(tmp_path / "coco"), skip_missing=True).samples] == KEYS["v0.5"][:1]


def test_voc_difficult(voc_root):
    """dog_train has 2008_000005 as difficult; nothing else is in that image."""
    def labels(**options):
        dataset = voc.read(str(voc_root), **options)
        return {s.key[-1]: dataset.labels.dense(2)[r].tolist() for r, s in enumerate(dataset.samples)}, dataset

    rest = {"2": [POSITIVE, POSITIVE], "9": [POSITIVE, NEGATIVE]}
    found, dataset = labels()
    assert found == rest == labels(difficult="negative")[0]
    assert dataset.skipped == ["2008_000005.jpg\tno positive (kept with --all-images)"]
    assert dataset.source["images_without_positive"] == 1
    assert labels(difficult="positive")[0] == {**rest, "5": [NEGATIVE, POSITIVE]}
    assert labels(difficult="unknown")[0] == rest
    found, dataset = labels(difficult="unknown", all_images=True)
    assert found == {**rest, "5": [NEGATIVE, UNKNOWN]}
    assert dataset.skipped == []


def test_coco_counts_images_without_annotation(tmp_path):
    images = [{"id": i, "file_name": f"{i}.jpg"} for i in (1, 2, 3)]
    body = {"images": images, "annotations": [box(2, 3)], "categories": CATEGORIES}
    (tmp_path / "a.json").write_text(json.dumps(body))
    write_pictures(tmp_path, ["1.jpg", "2.jpg", "3.jpg"])
    dataset = coco.read_instances(str(tmp_path / "a.json"), str(tmp_path))
    assert dataset.skipped == [f"{i}.jpg\tno annotation (kept with --all-images)" for i in (1, 3)]
    assert dataset.source["images_without_annotation"] == 2
    kept = coco.read_instances(str(tmp_path / "a.json"), str(tmp_path), all_images=True)
    assert (len(kept.samples), kept.skipped) == (3, [])


@pytest.mark.parametrize("listed", [True, False])
def test_real_labels_of_a_flat_folder_need_no_ground_truth(tmp_path, listed):
    write_pictures(tmp_path / "val", [f"{name}.JPEG" for name in VAL])
    (tmp_path / "real.json").write_text(json.dumps([[2], [], [0, 1], [1]]))
    (tmp_path / "synsets.txt").write_text("".join(f"{wnid} a name\n" for wnid in WNIDS))
    dataset = imagenet.read(str(tmp_path / "val"), "val", real=str(tmp_path / "real.json"),
                            synsets=str(tmp_path / "synsets.txt") if listed else None)
    assert [dataset.labels.positives(r).tolist() for r in range(3)] == [[2], [0, 1], [1]]
    assert [s.key for s in dataset.samples] == [VAL[0], VAL[2], VAL[3]]
    if listed:
        assert dataset.class_ids == WNIDS
    else:
        assert (len(dataset.class_ids), dataset.class_ids[0], dataset.class_ids[-1]) == (1000, "n01440764", "n15075141")
        assert dataset.classes == dataset.class_ids == sorted(dataset.class_ids), "as in shards of WNID folders"


def test_twins_get_their_endings_into_their_keys(tmp_path):
    names = ["cat/photo.jpg", "cat/photo.png", "cat/photo.jpeg", "cat/other.jpg", "cat/photo_png.jpg", "cat/a.b.jpg",
             "cat/a_b.jpg"]
    write_pictures(tmp_path / "in", names)
    index = pack(folder.read(str(tmp_path / "in")), str(tmp_path / "out"), Layout(streams=1, shuffle=False))
    assert index.members(0).keys == ["cat/a_b_jpg", "cat/a_b_jpg_2", "cat/other", "cat/photo_jpeg", "cat/photo_jpg",
                                     "cat/photo_png_2", "cat/photo_png"]
    assert index.source["keys_made_distinct"] == 5
    sizes = [os.path.getsize(tmp_path / "in" / name) for name in sorted(names)]
    assert index.members(0).sizes.tolist() == sizes, "every key has its own file's bytes"


def test_one_file_listed_twice_stays_an_error(tmp_path):
    write_pictures(tmp_path, ["a.jpg"])
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    (tmp_path / "table.tsv").write_text("a.jpg\tcat\n./a.jpg\tdog\n")
    dataset = tsv.read(str(tmp_path / "table.tsv"), str(tmp_path / "classes.txt"), str(tmp_path))
    with pytest.raises(UserError, match="1 keys occur more than once, first 'a'"):
        pack(dataset, str(tmp_path / "out"), Layout())


def test_dangling_links(tmp_path):
    write_pictures(tmp_path / "in", ["n01440764/a.jpg"])
    os.symlink(tmp_path / "in/n01440764/a.jpg", tmp_path / "in/n01440764/good.jpg")
    os.symlink(tmp_path / "gone.jpg", tmp_path / "in/n01440764/bad.jpg")
    for reader in (folder, imagenet):
        with pytest.raises(UserError, match=r"1 of 3 image files do not exist.*bad\.jpg.*--skip-missing"):
            reader.read(str(tmp_path / "in"))
        dataset = reader.read(str(tmp_path / "in"), skip_missing=True)
        assert [s.key for s in dataset.samples] == ["n01440764/a", "n01440764/good"]
        assert dataset.skipped == [f"{tmp_path}/in/n01440764/bad.jpg\tno such file"]


def _openimages(root):
    write_pictures(root / "img", ["000000000000000a.jpg"])
    (root / "labels.csv").write_text("ImageID,Source,LabelName,Confidence\n000000000000000a,verification,/m/1,1\n"
                                     "000000000000000a,verification,/m/2,0\n")
    (root / "names.csv").write_text("LabelName,DisplayName\n/m/1,Cat\n/m/2,Ox\n")
    (root / "list.txt").write_text("/m/2\n/m/1\n")
    return lambda: openimages.read([str(root / "labels.csv")], str(root / "names.csv"), [str(root / "img")],
                                   class_list=str(root / "list.txt"))


def _imagenet(root):
    write_pictures(root / "img", [f"{name}.JPEG" for name in VAL])
    (root / "truth.txt").write_text("".join(f"{name}.JPEG {WNIDS[n % 3]}\n" for n, name in enumerate(VAL)))
    (root / "synsets.txt").write_text("".join(f"{wnid} crane, a bird\n" for wnid in WNIDS))
    return lambda: imagenet.read(str(root / "img"), "val", str(root / "truth.txt"), synsets=str(root / "synsets.txt"))


def _tables(root):
    write_pictures(root / "img", ["a.jpg", "b.jpg"])
    (root / "classes.txt").write_text("/m/1\tcat\n/m/2\tbig dog\n")
    (root / "t.tsv").write_text("path\tpositive\tnegative\na.jpg\tcat\tbig dog\nb.jpg\tbig dog\n")
    return lambda: tsv.read(str(root / "t.tsv"), str(root / "classes.txt"), str(root / "img"))


def _features(root):
    import numpy as np

    np.save(root / "f.npy", np.zeros((2, 3), np.float32))
    (root / "classes.txt").write_text("cat\nbig dog\n")
    (root / "t.tsv").write_text("a\tcat\tbig dog\nb\tbig dog\n")
    return lambda: features.read(str(root / "f.npy"), str(root / "t.tsv"), str(root / "classes.txt"))


def _annotations(root):
    write_pictures(root / "val2017", ["000000000009.jpg"])
    body = {"images": [{**V1[0], "file_name": "val2017/000000000009.jpg", "neg_category_ids": [90]}],
            "annotations": [box(9, 3)], "categories": CATEGORIES}
    (root / "a.json").write_text(json.dumps(body, indent=1))
    return lambda: (coco.read_instances(str(root / "a.json"), str(root)), lvis.read(str(root / "a.json"), str(root)))


MAKERS = {"openimages": _openimages, "imagenet": _imagenet, "tsv": _tables, "features": _features,
          "json": _annotations}


@pytest.mark.parametrize("name", [*MAKERS, "voc", "nuswide", "cub"])
def test_line_ends_of_windows_change_nothing(tmp_path, name, request):
    if name in MAKERS:
        root = tmp_path
        read = MAKERS[name](tmp_path)
    else:
        root = request.getfixturevalue({"nuswide": "nus_root"}.get(name, f"{name}_root"))
        read = {"voc": lambda: voc.read(str(root), all_images=True),
                "nuswide": lambda: nuswide.read(str(root), str(root / "Flickr")),
                "cub": lambda: cub.read(str(root))}[name]
    texts = [p for top in (root, root.parent / "attributes.txt") for p in ([top] if top.is_file() else top.rglob("*"))
             if p.suffix in (".txt", ".csv", ".tsv", ".json")]
    assert texts
    seen = []
    for end in (b"\n", b"\r\n"):
        for path in texts:
            path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", end))
        found = read()
        seen.append([_content(d) for d in (found if isinstance(found, tuple) else (found,))])
    assert seen[0] == seen[1]
    assert seen[0][0][1], "there are samples"
    shutil.rmtree(root)


def _content(dataset):
    return (dataset.classes, [(s.key, str(s.source), s.extension) for s in dataset.samples], dataset.class_ids,
            dataset.labels.dense(len(dataset.classes)).tolist(), dataset.skipped)
