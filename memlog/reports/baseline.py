"""Baseline file: the figures of trainings, kept with the code, against which later runs are compared.

A file has one entry for each training, by the name of its runs. It is sorted JSON, so that a change of the
file shows what a change of the code did::

    {
      "schema": 1,
      "trainings": {
        "tiny model": {
          "categories": {"activations": 31457280, "parameters": 1572864},
          "figures": {"host.rss": [426246144, 426512384, 426790912], "trace.peak": 42782720},
          "layers": {"block1": 5242880}
        }
      }
    }

Sizes are bytes. A figure that differs from run to run stands there with its value in each repeat. It is left
out if there was one run only. Times are left out, because they are those of one machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, TypeAlias

import msgspec

from memlog._internal.safe_files import replacing
from memlog._internal.terminal import one_line
from memlog.errors import ConfigurationError, RunNotFoundError
from memlog.events import HOST_RSS, TREE
from memlog.reports.figures import TRACE_PEAK, RunFigures

UNNAMED_TRAINING = "training"
"""Name of the entry of runs without a name."""
_SHOWN = 5
"""Maximum number of names that a message lists."""
_DETERMINISTIC = (TRACE_PEAK, "device.peak", "device.allocated")
"""Figures that count the bytes of tensors. So one run is enough."""
_NOISY = (HOST_RSS, TREE, "device.reserved")
"""Figures that differ from run to run. A file has them only with the values of several repeats."""

_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
_Values: TypeAlias = Annotated[list[_Number], msgspec.Meta(min_length=1)]


class Baseline(msgspec.Struct, frozen=True):
    """Figures of one training, in bytes. A list has one value for each repeat."""

    figures: dict[str, _Number | _Values] = {}
    categories: dict[str, int] = {}
    layers: dict[str, int] = {}

    def as_run(self, file: Path, name: str) -> RunFigures:
        """Return the entry in the form of a run, whose id is the name of the file."""
        repeats = {
            figure: tuple(value) if isinstance(value, list) else (value,)
            for figure, value in self.figures.items()
        }
        return RunFigures(
            id=file.name,
            name=name,
            status="finished",
            steps=None,
            figures={figure: fmean(values) for figure, values in repeats.items()},
            categories=self.categories,
            layers=self.layers,
            traced_peak=None,
            trace_peak_from=None,
            repeats=repeats,
        )


class _File(msgspec.Struct):
    schema: Literal[1]
    trainings: dict[str, Baseline]


def baseline_of(run: RunFigures) -> Baseline:
    """Return the entry of a training for a baseline file. ``run`` may be the figures of several repeats."""
    kept: dict[str, float | list[float]] = {}
    for name in (*_DETERMINISTIC, *_NOISY):
        value = run.figures.get(name)
        if value is None:
            continue
        values = sorted(run.repeats.get(name, (value,)))
        if len(set(values)) == 1 and (name in _DETERMINISTIC or len(values) > 1):
            kept[name] = _short(values[0])
        elif len(values) > 1:
            kept[name] = [_short(each) for each in values]
    return Baseline(kept, dict(run.categories), dict(run.layers))


def read_baselines(file: Path) -> dict[str, Baseline]:
    """Return the entries of a baseline file, by the trainings' names.

    Raises:
        ConfigurationError: The file does not exist, can't be read, or is no baseline file.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no baseline file {file}: the same command with --update writes it"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"can't read the baseline file {file}: {error.strerror}") from None
    try:
        return msgspec.json.decode(content, type=_File).trainings
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file} is no baseline file of memlog ({one_line(str(error))}): restore it, or delete it and "
            "write it again with --update"
        ) from None


def update_baselines(file: Path, changed: Mapping[str, Baseline]) -> dict[str, Baseline]:
    """Write the entries of trainings into a baseline file, which may be missing. Other entries stay.

    Return the entries before.

    Raises:
        ConfigurationError: The file exists and is no baseline file.
        OSError: The file can't be written, or its folder does not exist.
    """
    before = read_baselines(file) if file.exists() else {}
    trainings = msgspec.to_builtins({**before, **changed})
    document = {"schema": 1, "trainings": trainings}
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    with replacing(file.absolute().parent, file.name) as written:
        written.write(f"{text}\n".encode())
    return before


def find_baseline(file: Path, trainings: Mapping[str, Baseline], name: str) -> RunFigures:
    """Return the entry of the training ``name``, in the form of a run.

    Raises:
        RunNotFoundError: The file has no such entry.
    """
    if name not in trainings:
        names = sorted(trainings)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise RunNotFoundError(
            f"{file} has no training {name!r}, only {', '.join(map(repr, names[:_SHOWN])) or 'none'}{more}: "
            "add it with --update, or give the run one of these names"
        )
    return trainings[name].as_run(file, name)


def _short(value: float) -> float:
    """Return a whole number as an integer, and another one with three decimals."""
    return int(value) if value == int(value) else round(value, 3)
