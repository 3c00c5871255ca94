"""Files with different names come back separately: from the journal, from MLflow and from W&B."""

from pathlib import Path

import pytest
from support import child
from support.wandb_server import WandbServer

pytestmark = pytest.mark.integration

TRAINER = """
    from pathlib import Path

    import memlog

    with memlog.init(["wandb", "mlflow"], project="p", finish_timeout=120) as session:
        session.step()
        for name, kind in [("r.json", "table"), ("r.json", "config"), ("r.json", "my/kind:x"),
                           ("\\u00fc.txt", "file"), ("\\u00f6.txt", "file")]:
            Path("source").write_text(f"{name} {kind}")
            assert session.save_artifact("source", kind, name=name) is not None
"""


BACKENDS = ("local", "mlflow", "wandb")


@pytest.mark.usefixtures("ready_store")
def test_names_and_kinds_are_kept_apart_in_all_three_stores(tmp_path: Path) -> None:
    with WandbServer() as server:
        environment = dict(server.environment)
        child.run(TRAINER, tmp_path, **environment)
        pulls = [
            ("pull", "latest", "--backend", backend, "-o", f"of-{backend}") for backend in BACKENDS
        ]
        child.commands(*pulls, directory=tmp_path, **environment)
    for backend in BACKENDS:
        files = [path for path in (tmp_path / f"of-{backend}").iterdir() if path.suffix != ".html"]
        contents = sorted(path.read_text() for path in files)
        assert contents == sorted(
            [
                "r.json table",
                "r.json config",
                "r.json my/kind:x",
                "\u00fc.txt file",
                "\u00f6.txt file",
            ]
        )
