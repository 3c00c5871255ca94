"""MLflow as teams run it, on PostgreSQL with an S3-compatible store: one part after the other goes away."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mlflow_server import MlflowServer, running_mlflow_server
from support.outages import (
    NOTES,
    OWN_RUN,
    assert_mlflow_has_everything_once,
    newest_run,
    stop,
    training,
    wait_for_state,
    wait_until_it_goes_on,
    wait_until_unreachable,
)
from support.postgres import Postgres
from support.s3_server import BUCKET, S3Server
from support.truth import plan_of

from memlog.journal.delivery_state import UploadState

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore"),
]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as running:
        yield running


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, s3: S3Server
) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("server")
    store = f"s3://{BUCKET}/proxied"
    with running_mlflow_server(folder, postgres.url, store, s3.environment) as running:
        yield running


def test_each_part_ends_in_mid_run_and_nothing_is_lost(
    tmp_path: Path, server: MlflowServer, postgres: Postgres, s3: S3Server
) -> None:
    """The parts are the server, the database, and the store to which clients write directly."""
    from mlflow import MlflowClient

    MlflowClient(server.url).create_experiment("direct", f"s3://{BUCKET}/direct")
    environment = {
        **s3.environment,
        "MLFLOW_TRACKING_URI": server.url,
        "MLFLOW_EXPERIMENT_NAME": "direct",
    }
    with training(OWN_RUN, tmp_path, "mlflow", **environment) as process:
        wait_until_it_goes_on(tmp_path, "mlflow")
        server.kill()
        wait_until_unreachable(tmp_path, "mlflow", "refused")
        server.start()
        wait_until_it_goes_on(tmp_path, "mlflow")
        postgres.stop()
        wait_until_unreachable(tmp_path, "mlflow", "")
        postgres.start()
        wait_until_it_goes_on(tmp_path, "mlflow")
        s3.stop()
        stop(process, tmp_path)
    points = len(plan_of(newest_run(tmp_path)))

    def only_the_store_is_missing(state: UploadState) -> bool:
        return state.delivered == points and "Could not connect" in (state.problem or "")

    wait_for_state(tmp_path, "mlflow", only_the_store_is_missing)
    s3.start()
    assert_mlflow_has_everything_once(tmp_path, **environment)
    (key,) = (key for key in s3.objects() if key.endswith("/memlog/artifacts/report/notes.txt"))
    assert key.startswith("direct/")
    assert s3.objects()[key] == NOTES
