"""Tools of ``memlog mcp``. They return what the commands print."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import anyio
import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from memlog._internal.redact import without_credentials
from memlog._internal.terminal import lines
from memlog._version import __version__
from memlog.cli.advise import advice_for_run
from memlog.cli.output import find_explained_run
from memlog.cli.runs import RunList, run_lines
from memlog.errors import MemlogError
from memlog.journal import RunDirectory, list_runs
from memlog.reports import encode, summarize
from memlog.reports.brief import brief
from memlog.reports.compare import compare
from memlog.reports.figures import run_figures
from memlog.reports.gates import parse_gate
from memlog.settings import runs_directory

INSTRUCTIONS = (
    "memlog records the memory of trainings (PyTorch and others) in folders of runs. Begin with `show`: it "
    "tells in a few lines whether memory grew or ran out, why, where, and what helps. `runs` lists the runs, "
    "`compare` shows what a change has done, `advise` predicts what would lower the peak, and `estimate` "
    "tells before a training whether a step fits. Sizes are in bytes. An unknown value is null, never 0. If "
    "there is no run yet, record one with the command `memlog run -- python train.py`."
)
_MOST_ERROR = 3000
"""Maximum characters of a script's error that an agent gets: the end, with the exception."""

_Tool = TypeVar("_Tool", bound=Callable[..., Any])
_Folder = Annotated[
    str | None,
    Field(
        description="Folder that holds the runs; by default the one with which the server was started."
    ),
]
_Run = Annotated[
    str,
    Field(description="A run's id or the id's beginning, its name in a tracker, or 'latest'."),
]


def _telling(tool: _Tool) -> _Tool:
    """Turn memlog's errors, each of which ends with the remedy, into errors that the agent reads."""

    @functools.wraps(tool)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except (MemlogError, OSError) as error:
            raise ToolError(without_credentials(str(error))) from error

    return call  # type: ignore[return-value]


class AgentTools:
    """The tools that read runs. ``directory`` is the folder of runs; ``None``: the default folder."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @_telling
    def runs(
        self,
        most: Annotated[int, Field(ge=1, description="Number of the newest runs to list.")] = 20,
        directory: _Folder = None,
    ) -> dict[str, Any]:
        """List the runs, the newest last: id, name, status, steps, peaks and delivery to trackers."""
        all_runs = list_runs(self._root(directory))
        return _document(RunList(runs=run_lines(all_runs[-most:])))

    @_telling
    def show(
        self,
        run: _Run = "latest",
        detail: Annotated[
            Literal["brief", "all"],
            Field(description="'brief': at most 300 tokens; 'all': every field as JSON."),
        ] = "brief",
        directory: _Folder = None,
    ) -> str:
        """Tell whether a run's memory grew or ran out, with cause, place, remedy and next step."""
        named_run = self._find(run, directory)
        summary = summarize(named_run)
        return (
            "\n".join(brief(named_run, summary)) if detail == "brief" else encode(summary).decode()
        )

    @_telling
    def compare(
        self,
        runs: Annotated[list[str], Field(min_length=2, description="Runs; the first is the base.")],
        gates: Annotated[
            list[str],
            Field(description="Conditions that must not hold, such as 'device.peak > +5%'."),
        ] = [],  # noqa: B006 - the schema shows the default, and nothing changes it
        allow_unfinished: Annotated[
            bool, Field(description="Also judge runs that failed or still run.")
        ] = False,
        directory: _Folder = None,
    ) -> dict[str, Any]:
        """Compare runs: peaks, step time, categories and layers, with changes in per cent."""
        figures = [run_figures(self._find(name, directory)) for name in runs]
        parsed = [parse_gate(text) for text in gates]
        return _document(compare(figures, parsed, allow_unfinished=allow_unfinished))

    @_telling
    def advise(
        self,
        run: _Run = "latest",
        fit: Annotated[
            str | None,
            Field(
                description="Size such as '24 GiB', for the cheapest changes with which the step fits."
            ),
        ] = None,
        directory: _Folder = None,
    ) -> dict[str, Any]:
        """Tell what holds the memory of a run's worst step, and predict which changes would lower the peak.

        The run needs a traced step: `memlog run --layers`, or `memlog.init(layers=True)`.
        """
        return _document(advice_for_run(self._find(run, directory), fit))

    def _root(self, directory: str | None) -> Path:
        return runs_directory(directory or self._directory)

    def _find(self, run: str, directory: str | None) -> RunDirectory:
        return find_explained_run(self._root(directory), run)


def _document(document: msgspec.Struct) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return decoded


async def estimate(
    target: Annotated[
        str,
        Field(
            description="SCRIPT.PY:FUNCTION. The function gets a batch size (and a length), and returns "
            '{"step": …, "model": …, "optimizer": …}, as for memlog.estimate.'
        ),
    ],
    batch: Annotated[list[int] | None, Field(description="Batch sizes.")] = None,
    length: Annotated[list[int] | None, Field(description="Sequence lengths.")] = None,
    device: Annotated[
        str | None,
        Field(description="The device's memory, such as '80 GiB', or 'cuda', 'cpu' or a GPU."),
    ] = None,
    gpu: Annotated[str | None, Field(description="The GPU's name, such as 'H100'.")] = None,
    ranks: Annotated[int | None, Field(ge=1, description="Number of processes that train.")] = None,
    fit: Annotated[
        str | None,
        Field(description="Size such as '24 GiB', for the changes with which the step fits."),
    ] = None,
) -> dict[str, Any]:
    """Estimate the memory of a training step without computing it and without a GPU.

    Runs the script, which belongs to the user, in a process of its own.
    """
    options = {
        "--batch": batch and ",".join(map(str, batch)),
        "--length": length and ",".join(map(str, length)),
        "--device": device,
        "--gpu": gpu,
        "--ranks": ranks,
        "--fit": fit,
    }
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    # The script may print, which would break the protocol on standard output. Cancellation ends the process.
    done = await anyio.run_process(
        [sys.executable, "-m", "memlog", "estimate", "--json", *given, "--", target],
        stdin=subprocess.DEVNULL,
        check=False,
    )
    # The document is the last that is printed, and begins with a line of its own.
    document = done.stdout[done.stdout.rfind(b"\n{\n") + 1 :]
    if done.returncode not in (0, 1) or not document.startswith(b"{\n"):
        text = lines(done.stderr.decode("utf-8", "replace")).strip()
        raise ToolError(without_credentials(text[-_MOST_ERROR:]))
    decoded: dict[str, Any] = msgspec.json.decode(document)
    return decoded


def server(directory: Path | None) -> MCPServer[Any]:
    """Return the server. ``directory`` is the folder of runs; ``None``: the default folder."""
    made: MCPServer[Any] = MCPServer(
        "memlog", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    runs_a_script = ToolAnnotations(
        read_only_hint=False, destructive_hint=False, open_world_hint=True
    )
    tools = AgentTools(directory)
    for tool in (tools.runs, tools.show, tools.compare, tools.advise, estimate):
        made.add_tool(
            tool,
            description=inspect.getdoc(tool),
            annotations=runs_a_script if tool is estimate else reads,
            structured_output=tool != tools.show,  # a text
        )
    return made
