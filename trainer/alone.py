"""A world of one: forward, backward and step as a DeepSpeed engine without ZeRO does them, without what it does for
others. Its wrappers take as long as a whole step of a small model. The engine still writes and reads checkpoints."""

from __future__ import annotations

from lacuna.trainer.config.sections import Config
from lacuna.trainer.gradients import clip
from lacuna.trainer.world import World


class Alone:
    """Takes an engine's place in the loop; autocast is the caller's."""

    @staticmethod
    def suits(config: Config, world: World) -> bool:
        """Not with a DeepSpeed file of one's own: it may ask for anything."""
        return world.size == 1 and config.train.deepspeed == "zero0"

    def __init__(self, engine):
        self.module, self.optimizer = engine.module, engine.optimizer
        self.counts = vars(engine)  # an engine is a module, whose attributes cost far more to set
        self.pieces, self.most = engine.gradient_accumulation_steps(), engine.gradient_clipping()
        self.batch = engine.train_batch_size()
        self.learning = [p for p in self.module.parameters() if p.requires_grad]
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):  # not in older versions of DeepSpeed
            if hook := getattr(engine, name, None):
                hook.remove()  # it starts or stops timers that are off

    def __call__(self, *inputs, **options):
        return self.module(*inputs, **options)

    def backward(self, loss) -> None:
        (loss if self.pieces == 1 else loss / self.pieces).backward()

    def step(self) -> None:
        """At the last piece of a batch."""
        self.counts["micro_steps"] += 1
        if self.counts["micro_steps"] % self.pieces:
            return
        if self.most > 0:
            clip(self.learning, self.most)
        self.optimizer.step()
        for parameter in self.learning:
            parameter.grad = None
        self.counts["global_steps"] += 1
        self.counts["global_samples"] += self.batch
