"""For each promise that a sink or store can break, a contract test fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from support.in_memory import IdempotentSink, InMemory, ListStore, StoreInMemory
from support.sinks import ListTracker

from memlog.errors import DeliveryError, TrackerRejectedError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, StoredArtifact, Target, TrackerRun
from memlog.testing import Shown


class LosesTheLast(IdempotentSink):
    def log_points(self, points: Sequence[Point]) -> None:
        super().log_points(points[:-1])


class LosesOtherAxes(IdempotentSink):
    def log_points(self, points: Sequence[Point]) -> None:
        super().log_points([point for point in points if point.axis == "step"])


class Reverses(IdempotentSink):
    def log_points(self, points: Sequence[Point]) -> None:
        super().log_points(points[::-1])


class DoublesReplays(IdempotentSink):
    def log_points(self, points: Sequence[Point]) -> None:
        self._tracker.points.setdefault(self._run, []).extend(points)


class DoublesAlways(IdempotentSink):
    """A sink that claims not to be durable."""

    def __init__(self, tracker: ListTracker, target: Target) -> None:
        super().__init__(tracker, target)
        self.durable = False

    def log_points(self, points: Sequence[Point]) -> None:
        self.probe()
        self._tracker.points.setdefault(self._run, []).extend([*points, *points])


class BuffersInSecret(IdempotentSink):
    """A sink that claims to be durable, but stores data only when it is closed."""

    def __init__(self, tracker: ListTracker, target: Target) -> None:
        super().__init__(tracker, target)
        self._buffered: list[Point] = []

    def log_points(self, points: Sequence[Point]) -> None:
        self._buffered += points

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        for begin in range(0, len(self._buffered), self.max_points):
            super().log_points(self._buffered[begin : begin + self.max_points])
        super().close(status, ended_us)


class LosesOddOnesInSilence(IdempotentSink):
    def log_points(self, points: Sequence[Point]) -> None:
        super().log_points([point for point in points if point.index != 2**63 - 1])


class DoublesAlerts(IdempotentSink):
    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        super().log_alerts([*alerts, *alerts], first_new)


class ShowsTheNewestAlertsAlone(IdempotentSink):
    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        super().log_alerts(alerts[first_new:], 0)


class StoresEmptyFiles(IdempotentSink):
    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        super().log_artifact(artifact, file)
        self._tracker.files[self._run][artifact.kind, artifact.name] = b""


class KeepsTheFirstFile(IdempotentSink):
    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        if (artifact.kind, artifact.name) not in self._tracker.files.get(self._run, {}):
            super().log_artifact(artifact, file)


class RefusesParameters(IdempotentSink):
    """A sink that refuses all parameters unless one of them has no name."""

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        if "" not in parameters:
            raise TrackerRejectedError("no parameters: a test says so")
        super().log_parameters(parameters)


class EndsWhatShallGoOn(IdempotentSink):
    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        super().close(status or "finished", ended_us)


class EndsTheUsersRun(IdempotentSink):
    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        super().close(status, ended_us)
        self._tracker.ended[self._run] = status


class OpensAnotherRunEachTime(IdempotentSink):
    def __init__(self, tracker: ListTracker, target: Target) -> None:
        super().__init__(tracker, target)
        self._run += "" if target.joined else str(len(tracker.points))


class HasOneRunForAll(IdempotentSink):
    def __init__(self, tracker: ListTracker, target: Target) -> None:
        super().__init__(tracker, target)
        self._run = target.joined.run_id if target.joined else "own-and-only"


class SwallowsWhatItCannotSend(IdempotentSink):
    def log_points(self, points: Sequence[Point]) -> None:
        if not self._tracker.down:
            super().log_points(points)

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        if not self._tracker.down:
            super().log_alerts(alerts, first_new)


class OpensWhatIsNotThere(IdempotentSink):
    def probe(self) -> None:
        pass

    def open(self) -> TrackerRun:
        return TrackerRun(self._run)


SINKS = [
    kind
    for kind in list(globals().values())
    if inspect.isclass(kind) and issubclass(kind, IdempotentSink) and kind is not IdempotentSink
]


class TellsOfNoFilesInAnOutage(ListStore):
    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        return [] if self.tracker.down else super().list_artifacts(run_id)


class LeavesHalfAFile(ListStore):
    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        (directory / f"{artifact.name}.part").write_bytes(b"half")
        path = super().fetch(run_id, artifact, directory, progress)
        (directory / f"{artifact.name}.part").unlink()
        return path


class TellsWrongSizes(ListStore):
    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        stored = super().list_artifacts(run_id)
        return [StoredArtifact(one.name, one.kind, 1) for one in stored]


STORES = [TellsOfNoFilesInAnOutage, LeavesHalfAFile, TellsWrongSizes]


def broken(
    contract: type[InMemory | StoreInMemory],
    folder: Path,
    *,
    at_most: int = 100,
    only: str = "test_",
) -> dict[str, str]:
    """Return the contract tests that fail, each with its own tracker, and the reasons.

    Args:
        contract: The contract.
        folder: Folder for the tests' files.
        at_most: Number of failures after which no further test is run.
        only: Beginning of the names of the tests to run.
    """
    found: dict[str, str] = {}
    # In their own order, in which those come last that take longest.
    for name in dict.fromkeys(name for base in contract.__mro__[::-1] for name in vars(base)):
        if name.startswith(only) and len(found) < at_most:
            test = getattr(contract, name)
            (folder / name).mkdir()
            made = contract()
            made.tracker = ListTracker()
            needs_folder = "tmp_path" in inspect.signature(test).parameters
            try:
                test(made, *([folder / name] if needs_folder else []))
            except (AssertionError, DeliveryError, NotImplementedError) as error:
                found[name] = repr(error)
    return found


@pytest.mark.parametrize("kind", SINKS, ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_a_broken_sink_is_found(kind: type[IdempotentSink], tmp_path: Path) -> None:
    class Contract(InMemory):
        sink = kind

    assert broken(Contract, tmp_path, at_most=1) != {}


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_a_broken_store_is_found(kind: type[ListStore], tmp_path: Path) -> None:
    class Contract(StoreInMemory):
        store = kind

    assert broken(Contract, tmp_path, at_most=1) != {}


@pytest.mark.slow
def test_unreadable_data_needs_a_reason(tmp_path: Path) -> None:
    class Silent(InMemory):
        def alerts(self, run_id: str) -> Sequence[str]:
            return super(InMemory, self).alerts(run_id)

    class Unreasoned(Silent):
        cannot_show: ClassVar[Mapping[Shown, str]] = {"alerts": "no"}

    class Reasoned(Silent):
        cannot_show: ClassVar[Mapping[Shown, str]] = {"alerts": "they are mailed, and not kept"}

    for contract in (Silent, Unreasoned, Reasoned):
        (tmp_path / contract.__name__).mkdir()
    arriving = "test_facts_alerts_and_files_arrive"
    silent = broken(Silent, tmp_path / "Silent", only=arriving)
    assert "cannot_show['alerts']" in silent[arriving]
    reason = "test_what_cannot_be_shown_has_a_reason"
    assert list(broken(Unreasoned, tmp_path / "Unreasoned", only=reason)) == [reason]
    assert broken(Reasoned, tmp_path / "Reasoned", only=arriving) == {}
