"""Clients of the two stores that Trackio has: databases in a folder, and a server.

Import this module only in memlog's own processes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
from gradio_client import handle_file
from huggingface_hub import get_token
from trackio import cas, fragments, utils
from trackio.remote_client import WRITE_TOKEN_HEADER, RemoteClient
from trackio.sqlite_storage import SQLiteStorage

from memlog._internal.connections import does_not_answer, reason_of
from memlog.errors import (
    DeliveryError,
    MemlogError,
    TrackerRejectedError,
    TrackerUnavailableError,
)
from memlog_trackio.addresses import RunAddress
from memlog_trackio.environment import DIR, WRITE_TOKEN

_PROBE = 2.0
_PATIENCE = httpx.Timeout(10.0, connect=_PROBE)
"""Maximum seconds to wait: 10 for an answer, `_PROBE` for a connection."""
_REFUSALS = frozenset({401, 403})
_SERVER_ERROR = 500

Entries = Sequence[dict[str, Any]]


def client_for(address: RunAddress, environment: Mapping[str, str]) -> FolderClient | ServerClient:
    """Return the client for an address. Its methods raise `DeliveryError`."""
    if address.folder is not None:
        return FolderClient(address.folder)
    return ServerClient(address, environment.get(WRITE_TOKEN))


class FolderClient:
    """Client of the databases in Trackio's folder. Trackio uses them if no server is set."""

    _questions: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "get_run_artifacts": SQLiteStorage.get_run_artifacts,
        "get_artifact_manifest": SQLiteStorage.get_artifact_manifest,
        "get_runs_for_project": SQLiteStorage.get_run_records,
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fragments = fragments.FragmentWriter()

    def probe(self) -> None:
        """Check that Trackio's folder can be used."""
        if self._folder != utils.TRACKIO_DIR.absolute():
            raise TrackerUnavailableError(
                f"the run is in {self._folder}, but this process has {utils.TRACKIO_DIR}: set {DIR} to the "
                "run's folder and call `memlog sync`"
            )
        # Up to two parents may be missing. Trackio creates the parents of its default folder,
        # ~/.cache/huggingface/trackio.
        if not any(path.is_dir() for path in (self._folder, *self._folder.parents[:3])):
            raise TrackerUnavailableError(
                f"there is no folder {self._folder.parent}: mount its disk, or create it again"
            )

    def log(self, entries: Entries) -> None:
        """Store rows of one run, except rows whose ``log_id`` is stored already."""
        self._write([fragments.metric_record(entry) for entry in entries])

    def alert(self, entries: Entries) -> None:
        """Store alerts of one run, except alerts whose ``alert_id`` is stored already."""
        self._write([fragments.alert_record(entry) for entry in entries])

    def store(self, project: str, file: Path) -> tuple[str, int]:
        """Store a file's content; return its digest and size."""
        with self._asked():
            return cas.stage_blob_into_project(file, project)

    def commit(self, artifact: Mapping[str, Any]) -> None:
        """Create an artifact from stored contents. An artifact of the same name is replaced."""
        with self._asked():
            SQLiteStorage.commit_artifact_version(**artifact)

    def ask(self, question: str, /, **arguments: Any) -> Any:
        """Return the answer of Trackio's read-only function ``question``."""
        with self._asked():
            return self._questions[question](**arguments)

    def fetch(
        self, project: str, digest: str, file: Path, progress: Callable[[int], object]
    ) -> None:
        """Write the content with this digest to a new file."""
        with self._asked():
            shutil.copyfile(cas.blob_path(project, cas.validate_digest(digest)), file)
            progress(file.stat().st_size)

    def _write(self, records: list[dict[str, Any]]) -> None:
        with self._asked():
            if utils.get_storage_mode() == "jsonl":
                # SQLite is unsafe on a network file system. Trackio's page imports the records later.
                self._fragments.write_local(records)
            else:
                fragments.import_records(records)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        self.probe()
        with translated():
            yield


class ServerClient:
    """Client of a Trackio server or of a Space of Hugging Face."""

    def __init__(self, address: RunAddress, write_token: str | None) -> None:
        self._address = address
        self._write_token = write_token
        # Only a Space gets the user's login.
        self._login = get_token() if address.is_space else None
        # One TLS context for all requests: making one takes longer than a request.
        self._verify = httpx.create_ssl_context()
        self._client: RemoteClient | None = None

    def probe(self) -> None:
        """Check that the server can be reached."""
        with translated(self._address.location):
            url = f"{self._address.location}version"
            answer = httpx.get(url, headers=self._headers, timeout=_PROBE, verify=self._verify)
            answer.raise_for_status()

    def log(self, entries: Entries) -> None:
        """Store rows of one run, except rows whose ``log_id`` is stored already."""
        self._call("bulk_log", logs=list(entries), hf_token=self._login)

    def alert(self, entries: Entries) -> None:
        """Store alerts of one run, except alerts whose ``alert_id`` is stored already."""
        self._call("bulk_alert", alerts=list(entries), hf_token=self._login)

    def store(self, project: str, file: Path) -> tuple[str, int]:
        """Store a file's content; return its digest and size."""
        digest, size = cas.hash_file(file)
        present = self.ask(
            "check_artifact_blobs", project=project, digests=[digest], hf_token=self._login
        )
        if digest not in present["present"]:
            uploads = [{"project": project, "digest": digest, "uploaded_file": handle_file(file)}]
            self._call(
                "bulk_upload_artifact_blob", project=project, uploads=uploads, hf_token=self._login
            )
        return digest, size

    def commit(self, artifact: Mapping[str, Any]) -> None:
        """Create an artifact from stored contents. An artifact of the same name is replaced."""
        self._call("artifact_log", **artifact, hf_token=self._login)

    def ask(self, question: str, /, **arguments: Any) -> Any:
        """Return the answer of Trackio's read-only function ``question``."""
        if question == "get_run_artifacts":
            arguments["run"] = arguments.pop("run_name")
        return self._call(question, **arguments)

    def fetch(
        self, project: str, digest: str, file: Path, progress: Callable[[int], object]
    ) -> None:
        """Write the content with this digest to a new file."""
        path = f"artifact_blob/{utils.canonical_project_name(project)}/{digest}"
        arrived = hashlib.sha256()
        with (
            translated(self._address.location),
            httpx.stream(
                "GET",
                self._address.location + path,
                headers=self._headers,
                timeout=_PATIENCE,
                verify=self._verify,
            ) as answer,
            file.open("xb") as copy,
        ):
            answer.raise_for_status()
            for part in answer.iter_bytes():
                arrived.update(part)
                copy.write(part)
                progress(len(part))
        if arrived.hexdigest() != digest:
            raise TrackerRejectedError(f"the file {file.name!r} arrived with another content")

    @property
    def _headers(self) -> dict[str, str]:
        headers = {WRITE_TOKEN_HEADER: self._write_token} if self._write_token else {}
        return {**headers, "Authorization": f"Bearer {self._login}"} if self._login else headers

    def _call(self, api: str, /, **arguments: Any) -> Any:
        with translated(self._address.location):
            if self._client is None:
                self.probe()  # an unreachable server would block Trackio's client for long
                self._client = RemoteClient(
                    self._address.location,
                    self._login,
                    self._write_token,
                    httpx_kwargs={"timeout": _PATIENCE, "verify": self._verify},
                )
            return self._client.predict(api_name=f"/{api}", **arguments)


@contextmanager
def translated(address: str | None = None) -> Iterator[None]:
    """Translate the errors of a block that calls Trackio.

    Args:
        address: The server's address, for messages; ``None``: there is no server.

    Raises:
        TrackerRejectedError: Trackio has refused the content.
        TrackerUnavailableError: any other error.
    """
    try:
        yield
    except MemlogError:
        raise
    except httpx.HTTPStatusError as error:
        raise _answered(error.response) from None
    except ValueError as error:
        raise TrackerRejectedError(f"Trackio refuses this: {error}") from error
    except Exception as error:  # noqa: BLE001 - the client lets drivers' and system errors through
        text = str(error) or type(error).__name__
        reason = reason_of(text)
        told = does_not_answer("Trackio", address, text, reason) if reason and address else None
        raise TrackerUnavailableError(told or f"Trackio is not available ({text})") from None


def _answered(response: httpx.Response) -> DeliveryError:
    """Return the error for an answer that reports a failure."""
    try:
        text = str(response.json()["error"])
    except (ValueError, KeyError, TypeError, httpx.ResponseNotRead):
        text = f"it answers {response.status_code}"
    if response.status_code in _REFUSALS or "write_token" in text:
        return TrackerUnavailableError(
            f"the Trackio server refuses to be written to: set {WRITE_TOKEN} to the token that it printed"
        )
    if response.status_code >= _SERVER_ERROR:
        return TrackerUnavailableError(f"Trackio is not available ({text})")
    return TrackerRejectedError(f"Trackio refuses this: {text}")
