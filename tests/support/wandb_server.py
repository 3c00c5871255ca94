"""A loopback double of W&B's server: as much of its protocol as the real SDK needs to log a run online.

It stores all requests and checks nothing. Its ``fault`` makes it answer with an error, or slowly, or not
at all. `stop` takes the server down, and `start` brings it up again on the same port.
"""

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

from support.faults import FINE
from support.wandb_handler import Data, WandbHandler

ENTITY = "tester"


@dataclass
class HeldRun:
    key: str
    name: str
    project: str
    group: str | None = None
    job_type: str | None = None
    config: Data = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    complete: bool = False
    exit_code: int | None = None

    @property
    def rows(self) -> list[Data]:
        history = self.lines.get("wandb-history.jsonl", {})
        return [json.loads(line) for _, line in sorted(history.items())]

    @property
    def summary(self) -> str:
        return next(iter(self.lines.get("wandb-summary.json", {}).values()), "{}")


@dataclass
class HeldArtifact:
    key: str
    name: str
    type: str
    digest: str
    run: str
    metadata: str | None
    version: int
    state: str = "PENDING"
    size: int = 0
    files: dict[str, str] = field(default_factory=dict)
    manifest: str = ""


class WandbServer:
    """The double, as a context manager. `environment` has a client's variables."""

    def __init__(self) -> None:
        self.forget()
        self._port = 0
        self._lock = threading.RLock()
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ENTITY": ENTITY,
            "WANDB_PROJECT": "p",
            "WANDB_MODE": "online",
            "WANDB_ERROR_REPORTING": "false",
            # wandb uploads rows each 15 seconds and waits up to a minute after a failure; a test does not.
            "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1",
            "WANDB__FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "2",
            "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2",
            "WANDB__FILE_TRANSFER_RETRY_WAIT_MAX_SECONDS": "2",
        }

    def __enter__(self) -> "WandbServer":  # noqa: PYI034 - typing.Self came with Python 3.11
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        server = self

        class Handler(WandbHandler):
            held = server

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def forget(self) -> None:
        """Reset the double to the state of an unused server."""
        self.runs: dict[str, HeldRun] = {}
        self.artifacts: list[HeldArtifact] = []
        self.alerts: list[Data] = []
        self.blobs: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.fault = FINE
        self.struck: list[str] = []

    def stream(self, name: str, project: str, request: Data) -> None:
        """Store the lines that a run appends to its files."""
        with self._lock:
            run = self._run(name, project)
            for file, chunk in (request.get("files") or {}).items():
                held = run.lines.setdefault(file, {})
                for number, line in enumerate(chunk["content"], chunk["offset"]):
                    held[number] = line
            if request.get("complete"):
                run.complete, run.exit_code = True, request.get("exitcode")

    def answer(self, operation: str, values: Data) -> Data | None:
        """Return the data that answer a GraphQL operation."""
        made = getattr(self, f"_on_{operation}", None)
        with self._lock:
            if made is None:
                self.unknown.append(operation)
                return None
            answer: Data = made(values)
            return answer

    def _run(self, name: str, project: str) -> HeldRun:
        key = _key("Run", len(self.runs))
        return self.runs.setdefault(name, HeldRun(key, name, project))

    def _on_Viewer(self, _: Data) -> Data:  # noqa: N802 - named like W&B's operations
        entity = {"node": {"name": ENTITY}}
        return {
            "viewer": {
                "id": _key("User", 1),
                "entity": ENTITY,
                "username": ENTITY,
                "name": ENTITY,
                "email": "a@b.c",
                "admin": False,
                "flags": "{}",
                "deletedAt": None,
                "apiKeys": {"edges": []},
                "teams": {"edges": [entity]},
            }
        }

    def _on_ServerFeaturesQuery(self, _: Data) -> Data:  # noqa: N802
        name = "ARTIFACT_COLLECTION_MEMBERSHIP_FILES"
        return {"serverInfo": {"features": [{"name": name, "isEnabled": True}]}}

    def _on_ServerInfo(self, _: Data) -> Data:  # noqa: N802
        versions = {"min_cli_version": "0.0.0", "max_cli_version": "99.0.0"}
        return {"serverInfo": {"cliVersionInfo": versions, "latestLocalVersionInfo": None}}

    def _on_RunResumeStatus(self, values: Data) -> Data:  # noqa: N802
        run = self.runs.get(values["name"])
        project = _project(values.get("project") or "uncategorized")
        return {"model": {**project, "bucket": None if run is None else _resumable(run)}}

    def _on_UpsertBucket(self, values: Data) -> Data:  # noqa: N802
        by_key = {run.key: run.name for run in self.runs.values()}
        name = values.get("name") or by_key[values["id"]]
        inserted = name not in self.runs
        run = self._run(name, values.get("project") or "uncategorized")
        run.group = values.get("groupName") or run.group
        run.job_type = values.get("jobType") or run.job_type
        if values.get("config"):
            run.config = {
                key: entry.get("value") for key, entry in json.loads(values["config"]).items()
            }
        bucket = {
            "id": run.key,
            "name": name,
            "displayName": name,
            "description": None,
            "config": "{}",
            "sweepName": None,
            "project": _project(run.project),
            "historyLineCount": len(run.rows),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _on_NotifyScriptableRunAlert(self, values: Data) -> Data:  # noqa: N802
        self.alerts.append(values)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _on_CreateRunFiles(self, values: Data) -> Data:  # noqa: N802
        base = f"{self.url}/storage/runs/{values['run']}"
        files = [{"name": name, "uploadUrl": f"{base}/{name}"} for name in values["files"]]
        return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}

    def _on_RunStoppedStatus(self, _: Data) -> Data:  # noqa: N802
        return {"project": {"run": {"stopped": False}}}

    def _on_CreateArtifact(self, values: Data) -> Data:  # noqa: N802
        wanted = values["input"]
        name = wanted["artifactCollectionName"]
        same = [held for held in self.artifacts if held.name == name]
        made = HeldArtifact(
            key=_key("Artifact", len(self.artifacts)),
            name=name,
            type=wanted["artifactTypeName"],
            digest=wanted["digest"],
            run=wanted.get("runName") or "",
            metadata=wanted.get("metadata"),
            version=len(same),
        )
        self.artifacts.append(made)
        sequence = {"latestArtifact": {"id": same[-1].key} if same else None}
        artifact = {"id": made.key, "state": made.state, "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}

    def _on_CreateArtifactManifest(self, values: Data) -> Data:  # noqa: N802
        return {"createArtifactManifest": {"artifactManifest": self._manifest(values)}}

    def _on_UpdateArtifactManifest(self, values: Data) -> Data:  # noqa: N802
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(values)}}

    def _manifest(self, values: Data) -> Data:
        values = values.get("input") or values
        wanted = values.get("artifactID") or values["artifactManifestID"].removesuffix("-manifest")
        artifact = self._artifact(wanted)
        artifact.manifest = f"/storage/manifests/{artifact.version}/{artifact.name}"
        file: Data = {"id": "file"}
        if values.get("includeUpload"):
            file |= {"uploadUrl": self.url + artifact.manifest, "uploadHeaders": []}
        return {"id": f"{artifact.key}-manifest", "file": file}

    def _on_CreateArtifactFiles(self, values: Data) -> Data:  # noqa: N802
        edges = []
        for file in (values.get("input") or values)["artifactFiles"]:
            artifact = self._artifact(file["artifactID"])
            path = f"/storage/artifacts/{artifact.name}/{artifact.version}/{file['name']}"
            artifact.files[file["name"]] = path
            node = {
                "storagePath": path,
                "uploadUrl": self.url + path,
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": artifact.key},
            }
            edges.append({"node": node})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _on_CommitArtifact(self, values: Data) -> Data:  # noqa: N802
        artifact = self._artifact(values["artifactID"])
        manifest = json.loads(self.blobs[artifact.manifest])
        artifact.size = sum(int(entry["size"]) for entry in manifest["contents"].values())
        artifact.state = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": artifact.key, "digest": artifact.digest}}}

    def _on_ArtifactByID(self, values: Data) -> Data:  # noqa: N802
        return {"artifact": self._node(self._artifact(values["id"]))}

    def _on_ArtifactType(self, values: Data) -> Data:  # noqa: N802
        name = values["name"].partition(":")[0]
        found = [held.type for held in self.artifacts if held.name == name]
        return {"project": {"artifact": {"artifactType": {"name": found[0]}} if found else None}}

    def _on_FetchArtifactManifest(self, values: Data) -> Data:  # noqa: N802
        url = self.url + self._artifact(values["id"]).manifest
        return {"artifact": {"currentManifest": {"file": {"directUrl": url}}}}

    def _on_Run(self, values: Data) -> Data:  # noqa: N802
        run = self.runs.get(values["name"])
        if run is None:
            return {"project": {"run": None}}
        facts: Data = dict.fromkeys(("sweepName", "group", "commit", "description", "notes"))
        facts |= {"id": run.key, "name": run.name, "displayName": run.name, "tags": []}
        facts |= {"state": "finished", "config": "{}", "summaryMetrics": "{}"}
        facts |= {"systemMetrics": "{}", "historyLineCount": len(run.rows), "historyKeys": None}
        facts |= {"user": {"name": ENTITY, "username": ENTITY}}
        facts |= {"jobType": run.job_type, "readOnly": False, "projectId": 1}
        facts |= {"createdAt": "2026-01-01T00:00:00Z", "heartbeatAt": "2026-01-01T00:00:00Z"}
        return {"project": {"run": facts}}

    def _on_RunOutputArtifacts(self, values: Data) -> Data:  # noqa: N802
        mine = [held for held in self.artifacts if held.run in ("", values["run"])]
        edges = [{"cursor": "c", "node": self._node(held)} for held in mine]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        found = {"totalCount": len(mine), "pageInfo": page, "edges": edges}
        return {"project": {"run": {"artifacts": found}}}

    def _on_GetArtifactMembershipFileUrls(self, values: Data) -> Data:  # noqa: N802
        version = int(values["alias"].removeprefix("v"))
        artifact = next(
            held
            for held in self.artifacts
            if (held.name, held.version) == (values["collection"], version)
        )
        edges = [
            {"node": self._file(name, path)}
            for name, path in artifact.files.items()
            if name in (values.get("fileNames") or [name])
        ]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        files = {"totalCount": len(edges), "edges": edges, "pageInfo": page}
        membership = {"files": files}
        collection = {"__typename": "ArtifactSequence", "artifactMembership": membership}
        return {"project": {"artifactCollection": collection}}

    def _file(self, name: str, path: str) -> Data:
        return {
            "__typename": "File",
            "id": _key("File", 1),
            "name": name,
            "url": self.url + path,
            "directUrl": self.url + path,
            "sizeBytes": len(self.blobs.get(path, b"")),
            "storagePath": path,
            "mimetype": "application/json",
            "updatedAt": None,
            "digest": None,
            "md5": None,
        }

    def _node(self, artifact: HeldArtifact) -> Data:
        project = _project("p")
        sequence = {
            "__typename": "ArtifactSequence",
            "id": _key("Sequence", 1),
            "name": artifact.name,
            "project": project,
        }
        return {
            "__typename": "Artifact",
            "id": artifact.key,
            "artifactSequence": sequence,
            "versionIndex": artifact.version,
            "artifactType": {"name": artifact.type},
            "description": None,
            "metadata": artifact.metadata,
            "ttlDurationSeconds": -2,
            "ttlIsInherited": False,
            "tags": [],
            "historyStep": None,
            "state": artifact.state,
            "size": artifact.size,
            "digest": artifact.digest,
            "digestAlgorithm": "MANIFEST_MD5",
            "commitHash": artifact.digest,
            "fileCount": len(artifact.files),
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
            "aliases": [],
        }

    def _artifact(self, key: str) -> HeldArtifact:
        return next(artifact for artifact in self.artifacts if artifact.key == key)


def _key(kind: str, number: int) -> str:
    return base64.b64encode(f"{kind}:{number}".encode()).decode()


def _project(name: str) -> Data:
    entity = {"id": _key("Entity", 1), "name": ENTITY}
    return {"id": _key("Project", 1), "internalId": "x", "name": name, "entity": entity}


def _resumable(run: HeldRun) -> Data:
    return {
        "id": run.key,
        "name": run.name,
        "summaryMetrics": run.summary,
        "displayName": run.name,
        "logLineCount": 0,
        "historyLineCount": len(run.rows),
        "eventsLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
        "eventsTail": "[]",
        # With this the client resumes the run where it ended. Fields missing here would be lost.
        "config": json.dumps({key: {"value": value} for key, value in run.config.items()}),
        "tags": [],
        "notes": None,
        "wandbConfig": json.dumps({"t": 1}),
    }
