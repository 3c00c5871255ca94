"""Detection of runs that the user opens in a tracker, their parameters, and the numbers of their steps.

Other libraries with trainers load memlog's callback themselves, or the script passes the callback. memlog
uses no entry points for this, because reading them would take milliseconds at every ``init``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics, warn
from memlog._internal.redact import remember
from memlog._internal.terminal import MIB
from memlog.autolog.users_axis import UsersAxis
from memlog.bus import EventBus
from memlog.delivery.helper.protocol import Connect, Join, Message
from memlog.errors import MemlogError
from memlog.events import DeviceReading, Parameters, Status, ThreadStep, UsersNumber, now_us
from memlog.journal import Binding, JournalWriter, binding_of
from memlog.metrics import bucket_start
from memlog.probes.accelerator import AcceleratorProbe
from memlog.settings import Settings
from memlog.sink import (
    DISABLED,
    Backend,
    Connection,
    EndingBackend,
    InProcessBackend,
    JoinableBackend,
    NumberingBackend,
    ResumableBackend,
    TrackerRun,
    load_backend,
)

if TYPE_CHECKING:
    from memlog.in_process.writer import InProcessWriter


MAX_NUMBER = 2**53
"""Largest step number that memlog accepts, because trackers and web pages store numbers as floats."""


class RunOffsets:
    """Offset of each tracker's run (`memlog.journal.Binding.offset`): the session's step minus the run's.

    A backend's first run has the session's step numbers. Each later run begins at step 0. A run that an
    earlier session wrote to goes on after its last step, unless the user has passed ``initial_step``. If the
    trainer has its own step numbers, `begin_at` changes the offset. If nothing is known of a run's earlier
    steps, `number_first_row` takes the user's own number. If the user returns to a run, the run keeps its
    offset.

    Args:
        opened_own: Function that takes a backend's name. It returns True if memlog has opened its own run in
            this backend. In this case, the user's first run also begins at step 0.
        initial_step: The session's first step.
    """

    _reached: ClassVar[dict[tuple[str, str], int]] = {}
    """Last step of each run that an earlier session of this process wrote to, by backend and id."""

    def __init__(self, opened_own: Callable[[str], bool], initial_step: int) -> None:
        self._opened_own = opened_own
        self._initial_step = initial_step
        self._by_run: dict[tuple[str, str], int] = {}
        self._without_step: dict[str, str] = {}
        self._unsure: set[tuple[str, str]] = set()
        """Runs that begin at step 0 because nothing else is known."""
        self._next: dict[tuple[str, str], int] = {}
        """Next step of each run whose thread does not lead (`memlog.autolog.optimizer_steps`)."""
        self._left: dict[tuple[str, str], int] = {}
        """The session's next step when the events of each run ended, because another run was joined."""

    def joined(
        self, backend: str, run_id: str, next_step: int, last_step: int | None, *, is_first: bool
    ) -> int:
        """Return the offset of a run that was joined before the session's step ``next_step``.

        ``last_step`` is the last step that the run has from an earlier process; ``None``: it has none, or the
        step is unknown. ``is_first``: no other run of this backend was joined before.
        """
        key = backend, run_id
        if key in self._next:
            self._by_run[key] = next_step - self._next.pop(key)
        known = self._by_run.get(key)
        if known is not None:
            return known
        continues = is_first and not self._opened_own(backend)
        self._without_step[backend] = run_id
        begin = self._initial_step if continues else next_step
        last_steps = (last_step, self._reached.get((backend, run_id)))
        numbers = [step + 1 for step in last_steps if step is not None]
        if not numbers and not (continues and self._initial_step):
            self._unsure.add((backend, run_id))
        elif continues and self._initial_step:
            begin, numbers = 0, []  # the run has the session's step numbers
        offset = self._by_run[backend, run_id] = begin - max(numbers, default=0)
        return offset

    def number_first_row(
        self, backend: str, run_id: str, number: int | None, step: int | None
    ) -> int | None:
        """Take the user's number of a run's first row, if it is the number of the run's first step, too.

        Return the amount by which the run's steps rise; ``None``: memlog can't know the step at which the run
        begins.

        Args:
            backend: The run's backend.
            run_id: The run's id.
            number: The user's number; ``None``: the user gave none.
            step: The run's last completed step; ``None``: there is none yet.
        """
        if (backend, run_id) not in self._unsure:
            return 0
        self._unsure.discard((backend, run_id))
        # After several steps, the user's numbers may count something else, such as epochs or samples.
        if number is None or (step and number > step):
            return None
        rise = 0 if step else number
        self._by_run[backend, run_id] -= rise
        return rise

    def end(self, backend: str, run_id: str, last_step: int) -> None:
        """Keep the session's last step in a run, for a later session of this process."""
        self._reached[backend, run_id] = last_step - self._by_run[backend, run_id]

    def leave(self, backend: str, run_id: str, next_step: int) -> None:
        """Note that events from ``next_step`` on belong to another run of the backend."""
        self._left[backend, run_id] = next_step

    def step_beside(
        self, backend: str, run_id: str, next_step: int, last_step: Callable[[], int | None]
    ) -> int:
        """Count a step of a run whose thread does not lead, and return its number in the run.

        The arguments are those of `joined`.
        """
        key = backend, run_id
        if key not in self._next:
            known = self._by_run.get(key)
            if known is None:
                last = last_step()
                self._next[key] = 0 if last is None else last + 1
            else:
                self._next[key] = self._left.get(key, next_step) - known
        self._next[key] += 1
        return self._next[key] - 1

    def of(self, backend: str, run_id: str) -> int:
        """Return the offset of a run that was joined."""
        return self._by_run[backend, run_id]

    def begin_at(self, step: int, number: int | None) -> list[tuple[str, str, int]]:
        """If a backend's newest run has no step yet, let the run begin with the session's step ``step``.

        ``number`` is the trainer's number for the step; ``None``: there is none. The run uses the trainer's
        number for the step, too. Return backend, id and offset of each run whose offset has changed.
        """
        if not self._without_step:
            return []
        begin, self._without_step = self._without_step, {}
        changed = []
        for backend, run_id in begin.items():
            offset = self._by_run[backend, run_id]
            if number is not None:
                self._unsure.discard((backend, run_id))
            if number is not None and offset != step - number:
                self._by_run[backend, run_id] = step - number
                changed.append((backend, run_id, step - number))
        return changed


class TrainerNumbers:
    """Conversion of a trainer's own numbers to the session's steps, which only rise."""

    def __init__(self) -> None:
        self._shift = 0

    def step_of(self, number: int, next_step: int) -> int:
        """Return the session's step for a trainer's number.

        If the trainer's number jumps ahead, the session's step does, too. If the number goes back, the
        session's step is ``next_step``.
        """
        if number + self._shift < next_step:
            self._shift = next_step - number
        return number + self._shift

    def recorded(self, number: int, step: int) -> None:
        """Note that the trainer's step ``number`` is the session's step ``step``."""
        self._shift = step - number


def checked_number(number: object, diagnostics: Diagnostics) -> int | None:
    """Return a step's number as an integer; ``None`` if it is missing or invalid.

    ``diagnostics`` counts invalid numbers, and prints a warning about the first one.
    """
    if number is None:
        return None
    with diagnostics.contained("reading a step's number"):
        if not isinstance(number, bool) and hasattr(number, "__index__"):
            found = int(number.__index__())
            if 0 <= found <= MAX_NUMBER:
                return found
        diagnostics.drop(
            "step_number",
            f"{number!r:.100} is not a valid step number, so memlog uses its own count: pass a whole number, "
            "0 or more",
        )
    return None


@dataclass(eq=False)
class RunDetector:
    """Detector of the user's active runs.

    Its methods are called on the thread that publishes the events, because MLflow has one active run per
    thread.
    """

    _backends: Mapping[str, Backend]
    _journal: JournalWriter
    _tell: Callable[[Message], None]
    """Function that sends the helper process a message on how to reach the run."""
    _diagnostics: Diagnostics
    _writers: Mapping[str, InProcessWriter] = field(default_factory=dict)
    _on_in_process: Callable[[], object] = int
    """Function called when the training process itself begins to write to a run, or to watch for its end.

    The call is made on the thread that publishes the events."""
    _on_joined: Callable[[str, Binding], object] = lambda *_: None
    """Function that is called after a run was joined. It gets the backend's name and the run.

    The call is made on the thread that publishes the events."""
    _may_join: Callable[[], bool] = lambda: True
    """Function that returns True if this rank may join the user's runs."""
    _opened_own: Callable[[str], bool] = lambda _: False
    """Function that takes a backend's name, and returns whether memlog has opened its own run there."""
    _on_end: Callable[[str, str, Status], object] = lambda *_: None
    """Function that is called on the user's thread before a joined run ends. It gets the backend's name, the
    run's id and the status. It does not raise."""
    _initial_step: int = 0
    joined: bool = field(default=False, init=False)
    """True if a run was joined since the last step."""
    _runs: dict[str, TrackerRun] = field(default_factory=dict, init=False)
    """Newest joined run of each backend, by the backend's name."""
    _not_wanted: dict[str, str | None] = field(default_factory=dict, init=False)
    """For each backend, the id of the run that was active at the last call of `join`; ``None``: no run.

    `join_new_runs` ignores this run until another run is active."""
    _looked_for: set[str] = field(default_factory=set, init=False)
    """Names of backends that `_look_for` has tried to load. Each name is tried only once, because an attempt
    takes some milliseconds, and a loop may call `join` at each step."""
    _connections: dict[str, Connection] = field(default_factory=dict, init=False)
    _ends: dict[str, Callable[[], object]] = field(default_factory=dict, init=False)
    """Functions that stop watching for runs that end, by the backend's name."""

    def __post_init__(self) -> None:
        self._offsets = RunOffsets(self._opened_own, self._initial_step)
        self._numbering = [
            (name, one) for name, one in self._backends.items() if isinstance(one, NumberingBackend)
        ]
        self._axes: dict[tuple[str, str], UsersAxis] = {}
        """Axis of the user's numbers in a run, by backend and id."""
        self.looks_for_runs = bool(self._backends)
        """False if no run can be joined, because the session uses no tracker."""

    def join_new_runs(self, next_step: int) -> None:
        """Join runs opened since the last call, in about a microsecond per backend. Never raises."""
        for name, backend in self._backends.items():
            try:
                run = backend.active_run()
                if run is None or not self._is_new(name, run) or not self._is_wanted(name, run):
                    continue
                if self._may_join():
                    self._join(name, run, next_step)
            except Exception as error:  # noqa: BLE001 - a tracker's error must not reach the trainer
                self._diagnostics.fault(f"looking for a run in {name}", error)

    def join(self, name: str, known: TrackerRun, next_step: int) -> None:
        """Join ``known``, a run of one of the user's loggers. Never raises.

        memlog writes to the run until the user opens another run. If the session does not use the backend
        ``name``, no run is joined. Unknown fields of ``known`` are ``None``.
        """
        if not self._may_join():
            return
        with self._diagnostics.contained(f"joining a run in {name}"):
            backend = self._backends.get(name)
            if backend is None:
                self._look_for(name, known)
                return
            active = backend.active_run()
            run: TrackerRun | None = known
            if isinstance(backend, JoinableBackend):
                run = backend.run_of(known.run_id, known.uri, known.name)
            if run is None:
                self._diagnostics.say_once(
                    f"join {name} {known.run_id}",
                    f"{name} run {known.run_id} is not open in this process, so memlog can't join it",
                )
                return
            self._not_wanted[name] = None if active is None else active.run_id
            if self._is_new(name, run):
                self._join(name, run, next_step)

    def _look_for(self, name: str, known: TrackerRun) -> None:
        """If the backend of the run ``known`` can't be loaded, print why memlog does not join the run."""
        if name in self._looked_for:
            return
        self._looked_for.add(name)
        try:
            load_backend(name)
        except MemlogError as error:
            self._diagnostics.say_once(f"join {name}", f"run {known.run_id} is not joined: {error}")

    def begin_step(self, step: int, number: int | None) -> bool:
        """Join new runs. Return True if a run was joined since the last step. Never raises.

        Joined runs that have no step yet begin with ``step``. ``number`` is the trainer's own number of this
        step; ``None``: the trainer gave none.
        """
        self.join_new_runs(step)
        for name, run_id, offset in self._offsets.begin_at(step, number):
            with self._diagnostics.contained("counting the steps of a run"):
                if self._runs[name].run_id == run_id:
                    self._point_to(name, self._runs[name], offset)
        for name, backend in self._numbering:
            if name in self._runs:
                self._follow_numbers(name, backend, step)
        joined, self.joined = self.joined, False
        return joined

    def _follow_numbers(self, name: str, backend: NumberingBackend, step: int) -> None:
        """Let memlog's steps in a run go on from the user's numbers, if these are on another axis."""
        try:
            run_id = self._runs[name].run_id
            axis = self._axes.get((name, run_id))
            if axis is None:
                axis = self._axes[name, run_id] = UsersAxis()
            own = step - self._offsets.of(name, run_id)
            numbers = backend.take_numbers(self._runs[name])
            number = axis.number_to_tell(own, step - self._initial_step, numbers)
            if number is not None:
                self._journal.append(UsersNumber(now_us(), name, run_id, own, number))
        except Exception as error:  # noqa: BLE001 - a tracker's error must not reach the trainer
            self._diagnostics.fault(f"reading the user's step numbers in {name}", error)

    def number_first_row(self, name: str, run_id: str, number: int | None, step: int | None) -> int:
        """Take the user's number of a run's first row (`RunOffsets.number_first_row`). Never raises.

        Return the amount by which the run's steps rise.
        """
        rise: int | None = 0
        with self._diagnostics.contained("counting the steps of a run"):
            known, backend = self._runs[name], self._backends[name]
            rise = self._offsets.number_first_row(name, run_id, number, step)
            if rise:
                self._point_to(name, known, self._offsets.of(name, run_id))
            elif (
                rise is None and isinstance(backend, ResumableBackend) and backend.may_go_on(known)
            ):
                self._diagnostics.say_once(
                    f"first step {run_id}",
                    f"{name} does not tell which steps run {run_id} has already, so memlog counts from 0: "
                    "if the run goes on, pass initial_step=N to memlog.init() (N: number of the next step)",
                )
        return rise or 0

    def is_newest(self, name: str, run_id: str) -> bool:
        """Return True if events now belong to this run of the backend ``name``."""
        known = self._runs.get(name)
        return known is not None and known.run_id == run_id

    def note_names(self) -> None:
        """Note the present names of the newest runs. The user can have renamed a run since it was joined."""
        for name, known in self._runs.items():
            backend = self._backends[name]
            with self._diagnostics.contained(f"reading the name of a run in {name}"):
                if not isinstance(backend, JoinableBackend):
                    continue
                run = backend.run_of(known.run_id, known.uri, known.name)
                if run is not None and run.name not in (None, known.name):
                    self._runs[name] = run
                    self._point_to(name, run, self._offsets.of(name, run.run_id))

    def note_last_step(self, last_step: int) -> None:
        """Keep the session's last step, for a later session of this process with the same runs."""
        for name, known in self._runs.items():
            self._offsets.end(name, known.run_id, last_step)

    def watch_no_ends(self) -> None:
        """Stop watching for runs that end."""
        for name, stop in self._ends.items():
            with self._diagnostics.contained(f"ending the watch for runs in {name}"):
                stop()
        self._ends.clear()
        for name, backend in self._numbering:
            with self._diagnostics.contained(f"ending the watch for step numbers in {name}"):
                backend.see_no_numbers()

    def resolve_active_runs(self) -> None:
        """Let each backend resolve the address of its active run. Join no run.

        Call this method before the user changes the working directory.
        """
        for name, backend in self._backends.items():
            with self._diagnostics.contained(f"looking for a run in {name}"):
                backend.active_run()

    def connect(self) -> None:
        """Send the helper process each client's connection data. Users can set this data after ``init``."""
        for name, backend in self._backends.items():
            with self._diagnostics.contained(f"finding out how {name} connects"):
                connection = backend.connection()
                if connection != self._connections.get(name):
                    self._connections[name] = connection
                    remember(connection.uri, *connection.environment.values())
                    self._tell(Connect(name, connection))

    def step_beside(self, next_step: int, rss: int | None) -> None:
        """Write a step of a thread whose steps are not the session's, for the thread's own run. Never raises.

        ``next_step`` is the session's. ``rss`` is the process's memory now.
        """
        for name, backend in self._backends.items():
            if name in self._writers:
                continue  # these trackers have one run for all threads
            with self._diagnostics.contained(f"recording a thread's step in {name}"):
                run = backend.active_run()
                if run is None or self.is_newest(name, run.run_id) or not self._may_join():
                    continue
                last_step = partial(self._last_step, name, run)
                step = self._offsets.step_beside(name, run.run_id, next_step, last_step)
                if rss is not None and step == bucket_start(step):
                    uri = binding_of(run).uri
                    self._journal.append(ThreadStep(now_us(), name, run.run_id, uri, step, rss))

    def _last_step(self, name: str, run: TrackerRun) -> int | None:
        backend = self._backends[name]
        if isinstance(backend, ResumableBackend):
            with self._diagnostics.contained(f"reading the last step of a run in {name}"):
                return backend.last_step(run)
        return None

    def _is_new(self, name: str, run: TrackerRun) -> bool:
        known = self._runs.get(name)
        if known is None or run.run_id != known.run_id:
            return True
        writer = self._writers.get(name)
        return writer is not None and writer.is_over(run.run_id)

    def _is_wanted(self, name: str, run: TrackerRun) -> bool:
        """Return False if ``run`` was active at the last call of `join`, and no other run became active."""
        if name not in self._not_wanted:
            return True
        if run.run_id == self._not_wanted[name]:
            return False
        del self._not_wanted[name]
        return True

    def _join(self, name: str, run: TrackerRun, next_step: int) -> None:
        is_first = name not in self._runs
        if not is_first:
            self._offsets.leave(name, self._runs[name].run_id, next_step)
        self._runs[name] = run
        self.joined = True
        self.connect()
        remember(run.uri)
        writer, backend = self._writers.get(name), self._backends[name]
        if writer is not None and isinstance(backend, InProcessBackend):
            writer.begin(backend.open_in_process(run), kept=binding_of(run).uri != DISABLED)
            self._on_in_process()
        if isinstance(backend, EndingBackend) and name not in self._ends:
            self._ends[name] = backend.watch_ends(partial(self._on_end, name))
            self._on_in_process()
        last_step = self._last_step(name, run)
        offset = self._offsets.joined(name, run.run_id, next_step, last_step, is_first=is_first)
        self._on_joined(name, self._point_to(name, run, offset))

    def _point_to(self, name: str, run: TrackerRun, offset: int) -> Binding:
        """Assign all later events to ``run``, in the journal and in the helper process.

        ``offset`` is the session's step number minus the run's step number.
        """
        binding, writer = binding_of(run, offset), self._writers.get(name)
        if writer is not None:
            writer.count_from(run.run_id, offset)
            run = TrackerRun(run.run_id, binding.uri)
        run = msgspec.structs.replace(run, name=binding.name)
        self._tell(Join(name, run, in_process=writer is not None, offset=offset))
        self._journal.bind(name, binding)
        return binding


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
            **processes.described(),
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


TRAINER = "transformers.trainer"
_PACKAGE = "memlog_transformers"


def load_package(_module: object) -> None:
    """Import ``memlog_transformers``. Never raises, because the script's own import must not fail."""
    try:
        __import__(_PACKAGE)
    except Exception as error:  # noqa: BLE001 - see above
        warn(
            f"memlog: {_PACKAGE} can't be imported ({error!r}), so memlog counts optimizer steps, not the "
            "Trainer's steps: update memlog and transformers"
        )
