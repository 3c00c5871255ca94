"""`docs/how-it-works.md` names the stops of a batch event; a real run passes them in that order."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import mlflow
import pytest
import torch
from support import child
from support.mlflow_server import sqlite_store

import memlog
from memlog.delivery.uploader.retrying_worker import UploadWorker
from memlog.delivery.uploader.uploader import Uploader
from memlog.journal import RunDirectory
from memlog.sink import find_backends

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-it-works.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/.]+)` \| `([\w.]+)` \|", re.MULTILINE)
DRAWN = re.compile(r'^ +s\d+\["(\d+) ([\w.]+)<br>([\w/.]+)"\]$', re.MULTILINE)
FIRST_OF_THE_UPLOADER = 7
REQUESTS = "memlog/delivery/helper/protocol.py"
"""A step reads it if the helper process has just asked for something."""


def stops() -> list[tuple[int, str, str]]:
    """Return each stop on the page: its number, its file, and the last part of its function's name."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [(int(number), file, name.rpartition(".")[2]) for number, file, name in rows]


def test_the_drawing_has_the_stops_of_the_lists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    drawn, listed = DRAWN.findall(page), ROW.findall(page)
    assert [(number, name) for number, name, _ in drawn] == [(n, name) for n, _, name in listed]
    assert all(place in file for (*_, place), (_, file, _) in zip(drawn, listed, strict=True))


@contextmanager
def entered(into: list[tuple[str, str]], switch: Callable[[object], object]) -> Iterator[None]:
    """Collect file and function of every call of memlog's functions, in order."""

    root = f"{ROOT}/"

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            file = frame.f_code.co_filename.removeprefix(root)
            into.append((file, frame.f_code.co_name))

    switch(note)
    try:
        yield
    finally:
        switch(None)


def expect_in_order(calls: list[tuple[str, str]], road: list[tuple[int, str, str]]) -> None:
    positions = [calls.index((file, name)) for _, file, name in road]
    assert positions == sorted(positions)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about mlflow's classes
def test_a_batch_event_passes_the_stops_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = sqlite_store(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    mlflow.set_tracking_uri(store)
    road = stops()
    assert len(road) <= 16
    assert [number for number, *_ in road] == list(range(1, len(road) + 1))

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    session = memlog.init("local")
    assert session._live is not None
    for _ in range(3):
        optimizer.step()
    session._live.batches.helper_check_due = (
        0  # the check that runs once a second is due in this step
    )
    session._live.batches._read_devices_at = 0  # so is the search for new devices
    step: list[tuple[str, str]] = []
    with entered(step, sys.setprofile):
        optimizer.step()
    memlog.finish()
    expect_in_order(step, [stop for stop in road if stop[0] < FIRST_OF_THE_UPLOADER])
    assert {file for file, _ in step if file.startswith("memlog/delivery/")} <= {REQUESTS}

    assert session.directory is not None
    backend = find_backends()["mlflow"]
    uploader = Uploader(
        RunDirectory(session.directory),
        "mlflow",
        backend.open_sink,
        project="road",
        name=None,
        begun_us=1,
    )
    uploader.may_open_own = True
    upload: list[tuple[str, str]] = []
    worker = UploadWorker(uploader)
    with entered(upload, threading.setprofile):
        worker.start()
        worker.complete()
        assert worker.join(60)
    assert worker.delivered
    expect_in_order(upload, [stop for stop in road if stop[0] >= FIRST_OF_THE_UPLOADER])


USERS_RUN = """
    import sys
    import torch, wandb
    import memlog

    entered = set()

    def note(frame, event, argument):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    optimizer = torch.optim.SGD(torch.nn.Linear(4, 4).parameters())
    session = memlog.init("wandb")
    run = wandb.init(project="road", mode="offline")
    optimizer.step()  # joins the run
    session._live.batches.helper_check_due = 0  # the check of once a second falls into this step
    sys.setprofile(note)
    optimizer.step()
    run.log({"loss": 1.0})
    sys.setprofile(None)
    run.finish()
    memlog.finish()
    print(*entered, sep=";")
"""


def test_a_step_beside_an_open_wandb_run_enters_no_file_of_delivery(tmp_path: Path) -> None:
    files = child.run(USERS_RUN, tmp_path).split(";")
    assert any(file.endswith("memlog/in_process/writer.py") for file in files)
    entered = [file for file in files if "memlog/delivery/" in file]
    assert not [file for file in entered if not file.endswith(REQUESTS)]
