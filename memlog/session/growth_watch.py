"""Growth of a session's memory: detection, search for the cause, alerts, and the verdict at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.bus import EventBus
from memlog.events import Alert, Finding, Sample
from memlog.inputs.watch import StepInputsWatch
from memlog.journal import RunDirectory
from memlog.leaks.detector import GrowthDetector
from memlog.leaks.finding_alerts import FindingAlerts
from memlog.leaks.forecast import host_free

if TYPE_CHECKING:
    from memlog.leaks.inquiry import GrowthInquiry
    from memlog.leaks.wasted_gradients import WastedGradients

Memory = Callable[[], tuple[int | None, int | None]]


class GrowthWatch:
    """Detector of memory growth in the training process, with the search for its cause. No method raises.

    ``on_alert`` is called with each alert. ``memory`` returns the anonymous and the shared bytes of this
    process at the end of the newest step. ``is_traced`` returns whether the current step is traced. If
    ``layers`` is True, memlog also searches steps for gradients that nothing uses, even while memory
    is steady.

    Attributes:
        host_limit: Bytes that the process and its children may use. `verdict` sets it. ``None``: unknown.
    """

    def __init__(
        self,
        bus: EventBus,
        diagnostics: Diagnostics,
        on_alert: Callable[[Alert], object],
        memory: Memory,
        is_traced: Callable[[], bool],
        *,
        layers: bool,
    ) -> None:
        self._layers = layers
        self._wasted: WastedGradients | None = None
        self.host_limit: int | None = None
        self._diagnostics = diagnostics
        self._is_ending = False
        self._alerts = FindingAlerts(bus.publish, on_alert, self._print_unless_ending)
        self._publish = bus.publish
        self._is_traced = is_traced
        self._begun = time.monotonic()
        self._inquiry: GrowthInquiry | None = None
        self._detector = GrowthDetector(
            os.getpid(),
            lambda growth: self._begun_inquiry().confirmed(growth),
            lambda growth: self._begun_inquiry().suspected(growth),
            lambda growth: self._begun_inquiry().withdrawn(growth),
            memory,
            lambda: self._is_inquiring,
        )
        self._inputs = StepInputsWatch(bus.publish, diagnostics, lambda: host_free(os.getpid()))
        bus.subscribe(self._alerts)
        bus.subscribe(self._detector)
        bus.subscribe(self._inputs)

    @property
    def searching(self) -> bool:
        """True while steps are searched for objects that hold memory, or for gradients that nothing uses."""
        return self._is_inquiring or (self._wasted is not None and self._wasted.watching)

    @property
    def _is_inquiring(self) -> bool:
        return self._inquiry is not None and self._inquiry.searching

    def after_step(self, step: int) -> None:
        watching = self._wasted is not None and self._wasted.watching
        if self._inquiry is not None and not watching:
            self._inquiry.after_step(step)
        if self._wasted is not None:
            self._wasted.after_step(step, busy=self._is_inquiring or self._is_traced())
        elif self._layers and "torch" in sys.modules:
            # Imported here: it loads parts of torch.
            from memlog.leaks.wasted_gradients import WastedGradients  # noqa: PLC0415

            self._wasted = WastedGradients(self._publish, self._diagnostics)

    def finish(self, last_step: int | None) -> None:
        """Judge growth for the last time, and publish the confirmed findings."""
        self._is_ending = True
        if self._wasted is not None:
            self._wasted.finish(last_step)
        with self._diagnostics.contained("judging growth a last time"):
            if self._inquiry is not None:
                self._inquiry.ends()
            self._detector.finish()
            if self._inquiry is not None:
                self._inquiry.finish()
        self._inputs.finish(last_step)

    def _begun_inquiry(self) -> GrowthInquiry:
        if self._inquiry is None:
            # Imported here: most runs never need it.
            from memlog.leaks.inquiry import GrowthInquiry  # noqa: PLC0415

            self._inquiry = GrowthInquiry(
                self._publish, self._diagnostics, self._is_traced, self._begun
            )
            if self._is_ending:
                self._inquiry.ends()
        return self._inquiry

    def verdict(self, run: RunDirectory) -> str | None:
        """Return the most important finding and its remedy; ``None`` if nothing was found.

        The findings of the run's helper process are read from the journal.
        """
        with self._diagnostics.contained("reading what was found"):
            findings = [*self._alerts.findings]
            # The user may have deleted the run's folder.
            for event in run.events("helper") if run.path.exists() else ():
                if isinstance(event, Finding):
                    findings.append(event)
                elif isinstance(event, Sample):
                    self.host_limit = event.host_limit
            if findings:
                from memlog.reports.verdict import ranked  # noqa: PLC0415 - needed only if something was found

                return _line(ranked(findings)[0])
        return None

    def _print_unless_ending(self, finding: Finding) -> None:
        """Print a finding. At the run's end, print nothing: `print_end` prints the main finding."""
        if not self._is_ending:
            say(_line(finding))


def _line(finding: Finding) -> str:
    from memlog.reports.verdict import sentence  # noqa: PLC0415 - needed only if something was found

    remedy = f" {finding.remedy}" if finding.remedy else ""
    return f"{sentence(finding)}{remedy}"
