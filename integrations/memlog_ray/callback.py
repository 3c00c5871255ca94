"""Ray Train's callback that begins a session in each worker and ends it before Ray kills the worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
from ray.train.v2._internal.execution import callback as hooks
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import WorkerGroupContext

import memlog
from memlog._internal.terminal import say
from memlog.events import Status
from memlog.settings import resolve
from memlog_ray.processes import Driver, deliver_without_this_process, variables

_LONGEST_WAIT = 3.0
"""Maximum seconds to wait for delivery when a worker shuts down. Ray kills a worker five seconds after the
shutdown begins."""


class MemlogCallback(hooks.WorkerGroupCallback, hooks.WorkerCallback, hooks.TrainContextCallback):
    """Record each worker of a Ray Train run.

    The driver is the process that calls ``fit``. Each worker uses the driver's settings, tracker address and
    folder for runs. Settings that are passed here override the driver's settings. memlog joins an MLflow run
    that is open in the driver at the call of ``fit``. memlog also joins a run that the training loop opens.

    Args:
        settings: Settings, named like the arguments of `memlog.init`, such as ``backend`` and ``alerts``.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(self, **settings: Any) -> None:
        given = msgspec.structs.asdict(resolve({}, {"memlog": settings}))
        self._settings = {name: value for name, value in given.items() if value is not None}
        self._driver = Driver()
        self._groups = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the copy that ``fit`` makes of this callback. Never raises.

        The returned state contains the `Driver`.
        """
        driver = self._driver
        if not driver.directory:
            driver = Driver(str(Path.cwd()))
            with _contained("the workers do not get the driver's trackers and runs"):
                driver.look(self._settings["backends"])
        return {**self.__dict__, "_driver": driver}

    def before_worker_group_start(self, worker_group_context: WorkerGroupContext) -> None:
        """Count the groups of workers in Ray's controller process. Ray starts a new group after a failure."""
        del worker_group_context
        self._groups += 1

    def after_init_train_context(self) -> None:
        """Begin the session, on the worker's main thread. Never raises."""
        with _contained("this worker goes on without being recorded"):
            context = get_train_context()
            settings = {"name": context.get_experiment_name(), **self._settings}
            for name, address in self._driver.addresses.items():
                os.environ.setdefault(name, address)
            with variables(  # Ray itself sets only some of them, later, and for PyTorch only
                RANK=str(context.get_world_rank()),
                WORLD_SIZE=str(context.get_world_size()),
                LOCAL_RANK=str(context.get_local_rank()),
                TORCHELASTIC_RUN_ID=context.train_run_context.run_id,
                TORCHELASTIC_RESTART_COUNT=str(self._groups - 1),
            ):
                session = memlog.init(config={"memlog": settings})
            if context.get_world_rank() == 0:
                for backend, run in self._driver.runs.items():
                    session.join_run(backend, run.run_id, uri=run.uri, name=run.name)

    @contextmanager
    def on_checkpoint_transfer(self) -> Iterator[None]:
        """Mark a checkpoint's upload as a phase, unless the upload runs parallel to the training loop."""
        waits = threading.current_thread().name.startswith("TrainingThread")
        with memlog.phase("checkpoint") if waits else nullcontext():
            yield

    def before_worker_shutdown(self) -> None:
        """End the session, also if the training loop began it. Never raises."""
        with _contained("the end of this worker's run is not recorded"):
            session = memlog.current_session()
            if session is not None:
                _finish(session)
                deliver_without_this_process(session, self._driver)


def _finish(session: memlog.Session) -> None:
    training = get_train_context().execution_context.training_thread_runner
    error, running = training.get_error(), training.is_running()
    status: Status = "killed" if running else "failed" if error else "finished"
    with suppress(BaseException):
        try:
            # `finish` takes the run's error from sys.exc_info(), so the error must be raised first.
            if error is not None:
                raise getattr(error, "_base_exc", error)
        finally:
            session.finish(status, timeout=_LONGEST_WAIT)


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Print the block's exception. If this exception were raised, Ray would end the training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        say(" ".join(f"{what} ({error})".split()))
