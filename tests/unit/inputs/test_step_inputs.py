"""The inputs of a step are read without an effect on the program."""

import dataclasses
import gc
import sys
import weakref
from collections import OrderedDict, UserDict
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memlog.events import TensorInput
from memlog.inputs.step_inputs import inputs_at_step_end, inputs_of_failure
from memlog.oom.circumstances import current_frames


def use(*values: object) -> None:
    """Keep variables in use. An ``assert`` would not do: pytest's rewritten one uses ``locals()``."""


def shapes(found: tuple[TensorInput, ...]) -> dict[str, tuple[int, ...]]:
    return {each.name: each.shape for each in found}


def test_tensors_and_what_holds_them() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    @dataclasses.dataclass
    class Sample:
        image: torch.Tensor
        label: int

    class BatchEncoding(UserDict):  # type: ignore[type-arg]
        pass

    def step() -> tuple[TensorInput, ...]:
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
        batch = OrderedDict(input_ids=torch.zeros(2, 3), same=tokens)
        pair = Pair(torch.zeros(4), torch.zeros(5))
        listed = [torch.zeros(6, 1)]
        sample = Sample(torch.zeros(3, 32, 32), 4)
        encoding = BatchEncoding({"ids": torch.zeros(7, 7)})
        found, _ = inputs_at_step_end()
        use(tokens, batch, pair, listed, sample, encoding)
        return found

    found = step()
    assert found[0] == TensorInput("tokens", (8, 1024), "int64")
    assert shapes(found) == {
        "tokens": (8, 1024),
        'batch["input_ids"]': (2, 3),
        "pair[0]": (4,),
        "pair[1]": (5,),
        "listed[0]": (6, 1),
        "sample.image": (3, 32, 32),
        'encoding["ids"]': (7, 7),
    }


def test_parameters_outputs_and_long_lists_are_no_inputs() -> None:
    def step() -> tuple[TensorInput, ...]:
        weight, x = torch.nn.Parameter(torch.zeros(3)), torch.zeros(2)
        output = weight * 2
        loss = torch.zeros(())
        history = [torch.zeros(1) for _ in range(17)]
        found, _ = inputs_at_step_end()
        use(weight, x, output, loss, history)
        return found

    assert shapes(step()) == {"x": (2,)}


class Odd(type):
    """Metaclass whose classes raise if they are compared or hashed."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(cls) -> int:
        raise AssertionError("hashed")


class Strange(metaclass=Odd):
    """An object that must not be touched."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("asked for its class")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("asked for its attributes")

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


class StrangeData(UserDict):  # type: ignore[type-arg]
    def __getattribute__(self, name: str) -> Any:
        if name == "data" and sys._getframe(1).f_code.co_filename.endswith("tensors.py"):
            raise AssertionError("asked for data")
        return super().__getattribute__(name)

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class StrangeDict(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise AssertionError("asked for its items")

    __iter__ = __len__ = keys = __getitem__ = items  # type: ignore[assignment]


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked the tensor")


class Mode(TorchFunctionMode):
    asked = 0

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += 1
        return func(*args, **(kwargs or {}))


def test_no_code_of_the_program_runs() -> None:
    plain, wrapped = torch.zeros(2, 2), torch.zeros(2).as_subclass(Wrapped)
    strange_data = StrangeData()
    strange_data.data["x"] = torch.zeros(3, 3)

    def step(mode: Mode) -> tuple[TensorInput, ...]:
        values = [Strange(), StrangeDict(a=torch.zeros(1, 1)), strange_data, wrapped, plain]
        with mode:
            found, _ = inputs_at_step_end()
        use(values)
        return found

    mode = Mode()
    found = shapes(step(mode))
    assert found['values[1]["a"]'] == (1, 1)
    assert found['values[2]["x"]'] == (3, 3)
    assert found["values[4]"] == (2, 2)
    assert len(found) == 3
    assert not mode.asked


def test_nothing_is_kept_alive() -> None:
    class Held:
        pass

    def step() -> list[Any]:
        held, batch = Held(), {"x": torch.zeros(4, 4), "held": [Held()]}
        seen = [weakref.ref(held), weakref.ref(batch["held"][0])]  # type: ignore[index]
        found.append(inputs_at_step_end()[0])
        del held, batch
        return [each() for each in seen]

    found: list[Any] = []
    gc.disable()
    try:
        gone = step()
    finally:
        gc.enable()
    assert gone == [None, None]
    assert found == [(TensorInput('batch["x"]', (4, 4), "float32"),)]


def test_the_variables_are_unchanged_under_a_trace_function() -> None:
    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        return follow

    def step() -> tuple[Any, ...]:
        first, second = [1], torch.zeros(3, 1)
        held = weakref.ref(second)
        found, _ = inputs_at_step_end()
        first.append(2)
        del second
        return first, held(), found

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        first, alive, _ = step()
    finally:
        sys.settrace(before)
    assert first == [1, 2]
    assert alive is None


def test_a_dictionary_from_locals_stays_as_it_is() -> None:
    def step() -> dict[str, Any]:
        rate = 0.1
        settings = locals()
        x = torch.zeros(3)
        inputs_at_step_end()
        use(rate, x)
        return settings

    assert step() == {"rate": 0.1}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals is a view")
def test_a_debuggers_dictionary_is_not_emptied() -> None:
    def step(frames: list[Any]) -> None:
        x = torch.zeros(3)
        frames[0](frames)
        inputs_at_step_end()
        use(x)

    def look(frames: list[Any]) -> None:
        frames.append(sys._getframe(1).f_locals)

    frames: list[Any] = [look]
    step(frames)
    assert "x" in frames[1]


def test_the_names_at_the_top_of_a_script() -> None:
    namespace: dict[str, Any] = {"unused": torch.zeros(9)}
    program = """
import torch
from memlog.inputs.step_inputs import inputs_at_step_end
x = torch.zeros(5, 2)
found, _ = inputs_at_step_end()
"""
    exec(compile(program, "train.py", "exec"), namespace)  # noqa: S102 - a script has globals as variables
    assert shapes(namespace["found"])["x"] == (5, 2)
    assert "unused" not in shapes(namespace["found"])
    assert "x" in namespace


class Net(torch.nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = ids * 2
        raise MemoryError(hidden.shape, mask)


def frames_of(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def test_a_failing_step_names_its_variables_and_the_models_arguments() -> None:
    def step() -> None:
        batch = {"x": torch.zeros(8, 2048)}
        Net()(batch["x"], mask=torch.ones(8, 1, 2048))

    with pytest.raises(MemoryError) as raised:
        step()
    found = shapes(inputs_of_failure(frames_of(raised.value)))
    assert found == {'batch["x"]': (8, 2048), "mask": (8, 1, 2048)}


def test_an_argument_without_a_variable_is_named_as_in_forward() -> None:
    with pytest.raises(MemoryError) as raised:
        Net()(torch.zeros(4, 4))
    assert shapes(inputs_of_failure(frames_of(raised.value))) == {"ids": (4, 4)}


def test_the_frames_of_a_failure_that_is_still_going_on() -> None:
    """CUDA's observer sees these frames before the stack unwinds."""

    class Asking(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            observed()
            return ids

    def observed() -> None:
        frames = current_frames()
        found.append(inputs_of_failure(frames))

    def step() -> None:
        x = torch.zeros(8, 64)
        model(x)
        use(x)

    found: list[tuple[TensorInput, ...]] = []
    model = Asking()
    step()
    assert shapes(found[0]) == {"x": (8, 64)}
