"""Lines that add to a variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlog.leaks.assignment_lines import (
    Addition,
    _nodes,
    added_groups,
    additions,
    adds_to_itself,
    limiting_line,
    parsing_once,
    registrations,
    replaced,
)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("history.append(loss)", "loss"),
        ("self.history.append(out.mean())", ""),
        ("history[step] = out", "out"),
        ("history += [1]", ""),
        ("history = history + loss", ""),
        ("history = Node(loss, history)", ""),
        ("out, (history, cell) = lstm(x, (history, cell))", ""),
        ("state['history'][step].append(x); history.add(self.y)", "self.y"),
        ("heapq.heappush(history, x)", "x"),
        ("insort(self.history, x, key=score)", "x"),
    ],
)
def test_statements_that_add_are_found(tmp_path, line, value):
    file = tmp_path / "train.py"
    file.write_text(f"history = []\n{line}\nprint(history)\n")
    assert additions(str(file), "history") == (Addition(2, value),)


def test_the_classes_and_functions_around_a_statement_are_known(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "class Meter:\n    def add(self, x):\n        self.history.append(x)\n"
        "def fit():\n    def inner():\n        history.append(1)\n"
    )
    assert list(additions(str(file), "history")) == [
        Addition(3, "x", ("Meter",), ("add",)),
        Addition(6, "", (), ("fit", "inner")),
    ]


@pytest.mark.parametrize("line", ["history = []", "other.append(history)", "len(history)", "x ="])
def test_other_statements_are_not(tmp_path, line):
    file = tmp_path / "train.py"
    file.write_text(f"{line}\n")
    assert additions(str(file), "history") == ()


def test_registered_hooks_are_found(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("x = 1\nmodel[0].register_forward_hook(print)\n")
    assert registrations(str(file)) == [Addition(2, "")]


def test_groups_added_to_an_optimizer_are_found(tmp_path):
    file = tmp_path / "train.py"
    add = "optimizer.add_param_group({'params': [x]})\n"
    file.write_text(f"{add}for x in model:\n    {add}")
    assert added_groups(str(file)) == [Addition(3, ""), Addition(1, "")]


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("self.table = concat(\n    [self.table, rows],\n)", "self.table"),
        ("text += line", "text"),
        ("table = concat([self.table, rows])", ""),
        ("self.table = table", ""),
        ("table['rows'] = concat(table['rows'])", ""),
        ("table, rows = concat([table, rows]), 0", ""),
    ],
)
def test_what_a_line_replaces(tmp_path, statement, name):
    file = tmp_path / "train.py"
    file.write_text(f"x = 1\n{statement}\n")
    assert replaced(str(file), 2) == name


def test_a_file_that_does_not_exist_has_none():
    assert additions("<stdin>", "history") == ()


@pytest.mark.parametrize(
    ("code", "adds"),
    [
        ("kept = zeros(0)\nfor x in data:\n    kept = torch.cat([kept, x])", True),
        ("def add(self, x):\n    self.kept = np.append(self.kept, x)", True),
        ("def add(self, x):\n    self.kept = [*self.kept, x]", True),
        ("for x in data:\n    kept = kept + [x]", True),
        ("def add(self, kept):\n    self.kept = torch.cat([self.kept, kept])", True),
        ("def add(self, x):\n    kept = x * 2\n    self.kept = torch.cat([self.kept, kept])", True),
        (
            "def add(old, x):\n    return cat([old, x])\nfor x in data:\n    kept = add(kept, x)",
            True,
        ),
        (
            "def add(old, x):\n    return cat([old, x])[-9:]\nfor x in data:\n    kept = add(kept, x)",
            False,
        ),
        ("def add(self, x):\n    self.kept = x\n    self.kept = cat([self.kept, x])", False),
        ("for x in data:\n    kept = torch.cat([kept, x])[-100:]", False),
        ("for x in data:\n    kept = torch.cat([kept[1:], x])", False),
        ("for kept in data:\n    kept = torch.cat([kept, x])", False),
        ("for x in data:\n    kept = x * 2\n    kept = torch.cat([kept, x])", False),
        ("def step(kept):\n    kept = torch.cat([kept, kept.flip(0)])", False),
        ("for x in data:\n    kept = [one.cuda() for one in kept]", False),
        ("for x in data:\n    kept = kept.to(device)", False),
    ],
)
def test_a_value_that_becomes_longer_is_told_from_a_new_one(
    tmp_path: Path, code: str, adds: bool
) -> None:
    file = tmp_path / "train.py"
    file.write_text(code)
    assert adds_to_itself(str(file), "kept") is adds


def limited_line(tmp_path: Path, text: str) -> int | None:
    """Return the line that limits ``kept``, as seen from the first line that adds to it."""
    file = tmp_path / "train.py"
    file.write_text(text)
    line = additions(str(file), "kept")[0].line
    return limiting_line(str(file), "kept", line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "def f():\n    if len(kept) < n:\n        kept.append(x)\n    else:\n        kept[i] = x",
            2,
        ),
        ("def f():\n    if n > len(self.kept):\n        self.kept.append(x)", 2),
        (
            "def f():\n    if len(kept) >= n:\n        kept[i] = x\n    else:\n        kept.append(x)",
            2,
        ),
        ("def f():\n    if len(kept) >= n: return\n    kept.append(x)", 2),
        ("def f():\n    kept.append(x)\n    if len(kept) > n:\n        kept.pop(0)", 4),
        ("def f():\n    kept[key] = x\n    while len(kept) > n:\n        kept.popitem()", 4),
        ("def f():\n    kept.append(x)\n    if step % 10 == 0:\n        kept.clear()", 4),
        ("def f():\n    kept.append(x)\n    kept = kept[-100:]", 3),
        ("def f():\n    kept.append(x)\n    del self.kept[:-100]", 3),
        (
            "def f():\n    kept = []\n    for x in d:\n        kept.append(x)\nfor e in r:\n    print(f())",
            2,
        ),
        (
            "class A:\n  def f(self):\n    self.kept, n = [], 1\n    self.kept.append(n)\n[a.f() for a in b]",
            3,
        ),
        (
            "class A:\n  def f(self):\n    self.kept.append(1)\n  def on_end(self):\n    self.kept.clear()",
            5,
        ),
        (
            "class A:\n  def f(self):\n    self.kept.append(1)\n  def end_epoch(self):\n    self.kept.clear()"
            "\nfor epoch in e:\n    a.end_epoch()",
            5,
        ),
        ("def f():\n    heappush(kept, x)\n    if n > 3:\n        heapq.heappop(kept)", 4),
        ("for epoch in e:\n    kept = []\n    for x in data:\n        kept.append(x)", 2),
    ],
)
def test_a_limit_is_found(tmp_path: Path, text: str, line: int) -> None:
    assert limited_line(tmp_path, text) == line


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    kept = []\n    for x in data:\n        kept.append(x)",
        "class A:\n  def f(self):\n    self.kept.append(1)\n  def reset(self):\n    self.kept.clear()",
        "def f():\n    kept.append(x)\n    if len(kept) > 100:\n        print(mean(kept[-100:]))",
        "def f():\n    kept.append(x)\n    if len(kept) < 2:\n        return None",
        "def f():\n    if len(kept) > 0:\n        kept.append(x)",
        "def f():\n    kept.append(x)\n    if len(kept) % 100 == 0:\n        print(len(kept))",
        "def f():\n    kept.append(x)\ndef reset():\n    kept.clear()",
        "def f():\n    kept = []\n    for x in data:\n        kept.append(x)\nf()",
        "def f():\n  kept = []\n  for x in d:\n    kept.append(x)\n    yield x\nfor x in f():\n  train(x)",
        "class A:\n  def f(self):\n    self.kept.append(1)\n  def reset(self):\n    self.kept = []",
        "def f():\n    if len(others) < n:\n        kept.append(x)",
        "kept = []\nfor x in data:\n    kept.append(x)",
    ],
)
def test_what_limits_nothing_is_not_taken_for_a_limit(tmp_path: Path, text: str) -> None:
    assert limited_line(tmp_path, text) is None


def test_a_file_is_parsed_once_in_a_block_and_no_tree_is_kept_after_it(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("history.append(1)\nlosses.append(2)\n")
    with parsing_once():
        nodes = _nodes(str(file), "history")
        assert nodes[0] is _nodes(str(file), "losses")[0]
        assert _nodes(str(file), "other") == []
    assert nodes[0] is not _nodes(str(file), "history")[0]
