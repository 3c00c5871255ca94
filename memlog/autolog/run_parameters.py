"""The run's parameters and devices, published before the first event that needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memlog._internal import distributed
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.units import MIB
from memlog.autolog.run_detector import RunDetector
from memlog.bus import EventBus
from memlog.events import DeviceReading, Parameters, now_us
from memlog.probes.accelerator import AcceleratorProbe
from memlog.settings import Settings


@dataclass(eq=False)
class RunParameters:
    """Publisher of the run's parameters and of new devices.

    Attributes:
        published: True after the parameters were published. If the user opens another run, the caller sets
            False, and the new run gets the parameters, too.
    """

    _settings: Settings
    _bus: EventBus
    _run_detector: RunDetector
    _accelerators: AcceleratorProbe
    _diagnostics: Diagnostics
    _model: Any
    _before: Callable[[], object]
    _model_size: dict[str, str] = field(default_factory=dict, init=False)
    published: bool = field(default=False, init=False)

    def publish(self, devices: tuple[DeviceReading, ...]) -> None:
        """Publish new devices.

        If the parameters were not `published` yet, also publish them and send the clients' connection data.
        """
        if not self.published:
            self.published = True
            self._before()
            self._run_detector.connect()
            with self._diagnostics.contained("gathering the run's parameters"):
                self._bus.publish(Parameters(now_us(), self._values(devices)))
        for device in self._accelerators.new_devices():
            self._bus.publish(device)

    def publish_without_step(self) -> None:
        """If no step has published the parameters, publish them at an epoch or evaluation. Never raises."""
        if not self.published:
            with self._diagnostics.contained("beginning a run"):
                self.publish(self._accelerators.read())

    def _values(self, devices: tuple[DeviceReading, ...]) -> dict[str, str]:
        torch = sys.modules.get("torch")
        values = {
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": str(getattr(torch, "__version__", "not loaded")),
            "devices": ", ".join(reading.name for reading in devices) or "cpu",
            **distributed.described(),
            **self._settings.described(),
        }
        if self._model is not None:
            # Only the figures are kept, so that the user can free the model.
            self._model_size, self._model = _model_size(self._model), None
        return {**values, **self._model_size}


def _model_size(model: Any) -> dict[str, str]:
    parameters = list(model.parameters())
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return {
        "model": type(model).__name__,
        "model_parameters": str(sum(parameter.numel() for parameter in parameters)),
        "model_parameters_mib": f"{size / MIB:.1f}",
    }
