"""An S3-compatible object store on loopback: ``moto_server``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from support.mlflow_server import free_port
from support.servers import ServerProcess, answers

BUCKET = "memlog"


class S3Server(ServerProcess):
    """The store, as a context manager. Its objects are deleted when it is stopped."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        self._log = root / "s3.log"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which MLflow's client reaches the store."""
        return {
            "MLFLOW_S3_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "not so secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            # The client gives up on an absent store after one attempt, not after five.
            "AWS_MAX_ATTEMPTS": "1",
        }

    def __enter__(self) -> S3Server:  # noqa: PYI034 - typing.Self came with Python 3.11
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server with an empty bucket, on the same port as the first time."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        home = f"http://127.0.0.1:{self.port}/moto-api/"
        self.launch(command, lambda: answers(home), self._log)
        self._client().create_bucket(Bucket=BUCKET)

    def objects(self) -> dict[str, bytes]:
        client = self._client()
        listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {
            found["Key"]: client.get_object(Bucket=BUCKET, Key=found["Key"])["Body"].read()
            for found in listed
        }

    def _client(self) -> Any:
        import boto3

        environment = self.environment
        return boto3.client(
            "s3",
            endpoint_url=environment["MLFLOW_S3_ENDPOINT_URL"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment["AWS_DEFAULT_REGION"],
        )
