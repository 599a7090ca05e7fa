"""Train from Python and draw the loss: train_and_plot.py SHARDS OUT.svg (no plotting library needed)."""

import sys

import lacuna

shards, out = sys.argv[1:3]
config = lacuna.load_config(
    "demo", "name=plotted", f"data.train.url={shards}", "data.train.labels=labels", "data.val=null", "data.test=null",
    "method.name=an", "phases.0.epochs=1", "phases.1.epochs=1", "train.log_every=1")
results = lacuna.train(config)
losses = [line["loss"] for line in lacuna.open_run(results.folder).metrics if line["kind"] == "train"]
points = " ".join(f"{10 + 380 * i / max(1, len(losses) - 1):.1f},{190 - 180 * loss / max(losses):.1f}"
                  for i, loss in enumerate(losses))
with open(out, "w", encoding="utf-8") as f:
    f.write('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200">'
            '<rect width="400" height="200" fill="white"/>'
            f'<polyline points="{points}" fill="none" stroke="#d2401f" stroke-width="2"/></svg>\n')
print(f"{len(losses)} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}, drawn in {out}")
