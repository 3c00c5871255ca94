"""memlog's integration with Hydra: one run for each job, also in a multirun.

Add this to the configuration, or to one of its groups::

    hydra:
      callbacks:
        memlog: {_target_: memlog_hydra.MemlogCallback, backend: mlflow}
"""

from __future__ import annotations

from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

import memlog
from memlog._internal.terminal import say
from memlog.settings import LONGEST_NAME, resolve

__all__ = ["MemlogCallback"]

_SECTION = "memlog"


class MemlogCallback(Callback):
    """Record each job as a run of its own.

    The settings come from the section ``memlog`` of the job's configuration. A sweep can override this
    section. The callback's own arguments override both. If a run has no name, it gets the job's name. In
    a multirun, memlog appends the job's overrides to the job's name. All runs are in one folder, which does
    not depend on a job's working directory: by default ``memlog_runs`` in the directory where the program was
    started.

    Args:
        settings: Settings, named like the arguments of `memlog.init`, such as ``backend`` and ``alerts``.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = _plain(OmegaConf.create(settings))
        # Resolved now, because a job may have its own working directory or run on another machine.
        self._directory = resolve({}, {_SECTION: self._settings}).directory

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        """Begin the job's session. If the session can't begin, print the reason. The job goes on."""
        del task_function, kwargs
        try:
            memlog.init(config={_SECTION: self._settings_of(config)})
        except Exception as error:  # noqa: BLE001 - an error of memlog's must not end a job
            say(" ".join(f"this job goes on without being recorded ({error})".split()))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """End the job's session. If the job failed, mark the run as failed."""
        del config, kwargs
        session = memlog.current_session()
        if session is not None:
            error: BaseException | None = None
            if job_return.status == JobStatus.FAILED:
                error = job_return._return_value  # noqa: SLF001 - `return_value` would raise it
            session.__exit__(None if error is None else type(error), error, None)

    def _settings_of(self, config: DictConfig) -> dict[str, Any]:
        section = OmegaConf.select(config, _SECTION)
        own = _plain(section) if OmegaConf.is_dict(section) else {}
        given = {name: value for name, value in own.items() if value is not None}
        return {"directory": self._directory, "name": _name(config), **given, **self._settings}


def _plain(config: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}


def _name(config: DictConfig) -> str:
    """Return the run's name: the name of the job.

    In a multirun, append the job's overrides to this name. If there are none, append the job's number.
    """
    job = config.hydra.job
    if config.hydra.mode != RunMode.MULTIRUN:
        return str(job.name)
    return f"{job.name} {job.override_dirname or job.num}"[:LONGEST_NAME]
