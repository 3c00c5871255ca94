"""What a generated program keeps: the function that makes one thing of a given size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

KIB, MIB = 2**10, 2**20
Sort: TypeAlias = Literal["tensor", "graph", "copy", "array", "objects", "foreign"]

_KINDS: dict[Sort, tuple[str, ...]] = {
    "tensor": ("kept_tensors", "growing_container"),
    "graph": ("kept_graph", "forward_without_backward"),
    "copy": ("model_copies", "kept_tensors", "growing_container"),
    "array": ("growing_container", "kept_tensors", "python_memory"),
    "objects": ("growing_container", "python_memory"),
    "foreign": ("growing_container",),
}
"""Kinds of findings that name the cause, the best first."""


class Sizes(NamedTuple):
    """Sizes of a network, and of a batch of its inputs."""

    inputs: int
    hidden: int
    classes: int
    batch: int


class Thing(NamedTuple):
    """One sort of object that programs keep.

    Attributes:
        sort: Group of the thing. A ``graph`` is a tensor whose graph holds most of the bytes; ``foreign``
            things have memory that Python can't weigh.
        body: Body of the function ``make(net)``. ``{rows}`` and ``{side}`` stand for its size.
        per_row: Function that returns the bytes that one row takes.
        imports: Statements that the body needs.
        most: Maximum number of bytes that a program keeps in all, because such things are slow to make.
        setup: Statements at the beginning of the program.
        is_matrix: True if the thing is a tensor with one column for each hidden unit.
    """

    name: str
    sort: Sort
    body: str
    per_row: Callable[[Sizes], float]
    imports: tuple[str, ...] = ()
    most: int = 1024 * MIB
    setup: str = ""
    is_matrix: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return _KINDS[self.sort]

    def rows(self, size: int, sizes: Sizes) -> int:
        """Return the number of rows with which a thing takes ``size`` bytes."""
        if (
            self.sort == "copy"
        ):  # the rows are those of a table that the network has besides its layers
            size -= 4 * sizes.hidden * (sizes.inputs + sizes.classes)
        return max(1, round(size / self.per_row(sizes)))


def side(size: int) -> int:
    """Return the side of a square image of ``size`` bytes, with 4 bytes a pixel."""
    return max(16, math.isqrt(size // 4))


THINGS = (
    Thing(
        "random tensors",
        "tensor",
        "return torch.randn({rows}, {hidden})",
        lambda n: 4 * n.hidden,
        is_matrix=True,
    ),
    Thing(
        "detached outputs",
        "tensor",
        "with torch.no_grad():\n    return net.encoder(torch.randn({rows}, {inputs}))",
        lambda n: 4 * n.hidden,
        is_matrix=True,
    ),
    Thing(
        "outputs after backward",
        "tensor",
        "output = net.encoder(torch.randn({rows}, {inputs}))\n"
        "output.square().mean().backward()\n"
        "net.zero_grad()\n"
        "return output",
        lambda n: 4 * n.hidden,
        is_matrix=True,
    ),
    Thing(
        "dicts of outputs",
        "tensor",
        "with torch.no_grad():\n"
        "    scores = net.encoder(torch.randn({rows}, {inputs}))\n"
        'return {{"scores": scores, "labels": torch.randint(0, {classes}, ({rows},))}}',
        lambda n: 4 * n.hidden + 8,
    ),
    Thing(
        "outputs with their graphs",
        "graph",
        "return net(torch.randn({rows}, {inputs}))",
        lambda n: 4 * (n.inputs + n.hidden + n.classes),
    ),
    Thing(
        "losses with their graphs",
        "graph",
        "return net(torch.randn({rows}, {inputs})).square().mean()",
        lambda n: 4 * (n.inputs + n.hidden + n.classes),
    ),
    Thing(
        "copies of the state",
        "copy",
        "return {{key: value.clone() for key, value in net.state_dict().items()}}",
        lambda _: 256,
    ),
    Thing(
        "copies of the model",
        "copy",
        "return copy.deepcopy(net)",
        lambda _: 256,
        ("import copy",),
    ),
    Thing(
        "numpy arrays",
        "array",
        "return numpy.random.default_rng().random(({rows}, {hidden}))",
        lambda n: 8 * n.hidden,
        ("import numpy",),
    ),
    Thing(
        "numpy views of outputs",
        "array",
        "with torch.no_grad():\n    return net.encoder(torch.randn({rows}, {inputs})).numpy()",
        lambda n: 4 * n.hidden,
    ),
    Thing(
        "pandas frames",
        "array",
        "return pandas.DataFrame(numpy.random.default_rng().random(({rows}, 8)))",
        lambda _: 64,
        ("import numpy", "import pandas"),
    ),
    Thing(
        "bytes",
        "objects",
        "with torch.no_grad():\n"
        "    return pickle.dumps(net.encoder(torch.randn({rows}, {inputs})).numpy())",
        lambda n: 4 * n.hidden,
        ("import pickle",),
    ),
    Thing(
        "base64 text",
        "objects",
        "with torch.no_grad():\n"
        "    outputs = net.encoder(torch.randn({rows}, {inputs})).numpy()\n"
        "return base64.b64encode(outputs).decode()",
        lambda n: 16 / 3 * n.hidden,
        ("import base64",),
    ),
    Thing(
        "records",
        "objects",
        'return [{{"id": f"sample-{{n}}", "score": n / 7}} for n in range({rows})]',
        lambda _: 300,
        most=256 * MIB,
    ),
    Thing(
        "PIL images",
        "foreign",
        'return Image.new("RGB", ({side}, {side}), (80, 120, 160))',
        lambda _: 4,
        ("from PIL import Image",),
    ),
    Thing(
        "token encodings",
        "foreign",
        'return tokenizer.encode(" ".join(WORDS * ({rows} // len(WORDS) + 1)))',
        lambda _: 140,
        ("import tokenizers",),
        most=192 * MIB,
        setup='WORDS = "the model reads a long line of text and learns what comes next".split()\n'
        "tokenizer = tokenizers.Tokenizer(\n"
        "    tokenizers.models.WordLevel({{word: n for n, word in enumerate(WORDS)}}, WORDS[0])\n"
        ")\n"
        "tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()",
    ),
    Thing(
        "Arrow arrays",
        "foreign",
        "return pyarrow.compute.random({rows})",
        lambda _: 8,
        ("import pyarrow", "import pyarrow.compute"),
    ),
    Thing(
        "ctypes buffers",
        "foreign",
        "block = ctypes.create_string_buffer({rows})\n"
        "ctypes.memset(block, 7, {rows})\n"
        "return block",
        lambda _: 1,
        ("import ctypes",),
    ),
    Thing(
        "mapped memory",
        "foreign",
        "block = mmap.mmap(-1, {rows}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        'block.write(b"7" * {rows})\n'
        "return block",
        lambda _: 1,
        ("import mmap",),
    ),
    Thing(
        "XML trees",
        "foreign",
        'return ElementTree.fromstring("<page>" + "<word x=\'1\'/>" * {rows} + "</page>")',
        lambda _: 300,
        ("from xml.etree import ElementTree",),
        most=192 * MIB,
    ),
)
