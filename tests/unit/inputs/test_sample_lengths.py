"""Lengths of samples are read from a loader's objects, and none of the program's code runs for it."""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from memlog._internal.diagnostics import Diagnostics
from memlog.events import SampleLengths
from memlog.inputs.step_inputs import LoaderWatch, lengths_of

LENGTHS = [3 + at % 50 for at in range(200)]
LONGEST = max(LENGTHS)


def collated(samples: list[Any]) -> list[Any]:
    return samples


class Untouchable(Dataset[Any]):
    """Data set whose code must not run."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, at: int) -> Any:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError(name)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError


class Collator:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __call__(self, samples: list[Any]) -> list[Any]:
        return samples


def of(data: Any, **options: Any) -> SampleLengths | None:
    options.setdefault("collate_fn", collated)
    return lengths_of(iter(DataLoader(data, **options)))


def required(found: SampleLengths | None) -> SampleLengths:
    assert found is not None
    return found


def test_the_lengths_of_transformers_sampler() -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = LengthGroupedSampler(4, lengths=LENGTHS)
    found = required(of(Untouchable(), batch_size=4, sampler=sampler))
    assert (found.source, found.longest) == ("`lengths` of LengthGroupedSampler", LONGEST)
    assert (found.samples, found.is_random) == (200, False)


@pytest.mark.parametrize("name", ["lengths", "sizes"])
@pytest.mark.parametrize("kind", [list, tuple, np.asarray])
def test_attributes_of_a_data_set(name: str, kind: Any) -> None:
    found = required(of(Untouchable(**{name: kind(LENGTHS)}), batch_size=4, shuffle=True))
    assert (found.source, found.longest) == (f"`{name}` of Untouchable", LONGEST)
    assert found.is_random
    ordered = sorted(LENGTHS, reverse=True)
    assert found.tail == (ordered[99], ordered[49], ordered[24], ordered[12], *found.tail[4:])


@pytest.mark.parametrize(
    "value",
    [
        [0.8, 0.2] * 50,
        LENGTHS[:9],
        [*LENGTHS, True],
        np.asarray([LENGTHS, LENGTHS]),
        np.asarray(LENGTHS) / 2,
        "lengths",
        [-1, *LENGTHS],
    ],
    ids=["shares", "few", "not a number", "two dimensions", "floats", "text", "negative"],
)
def test_other_attributes_are_no_lengths(value: object) -> None:
    assert of(Untouchable(lengths=value), batch_size=4) is None


def test_a_list_of_samples() -> None:
    rows = [{"input_ids": [1] * length, "label": 0} for length in LENGTHS]
    assert required(of(rows, batch_size=4)).longest == LONGEST
    tensors = [torch.zeros(length) for length in LENGTHS]
    assert required(of(tensors, batch_size=4)).longest == LONGEST
    assert of([(one, 0) for one in tensors], batch_size=4) is None


@pytest.mark.parametrize(
    "columns", [{"length": LENGTHS}, {"input_ids": [[1] * n for n in LENGTHS]}]
)
def test_columns_of_hugging_face_data_sets(columns: dict[str, Any]) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(columns)
    (name,) = columns
    found = required(of(data, batch_size=4))
    assert (found.source, found.longest) == (f"the column `{name}` of the data set", LONGEST)
    short = data.select([at for at, length in enumerate(LENGTHS) if length < 20])
    assert required(of(short.shuffle(seed=0), batch_size=4)).longest == 19
    assert of(datasets.Dataset.from_dict({"text": ["a"] * 100}), batch_size=4) is None


def test_a_collator_that_truncates() -> None:
    cut = Collator(truncation=True, max_length=20)
    found = required(of(Untouchable(lengths=LENGTHS), batch_size=4, collate_fn=cut))
    assert (found.longest, max(found.tail)) == (20, 20)
    assert found.source.endswith("truncated to the collator's `max_length`")
    only = required(of(Untouchable(), batch_size=4, collate_fn=cut))
    assert (only.longest, only.samples) == (20, 0)
    assert of(Untouchable(), batch_size=4, collate_fn=Collator(max_length=20)) is None


class Buckets(BatchSampler):
    """Batch sampler of the program, as fairseq's and torchtext's."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(RandomSampler(sizes), 4, drop_last=False)
        self.sizes = sizes

    def __bool__(self) -> bool:
        raise AssertionError


def test_a_watch_knows_the_loaders_that_are_iterated() -> None:
    watch, original = LoaderWatch(Diagnostics()), DataLoader.__iter__
    watch.begin()
    try:
        assert watch.lengths() is None
        numbers = random.getstate(), torch.get_rng_state()
        rows = [[1] * length for length in LENGTHS]
        training = iter(DataLoader(rows, batch_sampler=Buckets(LENGTHS), collate_fn=collated))
        _ = iter(DataLoader(rows[:40], collate_fn=collated))
        drawn = random.getstate()
        assert required(watch.lengths()).samples == 200
        assert (drawn, random.getstate()) == (numbers[0], numbers[0])
        assert len(next(training)) == 4
        reference = weakref.ref(training)
        del training, rows
        gc.collect()
        assert reference() is None
    finally:
        watch.stop()
    assert DataLoader.__iter__ is original


def test_a_watched_loader_yields_the_same_batches() -> None:
    def drawn() -> list[Any]:
        loader = DataLoader(list(range(64)), batch_size=4, shuffle=True, generator=None)
        torch.manual_seed(3)
        return [batch.tolist() for batch in loader] + [torch.rand(1).item()]

    expected, watch = drawn(), LoaderWatch(Diagnostics())
    watch.begin()
    try:
        assert drawn() == expected
    finally:
        watch.stop()
