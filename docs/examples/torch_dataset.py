"""A torch Dataset over shards, with labels: torch_dataset.py SHARDS [SIDECAR]."""

import sys

from torch.utils.data import DataLoader

import lacuna

url, sidecar = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "labels"
data = lacuna.dataset(url, labels=sidecar, shuffle=500)
loader = DataLoader(data.to_tuple("image", "labels", "__key__"), batch_size=32)
images, labels, keys = next(iter(loader))
print(images.shape, images.dtype, "labels", labels.shape, "first", keys[0])
print("known entries per image:", float((labels >= 0).sum(1).float().mean()))
