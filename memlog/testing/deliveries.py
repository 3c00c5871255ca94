"""Contract tests in which an uploader delivers a whole run to a sink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import DeliveryError, TrackerRejectedError
from memlog.journal import RunDirectory
from memlog.sink import Sink, Target, TrackerRun
from memlog.testing.interrupted import Fault, InterruptedSink, OddError, odd, refused, unavailable
from memlog.testing.made import BEGUN_US, CONTENT, ENDED_US, FACTS, alert, plan_of, recorded
from memlog.testing.readback import TrackerChecks

_AT_MOST = 200
"""Maximum number of calls in one delivery. If a delivery takes more calls, the test fails."""
_SOURCE = ("file", "source")


class DeliveryContract(TrackerChecks):
    """Tests that a recorded run arrives completely and without duplicates, whichever call fails."""

    def test_a_whole_run_arrives_once(self, tmp_path: Path) -> None:
        """If no call fails, nothing is stored twice, whether the sink is durable or not."""
        run = recorded(tmp_path)
        tracked = self._deliver(run, Fault(-1))
        self._has_all_of(run, tracked, Fault(-1), repeated=False)

    def test_a_failure_at_any_call_loses_nothing_and_doubles_nothing(self, tmp_path: Path) -> None:
        """Each call in turn fails, before or after it is executed. Another uploader then continues."""
        for answered in (False, True):
            folder = tmp_path / str(answered)
            self._check_each_failure(folder, partial(Fault, answered=answered, error=unavailable))

    def test_a_refusal_of_any_call_costs_that_alone(self, tmp_path: Path) -> None:
        """Refused data is counted, and everything else arrives."""
        self._check_each_failure(tmp_path, partial(Fault, error=refused))

    def test_an_odd_error_of_any_call_loses_nothing(self, tmp_path: Path) -> None:
        """An unexpected exception of a client counts as an unreachable tracker."""
        self._check_each_failure(tmp_path, partial(Fault, answered=True, error=odd))

    def _check_each_failure(self, root: Path, fault_at: Callable[[int], Fault]) -> None:
        """Make one call of an uploader fail, and check that another uploader completes the delivery.

        Repeat this for each call.
        """
        for at in range(_AT_MOST):
            fault = fault_at(at)
            run = recorded(root / str(at))
            with suppress(DeliveryError, OddError):
                self._deliver(run, fault)
            self.process_ends()
            tracked = self._deliver(run, Fault(-1), lost=_lost_to(fault))
            self._has_all_of(run, tracked, fault, repeated=fault.failed is not None)
            if fault.failed is None:
                return
        raise AssertionError(f"delivering takes more than {_AT_MOST} calls")

    def _has_all_of(
        self, run: RunDirectory, tracked: TrackerRun, fault: Fault, *, repeated: bool
    ) -> None:
        """Check that a recorded run has arrived, except the data that the tracker refused."""
        lost = _lost_to(fault)
        alone = fault.points if fault.refuses and len(fault.points) == 1 else ()
        wanted = [point for point in plan_of(run) if point not in alone]
        self._holds(tracked, wanted, repeated=repeated, ordered=False)
        if not (fault.failed == "log_parameters" and fault.refuses):
            self._holds_facts(tracked, FACTS)
        self._holds_alerts(
            tracked, [] if "alerts_rejected" in lost else [alert(3)], repeated=repeated
        )
        self._holds_files(tracked, {} if "artifact_rejected" in lost else {_SOURCE: CONTENT})
        self._has_ended(tracked, "failed", ENDED_US)

    def _deliver(
        self, run: RunDirectory, fault: Fault, lost: Counter[str] | None = None
    ) -> TrackerRun:
        def open_sink(target: Target) -> Sink:
            return cast("Sink", InterruptedSink(self.open_sink(target), fault))

        uploader = Uploader(run, "conformance", open_sink, begun_us=BEGUN_US, may_open_own=True)
        uploader.deliver(complete=True)
        uploader.close()
        if uploader.refused is not None:
            raise TrackerRejectedError(uploader.refused)
        assert uploader.state.own_run is not None
        assert uploader.state.dropped == (_lost_to(fault) if lost is None else lost)
        return TrackerRun(uploader.state.own_run.run_id)


def _lost_to(fault: Fault) -> Counter[str]:
    """Return the number of losses that a fault causes, by reason.

    If a call with several points is refused, the uploader sends the points again, in two halves. So a refused
    point is lost only if it was sent alone.
    """
    if not fault.refuses:
        return Counter()
    reasons = {"log_alerts": "alerts_rejected", "log_artifact": "artifact_rejected"}
    if fault.failed == "log_points" and len(fault.points) == 1:
        return Counter({f"rejected: {fault.points[0].name}": 1})
    return Counter(reasons[method] for method in [fault.failed] if method in reasons)
