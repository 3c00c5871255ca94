"""Open the MLflow run to write to: join the user's run, or find or create memlog's own."""

from __future__ import annotations

import getpass
import os

from mlflow import MlflowClient
from mlflow.entities import Experiment, LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import read_mlflow_creds

from memlog.errors import RunRefusedError, TrackerRejectedError
from memlog.sink import Target
from memlog_mlflow.environment import context_tags
from memlog_mlflow.errors import error_code, unavailable
from memlog_mlflow.keys import safe_key

RUN_TAG = "memlog.run_id"
OWN_TAG = "memlog.own"
"""Tag of a run that memlog opened. A user's run that memlog joined does not have this tag. The value is
``"beside"`` if memlog opened the run in place of a user's run, otherwise ``"true"``."""
BESIDE_TAG = "memlog.beside"
"""Tag of a run that memlog opened in place of a user's run. Its value is the id of the user's run."""

_DEFAULT_EXPERIMENT = "0"
_NOT_FOUND = "RESOURCE_DOES_NOT_EXIST"
_EXISTS = frozenset({"RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"})


def join(client: MlflowClient, run_id: str, memlog_run: str) -> Run:
    """Tag the user's run with memlog's run id, and return the run. Raises the errors of `usable`."""
    run = usable(client, run_id)
    tag = safe_key(memlog_run)
    if run.data.tags.get(RUN_TAG) != tag:
        client.set_tag(run_id, RUN_TAG, tag, synchronous=True)
    return run


def usable(client: MlflowClient, run_id: str) -> Run:
    """Return a run that can be written to.

    Raises:
        RunRefusedError: the run is deleted, or does not exist.
        TrackerUnavailableError: the answer is not from an MLflow server.
        MlflowException: MLflow has a failure.
    """
    try:
        run = _real(client.get_run(run_id))
    except MlflowException as error:
        if error_code(error) != _NOT_FOUND:
            raise
        raise RunRefusedError(
            f"the MLflow run {run_id} does not exist: it is deleted permanently, or in another store"
        ) from None
    if run.info.lifecycle_stage == LifecycleStage.DELETED:
        raise RunRefusedError(f"the MLflow run {run_id} is deleted ({_restoring(client, run)})")
    return run


def _restoring(client: MlflowClient, run: Run) -> str:
    """Return the command that restores a deleted run.

    If the run's experiment is deleted, too, the command restores the experiment, and with it the run.
    """
    experiment_id = run.info.experiment_id
    try:
        stage = client.get_experiment(experiment_id).lifecycle_stage
    except MlflowException:
        stage = LifecycleStage.ACTIVE  # unknown: return the command that restores the run
    if stage == LifecycleStage.DELETED:
        return f"with its experiment: `mlflow experiments restore --experiment-id {experiment_id}`"
    return f"`mlflow runs restore --run-id {run.info.run_id}`"


def find_or_create(client: MlflowClient, target: Target) -> Run:
    """Return memlog's own run for ``target``.

    If an earlier helper created the run, but died before it saved the run's id, the run is found by its tags.

    Raises:
        RunRefusedError: an earlier process opened memlog's run, but the run is now deleted or does not exist.
        TrackerRejectedError: the experiment is deleted.
        TrackerUnavailableError: the answer is not from an MLflow server.
        MlflowException: MLflow has a failure, or does not know the experiment.
    """
    if target.opened is not None:
        return usable(client, target.opened.run_id)
    experiment_id = _experiment_id(client, target.project)
    tag = safe_key(target.own_id)
    whose = {OWN_TAG: "true"}
    if target.beside is not None:
        whose = {OWN_TAG: "beside", BESIDE_TAG: safe_key(target.beside.run_id)}
    runs = client.search_runs(
        [experiment_id],
        filter_string=" and ".join(
            f"tags.`{name}` = '{value}'" for name, value in {RUN_TAG: tag, **whose}.items()
        ),
        order_by=["attributes.start_time ASC"],
        max_results=1,
    )
    if runs:
        return _real(runs[0])
    tags = {**_usual_tags(), RUN_TAG: tag, **whose}
    begun_ms = None if target.begun_us is None else target.begun_us // 1000
    return _real(client.create_run(experiment_id, begun_ms, tags, run_name=target.name))


def _real(run: Run) -> Run:
    """Return the run; raise if the answer is not from an MLflow server.

    MLflow's client makes an empty run object from the answer of another kind of server. With this object, the
    client would write files to the working directory.
    """
    if not (run.info.run_id and run.info.artifact_uri):
        raise unavailable("another kind of server answers")
    return run


def _experiment_id(client: MlflowClient, project: str | None) -> str:
    """Return the id of the project's experiment.

    Without a project, return the id of the experiment that MLflow would choose. ``MLFLOW_EXPERIMENT_ID``
    is read first, because `mlflow.set_experiment` writes the user's choice there.
    """
    if project:
        return _named(client, project)
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name and not experiment_id:
        return _named(client, name)
    return _usable(client.get_experiment(experiment_id or _DEFAULT_EXPERIMENT))


def _named(client: MlflowClient, name: str) -> str:
    """Return the id of the experiment called ``name``; create it if there is none."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return _usable(experiment)
    try:
        return str(client.create_experiment(name))
    except MlflowException as error:
        if error_code(error) not in _EXISTS:
            raise
        # Another process, such as another rank, has created it meanwhile.
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return _usable(experiment)


def _usable(experiment: Experiment) -> str:
    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        raise TrackerRejectedError(
            f"the MLflow experiment {experiment.name!r} is deleted: restore it with `mlflow "
            f"experiments restore --experiment-id {experiment.experiment_id}`, or name another"
        )
    return str(experiment.experiment_id)


def _usual_tags() -> dict[str, str]:
    """Return the tags that MLflow's fluent API sets on a run: the user, and the script."""
    tags = {"mlflow.source.type": "LOCAL"}
    user = read_mlflow_creds().username or _system_user()
    if user:
        tags["mlflow.user"] = user
    return {**tags, **context_tags()}


def _system_user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        # A container's user id often has no name.
        return None
