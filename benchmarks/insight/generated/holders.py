"""Where a generated program keeps things: the statements that define a holder, and those that add to it."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.insight.generated.things import Thing


class Holder(NamedTuple):
    """One sort of holder. Its statements are templates.

    ``{name}`` is the name that a finding must contain. ``{owner}``, ``{part}`` and ``{verb}`` are other
    names, and ``{Owner}`` and ``{Part}`` are classes. ``{item}`` is the expression that makes a thing,
    ``{at}`` a key, and ``{limit}`` the maximum number of things.

    Attributes:
        define: Statements that make the holder.
        keep: Statements that add a thing.
        ring: The same statements, with the oldest thing removed.
        clear: The same statements, with all things removed now and then; empty: there is no such variant.
        limited: Statements that make the holder in the bounded program, if the limit is set there.
        close: Statements at the end of the program.
        imports: Statements that the holder needs.
        rebinds: True if ``keep`` binds the name again, so a function needs ``global``.
        takes: Things that it can keep; ``matrices``: tensors of two dimensions.
    """

    define: str
    keep: str
    ring: str
    clear: str = ""
    limited: str = ""
    close: str = ""
    imports: tuple[str, ...] = ()
    rebinds: bool = False
    takes: str = "all"

    def can_keep(self, thing: Thing) -> bool:
        return {
            "all": True,
            "matrices": thing.is_matrix,
            "frames": thing.name == "pandas frames",
        }[self.takes]


_LIST = ("{0}.append({{item}})", "{0}.append({{item}})\ndel {0}[:-{{limit}}]")
_CLEARED = "{0}.append({{item}})\nif len({0}) == {{limit}}:\n    {0}.clear()"


def _of_list(holder: str, define: str, imports: tuple[str, ...] = ()) -> Holder:
    keep, ring = (each.format(holder) for each in _LIST)
    return Holder(define, keep, ring, _CLEARED.format(holder), imports=imports)


def _of_mapping(holder: str, define: str, imports: tuple[str, ...] = ()) -> Holder:
    keep = f"{holder}[{{at}}] = {{item}}"
    return Holder(
        define,
        keep,
        f"{keep}\nif len({holder}) > {{limit}}:\n    del {holder}[next(iter({holder}))]",
        f"{keep}\nif len({holder}) == {{limit}}:\n    {holder}.clear()",
        imports=imports,
    )


def _inside(begin: str, end: str, call: str, name: str = "{name}") -> Holder:
    """Return a holder that is a list inside of a function, to which ``call`` passes a thing."""
    depth = begin.rpartition("\n")[2]
    keep = f"{begin}{name}.append(item)"
    return Holder(
        f"{keep}{end}", call, call, limited=f"{keep}\n{depth}del {name}[:-{{limit}}]{end}"
    )


_METRIC = Holder(
    "{name} = torchmetrics.CatMetric()",
    "{name}.update({item})",
    "{name}.update({item})\nif len({name}.value) == {limit}:\n    {name}.reset()",
    imports=("import torchmetrics",),
    takes="matrices",
)
_GRAPH = Holder(
    "{name} = networkx.Graph()",
    "{name}.add_node({at}, data={item})",
    "{name}.add_node({at}, data={item})\n"
    "if len({name}) > {limit}:\n    {name}.remove_node(next(iter({name})))",
    imports=("import networkx",),
)
_FRAME = Holder(
    "{name} = pandas.DataFrame()",
    "{name} = pandas.concat([{name}, {item}])",
    "{name} = pandas.concat([{name}, {item}])[-{limit} * {rows}:].copy()",
    rebinds=True,
    takes="frames",
)

HOLDERS: dict[str, tuple[Holder, ...]] = {
    "list": (_of_list("{name}", "{name} = []"),),
    "dict": (_of_mapping("{name}", "{name} = {{}}"),),
    "deque": (
        Holder(
            "{name} = collections.deque()",
            "{name}.append({item})",
            "{name}.append({item})",
            limited="{name} = collections.deque(maxlen={limit})",
            imports=("import collections",),
        ),
    ),
    "attribute chain": (
        _of_list(
            "{owner}.{part}.{name}",
            "class {Part}:\n    def __init__(self):\n        self.{name} = []\n\n\n"
            "class {Owner}:\n    def __init__(self):\n        self.{part} = {Part}()\n\n\n"
            "{owner} = {Owner}()",
        ),
    ),
    "dataclass field": (
        _of_list(
            "{owner}.{name}",
            "@dataclasses.dataclass\nclass {Owner}:\n    best: float = 0.0\n"
            "    {name}: list = dataclasses.field(default_factory=list)\n\n\n{owner} = {Owner}()",
            ("import dataclasses",),
        ),
    ),
    "closure": (
        _inside(
            "def make_{owner}():\n    {name} = []\n\n    def {verb}(item):\n        ",
            "\n\n    return {verb}\n\n\n{verb} = make_{owner}()",
            "{verb}({item})",
        ),
    ),
    "class attribute": (
        _inside(
            "class {Owner}:\n    {name} = []\n\n    @classmethod\n    def {verb}(cls, item):\n        ",
            "",
            "{Owner}.{verb}({item})",
            "cls.{name}",
        ),
    ),
    "module buffer": (
        Holder(
            'net.register_buffer("{name}", torch.zeros(0, {hidden}), persistent=False)',
            "net.{name} = torch.cat([net.{name}, {item}.detach()])",
            "net.{name} = torch.cat([net.{name}, {item}.detach()])[-{limit} * {rows}:].clone()",
            takes="matrices",
        ),
    ),
    "growing tensor": (
        Holder(
            "{name} = torch.zeros(0, {hidden})",
            "{name} = torch.cat([{name}, {item}.detach()])",
            "{name} = torch.cat([{name}, {item}.detach()])[-{limit} * {rows}:].clone()",
            rebinds=True,
            takes="matrices",
        ),
    ),
    "generator's frame": (
        _inside(
            "def {verb}_all():\n    {name} = []\n    while True:\n        item = yield len({name})\n        ",
            "\n\n\n{owner} = {verb}_all()\nnext({owner})",
            "{owner}.send({item})",
        ),
    ),
    "thread's frame": (
        _inside(
            "{owner} = queue.Queue()\n\n\ndef {verb}_all():\n    {name} = []\n"
            "    while (item := {owner}.get()) is not None:\n        ",
            "\n\n\nthreading.Thread(target={verb}_all).start()",
            "{owner}.put({item})",
        )._replace(close="{owner}.put(None)", imports=("import queue", "import threading")),
    ),
    "lru_cache": (
        # The cached function is the one that makes things: see `Program.text`.
        Holder(
            "@functools.lru_cache(maxsize=None)",
            "{name}(net, {at})",
            "{name}(net, {at})",
            limited="@functools.lru_cache(maxsize={limit})",
            imports=("import functools",),
        ),
    ),
    "nested lists": (
        _of_list(
            '{name}["validation"]',
            "{name} = collections.defaultdict(list)",
            ("import collections",),
        ),
    ),
    "list bound again": (
        Holder(
            "{name} = []",
            "{name} = {name} + [{item}]",
            "{name} = [*{name}, {item}][-{limit}:]",
            rebinds=True,
        ),
    ),
    "queue": (
        Holder(
            "{name} = queue.Queue()",
            "{name}.put({item})",
            "{name}.put({item})\nif {name}.qsize() > {limit}:\n    {name}.get()",
            imports=("import queue",),
        ),
    ),
    "library's container": (
        _of_mapping(
            "{name}",
            "{name} = sortedcontainers.SortedDict()",
            ("import sortedcontainers",),
        ),
        Holder(
            "{name} = cachetools.LRUCache(maxsize=1_000_000)",
            "{name}[{at}] = {item}",
            "{name}[{at}] = {item}",
            limited="{name} = cachetools.LRUCache(maxsize={limit})",
            imports=("import cachetools",),
        ),
        _METRIC,
        _GRAPH,
        _FRAME,
    ),
}
"""Holders by their name in the tables. Of several, the seed picks one."""
