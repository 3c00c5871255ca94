"""The command ``memlog estimate``: its table, its warnings, and its answers to mistakes."""

import json
from pathlib import Path

import psutil
from click.testing import CliRunner

from memlog.cli.main import cli

JOB = """
import torch
from torch import nn

def job(batch, length=16):
    model = nn.Linear(length, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        model(torch.randn(batch, length)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"step": step, "model": model, "optimizer": optimizer}
"""


def test_the_command_prints_a_table_and_fails_if_nothing_fits(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["estimate", f"{script}:job", "--batch", "64,9000000", "--cpu", "--device"]
    shown = CliRunner().invoke(cli, [*command, "64 GiB"])
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert [row[-1] for row in rows[1:3]] == ["yes", "no"]
    assert "Half the batch" in shown.output
    assert "added time" not in shown.output  # nothing was computed
    assert CliRunner().invoke(cli, [*command, "1 MiB"]).exit_code == 1
    found = CliRunner().invoke(cli, [*command, "64 GiB", "--length", "8,16", "--json"])
    assert [row["length"] for row in json.loads(found.output)["steps"]] == [8, 16, 8, 16]


def test_the_device_may_be_named_as_in_python(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["estimate", f"{script}:job", "--batch", "64", "--json"]
    for more, device in [
        (["--device", "cpu"], "cpu"),
        (["--device", "H100"], "H100"),
        (["--gpu", "L4", "--device", "80 GiB"], "L4"),
    ]:
        found = CliRunner().invoke(cli, [*command, *more])
        assert found.exit_code == 0, found.output
        assert json.loads(found.output)["device"] == device
    found = CliRunner().invoke(cli, [*command, "--device", "cuda"])
    assert json.loads(found.output)["device"] not in ("cpu", "cuda")


def test_the_command_warns_of_what_it_could_not_count(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    draw = "torch.multinomial(torch.rand(64, 4096), 1)"
    script.write_text(
        JOB.replace("        optimizer.step()", f"        {draw}\n        optimizer.step()")
    )
    command = ["estimate", f"{script}:job", "--batch", "64", "--cpu"]
    assert "Warning: " in CliRunner().invoke(cli, command).output
    [row] = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)["steps"]
    assert "multinomial" in row["uncounted"][0]
    assert row["without"] == "what aten.multinomial.default takes inside"


def test_on_the_cpu_the_process_itself_has_to_fit_too(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["estimate", f"{script}:job", "--batch", "64", "--cpu"]
    found = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)
    [row] = found["steps"]
    resident = psutil.Process().memory_info().rss
    assert resident / 2 < found["process"] < 2 * resident
    assert row["needed"] == round(row["peak"] * 1.02) + found["process"]
    for size, fits in [(row["needed"] * 2, True), (found["process"] // 2, False)]:
        shown = CliRunner().invoke(cli, [*command, "--device", f"{size // 2**20} MiB"])
        assert (" yes" in shown.output, shown.exit_code) == (fits, 0 if fits else 1)
        assert "for the process itself (Python, torch" in " ".join(shown.output.split())


def test_a_yes_names_what_it_does_not_count(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    layer = "nn.Conv1d(1, 8, 3)"
    script.write_text(
        JOB.replace("nn.Linear(length, 4096)", layer).replace(
            "(batch, length)", "(batch, 1, length)"
        )
    )
    command = ["estimate", f"{script}:job", "--batch", "8", "--gpu", "H100", "--device"]
    fits = CliRunner().invoke(cli, [*command, "80 GiB"], env={"COLUMNS": "200"})
    assert fits.exit_code == 0
    assert "yes, not counting cuDNN's workspaces\n" in fits.output
    [row] = json.loads(CliRunner().invoke(cli, [*command, "80 GiB", "--json"]).output)["steps"]
    assert (row["fits"], row["without"]) == (True, "cuDNN's workspaces")
    fails = CliRunner().invoke(cli, [*command, "1 MiB"], env={"COLUMNS": "200"})
    assert fails.exit_code == 1
    assert "yes" not in fails.output


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "def job(): return 1\ndef fails(): return 1 / 0\ndef more(): return {'step': fails, 'lr': 1}\n"
    )
    for target, message in [
        (f"{script}:fails", "nothing was estimated: ZeroDivisionError"),
        (f"{script}:more", "has the key 'lr'"),
        ("job.py", "write the script and its function"),
        (f"{script}:other", "has no function 'other'"),
        (f"{script}:job", "returns no dictionary"),
    ]:
        shown = CliRunner().invoke(cli, ["estimate", target])
        assert (shown.exit_code, message in shown.output) == (2, True), shown.output
    shown = CliRunner().invoke(cli, ["estimate", f"{script}:job", "--batch", "8"])
    assert (shown.exit_code, "job() does not take" in shown.output) == (2, True), shown.output
