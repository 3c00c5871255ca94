"""Progress bars of deliveries and downloads."""

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


class DeliveryProgress(Progress):
    """Progress bar of a delivery, with bytes and points, on standard error if that is a terminal.

    A separate thread draws the bar from the uploader's current state.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader  # first, because the parent's constructor already draws
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
        points = self._uploader.state.delivered - self._before
        for task in self.task_ids:
            self.update(task, completed=self._read(), points=points)
        return super().get_renderables()

    def _read(self) -> int:
        """Return how many bytes of the journal are delivered."""
        progress = dict(self._uploader.state.files)
        return sum(
            file.bytes_before(progress[file.process].sent)
            for file in self._uploader.run.files()
            if file.process in progress
        )


class TransferMeter(Progress):
    """Progress bar of a download of several files, on standard error if that is a terminal.

    ``total`` is the number of bytes of all files; ``None``: a size is unknown.
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
        self.update(self._task, description=name)

    def arrived(self, count: int) -> None:
        self.advance(self._task, count)
