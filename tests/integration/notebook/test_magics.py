"""`%load_ext memlog` in a real kernel."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = [
    pytest.mark.integration,
    # Warnings of zmq and asyncio inside nbclient when the kernel's channels are closed.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

STEPS = """
for _ in range(12):
    network(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SETUP = """
import torch
network = torch.nn.Linear(64, 128)
optimizer = torch.optim.SGD(network.parameters())
"""
FAILS = "raise ValueError('no')"
STATUSES = """
import json
from memlog.journal import list_runs
print(json.dumps([run.end().status for run in list_runs(session.directory.parent.parent / "runs")]))
"""
CELLS = (
    "%load_ext memlog",  # 0
    SETUP,
    f"%%memlog local --name first --dir runs\n{STEPS}",  # 2
    "%memlog show --brief --dir runs\nprint(_exit_code)",  # 3
    "%memlog show\nprint(_exit_code)",  # 4
    f"%%memlog local --dir runs\n{FAILS}",  # 5
    "import memlog\nsession = memlog.init('local', dir='other', config={'quiet': True})",
    f"%%memlog\n{STEPS}",  # 7
    "%memlog show --brief",  # 8
    "%%memlog local\npass",  # 9
    "memlog.finish()",
    STATUSES,  # 11
    "%%memlog wandp\npass",  # 12
    "%%memlog --layer\npass",  # 13
    "%memlog show latest --json --dir other",  # 14
)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, resources=where, allow_errors=True).execute()
    return list(notebook.cells)


def printed(cell: Any, name: str = "stdout") -> str:
    return "".join(
        output.text
        for output in cell.outputs
        if output.output_type == "stream" and output.name == name
    )


def error_of(cell: Any) -> list[str]:
    return [output.ename for output in cell.outputs if output.output_type == "error"]


def reports_of(cell: Any) -> list[str]:
    shown = [output.data for output in cell.outputs if output.output_type == "display_data"]
    return [data["text/html"] for data in shown if "text/html" in data]


def test_a_cell_is_a_run_with_its_report_below(cells: list[Any]) -> None:
    recorded, shown = cells[2], cells[3]
    assert error_of(recorded) == []
    assert "memlog: run " in printed(recorded, "stderr")
    [report] = reports_of(recorded)
    assert report.startswith("<iframe ")
    assert ", finished, 12 steps\n" in printed(shown)
    assert printed(shown).endswith("\n0\n")


def test_a_command_that_fails_says_why_and_gives_its_exit_code(cells: list[Any]) -> None:
    assert printed(cells[4]).startswith("memlog: there are no runs in ")
    assert printed(cells[4]).endswith("\n1\n")


def test_a_cell_that_raises_is_a_failed_run(cells: list[Any]) -> None:
    assert error_of(cells[5]) == ["ValueError"]
    assert json.loads(printed(cells[11])) == ["finished", "failed"]


@pytest.mark.parametrize("begin", ["pass", "session = memlog.init('local')"])
def test_a_notebook_ends_at_a_cell_that_raises(begin: str, tmp_path: Path) -> None:
    code = (f"import memlog\n%load_ext memlog\n{begin}", f"%%memlog\n{FAILS}", "print('went on')")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in code])
    where = {"metadata": {"path": str(tmp_path)}}
    with pytest.raises(CellExecutionError, match="ValueError"):
        NotebookClient(notebook, timeout=120, resources=where).execute()
    assert error_of(notebook.cells[1]) == ["ValueError"]
    assert "magics.py" not in str(notebook.cells[1].outputs)
    assert notebook.cells[2].outputs == []


def test_a_cell_of_a_running_session_is_a_phase_of_it(cells: list[Any]) -> None:
    assert error_of(cells[7]) == []
    assert reports_of(cells[7]) == []
    assert ", running, 12 steps\n" in printed(cells[8])  # the session's run, in its own folder
    assert "takes no arguments while a session records" in printed(cells[9], "stderr")
    run = json.loads(printed(cells[14]))
    assert (run["status"], run["steps"]) == ("finished", 12)
    assert list(run["phases"]) == [f"In[{cells[7].execution_count}]"]


def test_wrong_arguments_are_one_line(cells: list[Any]) -> None:
    assert "did you mean 'wandb'?" in printed(cells[12], "stderr")
    assert "unrecognized arguments: --layer" in printed(cells[13], "stderr")
