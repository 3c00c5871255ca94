"""Joins the user's run, or finds or opens one of memlog's own."""

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
"""``"true"`` on a run that memlog opened, ``"beside"`` on one that it opened in place of a run of the user's.
A joined run has `RUN_TAG` too, and must not be taken for memlog's own, which it ends."""
BESIDE_TAG = "memlog.beside"
"""On the latter: which run of the user's."""

_DEFAULT_EXPERIMENT = "0"
_GONE = "RESOURCE_DOES_NOT_EXIST"
_EXISTS = frozenset({"RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"})


def join(client: MlflowClient, run_id: str, memlog_run: str) -> str:
    """Marks the user's run with memlog's run id, and returns its own id.

    Raises:
        RunRefusedError: the run is deleted, or gone.
        TrackerUnavailableError: what answers is no MLflow server.
        MlflowException: MLflow is in trouble.
    """
    run = usable(client, run_id)
    tag = safe_key(memlog_run)
    if run.data.tags.get(RUN_TAG) != tag:
        client.set_tag(run_id, RUN_TAG, tag, synchronous=True)
    return run_id


def usable(client: MlflowClient, run_id: str) -> Run:
    """A run that can be written to.

    Raises:
        RunRefusedError: it is deleted, or gone.
        TrackerUnavailableError: what answers is no MLflow server.
        MlflowException: MLflow is in trouble.
    """
    try:
        run = _real(client.get_run(run_id))
    except MlflowException as error:
        if error_code(error) != _GONE:
            raise
        raise RunRefusedError(
            f"the MLflow run {run_id} is not found, deleted for good or in another store"
        ) from None
    if run.info.lifecycle_stage == LifecycleStage.DELETED:
        raise RunRefusedError(f"the MLflow run {run_id} is deleted ({_restoring(client, run)})")
    return run


def _restoring(client: MlflowClient, run: Run) -> str:
    """The command that brings a deleted run back: its experiment may have been deleted with it."""
    experiment_id = run.info.experiment_id
    try:
        stage = client.get_experiment(experiment_id).lifecycle_stage
    except MlflowException:
        stage = LifecycleStage.ACTIVE  # not to be told from here: the run is what was asked for
    if stage == LifecycleStage.DELETED:
        return f"with its experiment: `mlflow experiments restore --experiment-id {experiment_id}`"
    return f"`mlflow runs restore --run-id {run.info.run_id}`"


def find_or_create(client: MlflowClient, target: Target) -> str:
    """The id of memlog's own run for ``target``.

    A helper that died before it could note down what it had opened left a tag by which the run is
    found.

    Raises:
        RunRefusedError: the run that was opened before is deleted, or gone.
        TrackerRejectedError: the experiment is deleted.
        TrackerUnavailableError: what answers is no MLflow server.
        MlflowException: MLflow is in trouble or does not know the experiment that was asked for.
    """
    if target.opened is not None:
        return str(usable(client, target.opened.run_id).info.run_id)
    experiment_id = _experiment_id(client, target.project)
    tag = safe_key(target.memlog_run)
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
        return str(_real(runs[0]).info.run_id)
    tags = {**_usual_tags(), RUN_TAG: tag, **whose}
    begun_ms = None if target.begun_us is None else target.begun_us // 1000
    created = _real(client.create_run(experiment_id, begun_ms, tags, run_name=target.name))
    return str(created.info.run_id)


def _real(run: Run) -> Run:
    """The run, where it is one.

    Something else that answers in a server's place passes for a run without anything; without a place for
    files MLflow's client would put them into the working directory.

    Raises:
        TrackerUnavailableError: it is none.
    """
    if not (run.info.run_id and run.info.artifact_uri):
        raise unavailable("what answers there is no MLflow server")
    return run


def _experiment_id(client: MlflowClient, project: str | None) -> str:
    """The experiment that was asked for, or the one that MLflow would choose.

    `mlflow.set_experiment` outranks the variables and leaves its choice in
    ``MLFLOW_EXPERIMENT_ID``, so that one is asked first.
    """
    if project:
        return _named(client, project)
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name and not experiment_id:
        return _named(client, name)
    return _usable(client.get_experiment(experiment_id or _DEFAULT_EXPERIMENT))


def _named(client: MlflowClient, name: str) -> str:
    """The experiment called ``name``, created if there is none."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return _usable(experiment)
    try:
        return str(client.create_experiment(name))
    except MlflowException as error:
        if error_code(error) not in _EXISTS:
            raise
        # Somebody else, such as another rank, has created it in the meantime.
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
    """What MLflow's fluent API puts on a run: who, and from which script."""
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
