"""`memlog mcp`, asked by the SDK's own client over standard input and output."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from support import child
from support.journals import finished_run

from memlog.cli.agent_tools import INSTRUCTIONS
from memlog.cli.mcp import SKILL
from memlog.journal import RunDirectory
from memlog.reports import summarize
from memlog.reports.brief import brief

pytestmark = pytest.mark.integration

TRAIN = """
import memlog, torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
memlog.init("local", name=NAME, layers=True, model=model)
for step in range(20):
    model(torch.randn(BATCH, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
memlog.finish()
"""
DEFINITION = "def job(batch):\n"
PRINTING = f"""
print("a script may print")
print("{{")

{DEFINITION}
    if batch > 1000:
        raise ValueError("too many")
"""
Ask = Callable[[Client], Awaitable[Any]]


def ask(folder: Path, question: Ask, *options: str, errors: Path = Path(os.devnull)) -> Any:
    """Start the server in a folder, as an editor does it, and ask it by the SDK's client."""

    async def asked() -> Any:
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "memlog", "mcp", *options],
            env=environment,
            cwd=folder,
        )
        with errors.open("w") as log, anyio.fail_after(240):
            async with Client(stdio_client(server, errlog=log)) as client:
                return await question(client)

    return anyio.run(asked)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of a program, the second one with a larger batch."""
    folder = tmp_path_factory.mktemp("trained")
    for name, batch in (("small", 64), ("large", 4096)):
        script = TRAIN.replace("NAME", repr(name)).replace("BATCH", str(batch))
        child.run(script, folder)
    return folder


def text_of(result: Any) -> str:
    [content] = result.content
    return str(content.text)


def test_the_server_offers_five_tools_with_descriptions(tmp_path: Path) -> None:
    async def question(client: Client) -> Any:
        return client.instructions, (await client.list_tools()).tools

    log = tmp_path / "errors"
    instructions, tools = ask(tmp_path, question, errors=log)
    assert log.read_text() == ""
    assert instructions == INSTRUCTIONS
    by_name = {tool.name: tool for tool in tools}
    assert set(by_name) == {"runs", "show", "compare", "advise", "estimate"}
    for name, tool in by_name.items():
        assert tool.description == inspect.cleandoc(tool.description), name
        assert tool.annotations.read_only_hint == (name != "estimate")
        for parameter in tool.input_schema["properties"].values():
            assert parameter["description"]


def test_the_tools_tell_what_the_commands_print(trained: Path) -> None:
    async def question(client: Client) -> Any:
        return (
            await client.call_tool("runs", {}),
            await client.call_tool("runs", {"most": 1}),
            await client.call_tool("show", {}),
            await client.call_tool("show", {"run": "small", "detail": "all"}),
            await client.call_tool(
                "compare", {"runs": ["small", "large"], "gates": ["host.rss > -50%"]}
            ),
            await client.call_tool("advise", {"run": "large", "fit": "1 GiB"}),
        )

    runs, newest, shown, everything, compared, advised = ask(trained, question)
    listed = runs.structured_content["runs"]
    assert [run["name"] for run in listed] == ["small", "large"]
    assert [run["name"] for run in newest.structured_content["runs"]] == ["large"]
    latest = RunDirectory(Path(listed[-1]["directory"]))
    assert text_of(shown).splitlines()[0] == brief(latest, summarize(latest))[0]
    assert "\nnext: `memlog advise " in text_of(shown)
    assert json.loads(text_of(everything))["run"]["name"] == "small"
    comparison = compared.structured_content
    assert [run["name"] for run in comparison["runs"]] == ["small", "large"]
    assert comparison["gates"][0]["failed"] is True
    advice = advised.structured_content
    assert advice["run"] == latest.id
    assert advice["fit"]["plan"]["fits"] is True


def test_an_estimate_runs_the_script_in_a_process_of_its_own(tmp_path: Path) -> None:
    skill = SKILL.read_text(encoding="utf-8")
    example = skill.partition("```python\n# job.py\n")[2].partition("```")[0]
    (tmp_path / "job.py").write_text(example.replace(DEFINITION, PRINTING))

    async def question(client: Client) -> Any:
        target = {"target": "job.py:job"}
        return (
            await client.call_tool("estimate", {**target, "batch": [8, 16], "device": "1 MiB"}),
            await client.call_tool("estimate", {**target, "batch": [2000]}),
            await client.call_tool("estimate", {"target": "--help"}),
        )

    estimated, failed, wrong = ask(tmp_path, question)
    steps = estimated.structured_content["steps"]
    assert [step["batch"] for step in steps] == [8, 16]
    assert not any(step["fits"] for step in steps)
    assert failed.is_error
    assert text_of(failed).endswith("nothing was estimated: ValueError: too many")
    assert wrong.is_error
    assert "write the script and its function" in text_of(wrong)


def test_a_mistake_is_told_with_its_remedy_and_the_server_goes_on(tmp_path: Path) -> None:
    finished_run(tmp_path / "elsewhere")

    async def question(client: Client) -> Any:
        return (
            await client.call_tool("show", {}),
            await client.call_tool("show", {"directory": str(tmp_path / "elsewhere")}),
            await client.call_tool("advise", {"directory": str(tmp_path / "elsewhere")}),
            await client.call_tool("compare", {"runs": ["latest"]}),
        )

    none, elsewhere, untraced, one = ask(tmp_path, question, "--dir", str(tmp_path / "none"))
    assert none.is_error
    assert f"there are no runs in {tmp_path / 'none'}: train with memlog.init()" in text_of(none)
    assert "run: k7m2xq9a, finished, 200 steps" in text_of(elsewhere)
    assert "no step of run k7m2xq9a was traced" in text_of(untraced)
    assert one.is_error


def test_without_the_package_mcp_the_remedy_is_told(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['mcp'] = None\nfrom memlog.cli.main import main\n"
        "sys.argv = ['memlog', 'mcp', *sys.argv[1:]]\nmain()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "memlog: the server needs the package 'mcp', version 2 or newer: pip install 'mcp>=2'\n"
    )
    skill = subprocess.run([*command, "--skill"], capture_output=True, text=True, check=True)
    assert skill.stdout.startswith("---\nname: memlog\n")
