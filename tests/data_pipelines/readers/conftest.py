"""Small copies of published datasets, laid out as their archives are."""

from __future__ import annotations

import pytest

from tests.helpers.pictures import write_pictures


@pytest.fixture
def voc_root(tmp_path):
    main = tmp_path / "ImageSets/Main"
    main.mkdir(parents=True)
    (main / "dog_train.txt").write_text("2008_000009 -1\n2008_000002  1\n2008_000005  0\n")
    (main / "cat_train.txt").write_text("2008_000009  1\n2008_000002  1\n2008_000005 -1\n")
    (main / "cat_trainval.txt").write_text("2008_000009  1\n")
    (main / "train.txt").write_text("2008_000009\n2008_000002\n2008_000005\n")
    write_pictures(tmp_path / "JPEGImages", [f"2008_00000{i}.jpg" for i in (9, 2, 5)])
    return tmp_path


@pytest.fixture
def nus_root(tmp_path):
    for name, text in {
        "ImageList/TrainImagelist.txt": "actor\\0001_2.jpg\r\nzoo\\0002_1.jpg\r\nactor\\0003_9.jpg\r\n",
        "Groundtruth/TrainTestLabels/Labels_sky_Train.txt": "1\n0\n0\n",
        "Groundtruth/TrainTestLabels/Labels_airport_Train.txt": "1\n1\n0\n",
        "Groundtruth/TrainTestLabels/Labels_airport_Test.txt": "1\n",
        "ConceptsList/Concepts81.txt": "airport\nsky\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_pictures(tmp_path / "Flickr", ["actor/0001_2.jpg", "zoo/0002_1.jpg", "actor/0003_9.jpg"])
    return tmp_path


@pytest.fixture
def cub_root(tmp_path):
    root = tmp_path / "CUB_200_2011"
    names = ["001.Black_footed/B_0046_18.jpg", "001.Black_footed/B_0009_34.jpg", "002.Laysan/L_0003.jpg"]
    write_pictures(root / "images", names)
    (root / "images.txt").write_text("".join(f"{i} {name}\n" for i, name in enumerate(names, 1)))
    (root / "train_test_split.txt").write_text("1 1\n2 0\n3 1\n")
    (root / "attributes").mkdir()
    (tmp_path / "attributes.txt").write_text("1 has_bill_shape::curved_(up_or_down)\n2 has_size::small\n")
    (root / "attributes/image_attribute_labels.txt").write_text(
        "1 1 0 3 27.7080\n1 2 1 1 27.7080\n2 1 1 4 1.0\n2 2 1 4 1.0\n3 1 1 2 0 9.5\n3 2 1 3 6.0\n")
    return root
