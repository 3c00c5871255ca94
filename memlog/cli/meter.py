"""How far a delivery or a download is, drawn while it runs."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from memlog.delivery.uploader.uploader import Uploader


class Meter(Progress):
    """A bar on standard error, where that is a terminal: the journal's bytes, and the points.

    It looks at what the uploader remembers whenever it draws, which it does in a thread of its own.

    Args:
        uploader: What delivers.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader  # first: the parent's constructor draws already
        self._before = uploader.state.delivered
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[points]:,} points"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = sum(file.size for file in uploader.run.files())
        self.add_task(f"to {uploader.backend}", total=total, points=0)

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn now."""
        points = self._uploader.state.delivered - self._before
        for task in self.task_ids:
            self.update(task, completed=self._read(), points=points)
        return super().get_renderables()

    def _read(self) -> int:
        """Bytes of the journal whose points are delivered."""
        progress = dict(self._uploader.state.files)
        return sum(
            file.bytes_before(progress[file.process].sent)
            for file in self._uploader.run.files()
            if file.process in progress
        )


class TransferMeter(Progress):
    """A bar on standard error, where that is a terminal, for files that come one after the other.

    Args:
        total: Bytes of all of them; ``None`` where some size is unknown.
    """

    def __init__(self, total: int | None) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.add_task("", total=total)

    def begin(self, name: str) -> None:
        """Shows which file is coming."""
        self.update(self._task, description=name)

    def arrived(self, count: int) -> None:
        """Takes note of more bytes."""
        self.advance(self._task, count)
