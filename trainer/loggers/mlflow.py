"""MLflow. Its own environment variables say where to: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, …

MLflow keeps every value that it is sent, also a second one of a step: after a resume it is asked once per metric how
far it has come.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from lacuna.basics.errors import UserError
from lacuna.trainer.config.sections import Config, flat
from lacuna.trainer.loggers.sender import Sender

if TYPE_CHECKING:
    from mlflow.entities import Metric  # an extra: imported where it is used

_BATCH = 100  # parameters that the service takes at once
_LONGEST = 500  # characters of a parameter, for servers of any version


def new_identity(config: Config) -> str:
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lacuna")
    try:
        client = MlflowClient()
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(number, run_name=config.name).info.run_id
        settings = [Param(key, str(value)[:_LONGEST]) for key, value in flat(config.model_dump(mode="json")).items()]
        for start in range(0, len(settings), _BATCH):
            client.log_batch(run, params=settings[start : start + _BATCH])
    except MlflowException as error:
        raise _refused("does not begin a run", error) from None
    return run


class MLflow:
    catches_up = True

    def __init__(self, identity: str):
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient()
        self.identity = identity
        try:
            self.client.update_run(identity, status="RUNNING")
        except MlflowException as error:
            raise _refused(f"has no run {identity}, which loggers.json in the run folder names", error) from None
        self.reached: dict[str, int] = {}  # metric → last step that the service has
        self.sender = Sender("MLflow")

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        lines = [Metric(f"{kind}/{key}", float(value), now, step) for key, value in values.items()]
        self.sender.put(lambda: self._send(lines))

    def _send(self, lines: list[Metric]) -> None:
        for key in {line.key for line in lines} - self.reached.keys():
            history = self.client.get_metric_history(self.identity, key)
            self.reached[key] = max((metric.step for metric in history), default=-1)
        new = [line for line in lines if line.step > self.reached[line.key]]
        if new:
            self.client.log_batch(self.identity, metrics=new)
            self.reached |= {line.key: line.step for line in new}

    def flush(self) -> None:
        pass  # the sender does not wait

    def close(self, whole: bool) -> None:
        self.sender.put(lambda: self.client.set_terminated(self.identity, "FINISHED" if whole else "FAILED"))
        self.sender.close()


def _refused(what: str, error: Exception) -> UserError:
    return UserError(f"train.loggers: MLflow {what} ({' '.join(str(error).split())[:300]}). Check MLFLOW_TRACKING_URI "
                     f"({os.environ.get('MLFLOW_TRACKING_URI') or 'not set'}), or leave 'mlflow' out.")
