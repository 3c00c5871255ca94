"""Trackers that list hostile names: a pull fetches the safe files, and writes nowhere else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.mlflow_server import environment_without_mlflow, sqlite_store
from support.wandb_server import WandbServer

from memlog.events import Artifact
from memlog.sink import Connection, Target

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    # A warning of SQLAlchemy 2.1 about MLflow 3.17's own models.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]

RECORD = """
    from pathlib import Path
    import memlog

    with memlog.init("wandb", dir="runs", config={"memlog": {"bind_grace": 0}}) as session:
        session.step()
        Path("good.txt").write_text("good")
        session.save_artifact("good.txt", "table")
"""


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as running:
        yield running


def pull(directory: Path, run: str, *options: str, **environment: str) -> str:
    """Run ``memlog pull``, and return its output. It may make files in its output folder only."""
    here = directory / "deep" / "here"
    here.mkdir(parents=True)
    before = everything(directory)
    arguments = ("pull", run, *options, "-o", "out")
    process = child.start_memlog(*arguments, directory=here, **environment)
    output, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors
    new = everything(directory) - before
    assert {path for path in new if "deep/here/out" not in path.as_posix()} == set()
    assert [path for path in new if path.is_symlink()] == []
    return str(output + errors)


def everything(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


OUTSIDE = Path("/tmp/memlog-evil")  # noqa: S108 - must not come to be
HOSTILE_ENTRIES = ("../../../evil", "good.txt/../../../../evil", "good.txt-more", str(OUTSIDE))


def test_a_wandb_server_that_lists_what_leads_elsewhere(
    tmp_path: Path, server: WandbServer
) -> None:
    child.run(RECORD, tmp_path, **server.environment)
    (artifact,) = (found for found in server.artifacts if found.type == "table")
    manifest: dict[str, Any] = json.loads(server.blobs[artifact.manifest])
    entry = manifest["contents"]["good.txt"]
    manifest["contents"] |= dict.fromkeys(HOSTILE_ENTRIES, entry)
    server.blobs[artifact.manifest] = json.dumps(manifest).encode()
    artifact.files |= dict.fromkeys(HOSTILE_ENTRIES, artifact.files["good.txt"])
    for name in ("../../evil", "/etc/evil", "a/b", "..", ".hidden", "\x1b[2J", "x" * 300):
        server.artifacts.append(
            type(artifact)(
                **{
                    **vars(artifact),
                    "key": f"{artifact.key}{len(server.artifacts)}",
                    "name": f"memlog-x-{len(server.artifacts)}",
                    "metadata": json.dumps({"memlog_name": name, "memlog_kind": "table"}),
                }
            )
        )
    (run,) = server.runs
    output = pull(tmp_path, run, "--backend", "wandb", **server.environment)
    assert not OUTSIDE.exists()
    out = tmp_path / "deep" / "here" / "out"
    assert {path.name for path in out.iterdir()} <= {"good.txt", "report.html"}
    assert "\x1b" not in output


def test_an_mlflow_run_with_links_devices_and_ten_thousand_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "store"
    store.mkdir()
    uri = sqlite_store(store)
    with environment_without_mlflow():
        from mlflow import MlflowClient

        from memlog_mlflow import backend

        sink = backend.open_sink(Target("mine", None, connection=Connection(uri)))
        run = sink.open()
        (tmp_path / "good.txt").write_text("good")
        artifact = Artifact(1, "good.txt", "report", "artifacts/good.txt", 4)
        sink.log_artifact(artifact, tmp_path / "good.txt")
        sink.close("finished")
        stored = MlflowClient(uri).get_run(run.run_id).info.artifact_uri
    assert stored is not None
    (good,) = Path(stored.removeprefix("file://")).rglob("good.txt")
    folder = good.parent
    for name in (".hidden", "a b", "x\x1b[2J"):
        (folder / name).write_text("odd")
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    output = pull(tmp_path, run.run_id, "--backend", "mlflow", MLFLOW_TRACKING_URI=uri)
    out = tmp_path / "deep" / "here" / "out"
    assert (out / "good.txt").read_text() == "good"
    assert "\x1b" not in output
    assert {path.name for path in out.iterdir()} <= {"good.txt", "link"}
    for number in range(10_000):
        (folder / f"x{number}").touch()
    (tmp_path / "deep").rename(tmp_path / "before")
    output = pull(tmp_path, run.run_id, "--backend", "mlflow", MLFLOW_TRACKING_URI=uri)
    assert "choose with --kind" in output
    assert len(output.splitlines()) == 1
