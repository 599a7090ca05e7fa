"""mAP of your own scores: any model, any number of classes, labels that may be unknown (-1)."""

import numpy as np

import lacuna

draws = np.random.default_rng(0)
labels = (draws.random((500, 8)) < 0.2).astype(np.int8)
scores = labels + draws.normal(size=labels.shape)  # put yours here: float [images, classes]
labels[draws.random(labels.shape) < 0.3] = -1  # what nobody knows is left out

result = lacuna.average_precision(scores, labels)
print("AP of every class:", np.round(result.ap, 3))
print("mAP:", round(result.summary()["map"], 2))
