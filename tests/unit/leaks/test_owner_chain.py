"""Chains of owners up to a name, and how they are written."""

from __future__ import annotations

import functools
import gc
import sysconfig
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlog._internal.inert_access import _uses_locals, container_base
from memlog.leaks.containers import ContainerGrowth
from memlog.leaks.holders import Held, holder_of
from memlog.leaks.owner_chain import OwnerSearch
from memlog.leaks.owner_text import describe, describe_container
from memlog.leaks.process_objects import TimeBudget, is_memlog, is_memlog_module


@pytest.fixture(autouse=True, scope="module")
def _thawed() -> Iterator[None]:
    """Thaw all objects. The search sees no frozen objects, and this module's objects are frozen, too."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Target:
    """An object whose owner is searched."""


class Box:
    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Hostile:
    """A class whose methods must not run."""

    def __init__(self, value):
        object.__setattr__(self, "kept", value)

    def _refuse(self, *_):
        raise AssertionError

    __eq__ = __hash__ = __len__ = __bool__ = __repr__ = __str__ = __iter__ = _refuse
    __class__ = property(_refuse)
    __dict__ = property(_refuse)

    def __getattribute__(self, name):
        raise AssertionError(name)


class OfClass:
    cache = None


global_list = []


def owner_of(make_target):
    """Return the description of the owner of the object whose identity ``make_target`` returns."""
    target = make_target()
    search = OwnerSearch(TimeBudget(60.0), [target])
    (chain,) = search.chains(target)
    return None if chain is None else describe(chain, frozenset())


def test_memlog_and_its_integrations_are_no_owners():
    folder = Path(__file__).parents[3] / "integrations"
    integrations = [path.name for path in folder.glob("memlog_*")]
    assert len(integrations) > 10
    for module in (*integrations, *[f"{name}.callback" for name in integrations], "memlog.bus"):
        assert is_memlog_module(module)
    for name in integrations:
        assert is_memlog(compile("pass", f"/home/me/{name}/__init__.py", "exec"))
    for module in ("memlog_test", "memlogger", "my.memlog", None):
        assert not is_memlog_module(module)


def test_an_object_in_a_local_list():
    history = [Target()]
    found = owner_of(lambda: history[:1])
    assert (found.expression, found.kind) == ("history", "a list")
    assert found.place == "in `test_an_object_in_a_local_list()`"


def test_an_object_that_gains_attributes():
    kept = Box(Target())
    (chain,) = OwnerSearch(TimeBudget(60.0)).chains([vars(kept)])
    growth = ContainerGrowth(vars(kept), dict, 20)
    held = Held(describe_container(chain), growth, 4, element_rate=1_000.0)
    assert holder_of(held, 10).title.startswith(
        "`kept`, an object in `test_an_object_that_gains_attributes()`, gains 2 attributes per step."
    )


def test_an_object_in_a_global_list():
    global_list[:] = [Target()]
    found = owner_of(lambda: global_list[:1])
    assert (found.expression, found.root.kind) == ("global_list", "global")


@pytest.mark.parametrize(
    ("make", "expression"),
    [
        (lambda one: Box(Box([one])), "kept.value.value"),
        (lambda one: {"preds": deque([one])}, "kept"),
        (lambda one: Slots([one]), "kept.value"),
        (lambda one: Box({"preds": [one]}), "kept.value"),
    ],
)
def test_attributes_and_slots(make, expression):
    kept = make(Target())
    found = owner_of(lambda: [find(kept)])
    assert found.expression == expression


def test_a_long_path_through_private_attributes_begins_with_the_object_behind_them():
    kept, connector = Box(None), Box(None)
    vars(kept)["_data_connector"], vars(connector)["_selector"] = connector, Box(Box([Target()]))
    found = owner_of(lambda: [find(kept)])
    assert (found.expression, found.name) == ("value of Box", "value")
    assert found.place.startswith("in `test_a_long_path")


def find(kept):
    """Return the only Target below an object."""
    waiting = [kept]
    while waiting:
        one = waiting.pop()
        if type(one) is Target:
            return one
        if not isinstance(one, type):
            waiting += gc.get_referents(one)
    raise AssertionError


def test_an_object_of_a_class_runs_none_of_its_code():
    kept = Hostile([Target()])
    (target,) = (object.__getattribute__(kept, "kept"),)
    found = owner_of(lambda: target[:1])
    assert container_base(kept) is None
    assert found is not None


def test_a_class_attribute():
    OfClass.cache = [Target()]
    found = owner_of(lambda: OfClass.cache[:1])
    OfClass.cache = None
    assert found.expression == "OfClass.cache"


def test_a_variable_of_a_package_gives_way_to_a_name_of_the_program():
    package: dict = {}
    code = "def wrapper(self, function):\n    return function()\n"
    file = f"{sysconfig.get_path('purelib')}/package.py"
    exec(compile(code, file, "exec"), package)  # noqa: S102 - a function of a package
    trainer = Box(Box([Target()]))
    found = package["wrapper"](trainer.value, lambda: owner_of(lambda: trainer.value.value[:1]))
    assert found.expression == "trainer.value.value"


def test_a_closure():
    def make():
        seen = [Target()]
        return lambda: seen

    function = make()
    found = owner_of(lambda: function()[:1])
    assert found.expression.startswith("seen of <lambda>()")
    assert found.name == "seen"


def test_a_default_argument():
    def log(value, memory=[Target()]):  # noqa: B006, B008 - the mistake that is looked for
        return memory[:1], value

    found = owner_of(lambda: log(1)[0])
    assert found.expression == "memory of log()"


def test_a_cache_of_functools():
    @functools.cache
    def mask(step):
        return Target()

    mask(1)
    found = owner_of(lambda: [mask(1)])
    assert found.expression == "cache of mask()"
    assert found.cache_room is None


def test_a_cache_of_functools_with_a_limit():
    @functools.lru_cache(maxsize=300)
    def load(key):
        return Target()

    load(1)
    assert owner_of(lambda: [load(1)]).cache_room == 299


def test_a_variable_of_a_thread():
    local = threading.local()
    local.kept = [Target()]
    found = owner_of(lambda: local.kept[:1])
    assert found.expression == "local.kept"


def test_a_frame_that_a_traceback_keeps():
    def fail():
        activations = [Target()]
        raise ValueError(len(activations))

    errors = []
    try:
        fail()
    except ValueError as error:
        errors.append(error)
    found = owner_of(lambda: [find_in_frame(errors[0])])
    assert found.root.name == "errors"


def find_in_frame(error):
    return error.__traceback__.tb_next.tb_frame.f_locals["activations"][0]


def test_garbage_is_recognized():
    gc.disable()
    try:
        box = Box(None)
        box.value = [box, Target()]
        targets = box.value[1:]
        del box
        (chain,) = OwnerSearch(TimeBudget(60.0), [targets]).chains(targets)
    finally:
        gc.enable()
    assert chain.root.kind == "cycle"


def test_the_search_leaves_no_reference():
    history = [Target()]
    reference = weakref.ref(history[0])
    owner_of(lambda: history[:1])
    history.clear()
    assert reference() is None


def test_a_spent_budget_finds_nothing():
    history = [Target()]
    search = OwnerSearch(TimeBudget(0.0))
    assert search.chains(history) == [None]


def test_functions_that_may_keep_their_own_variables_are_left_out():
    def keeps():
        return locals()

    def keeps_too():
        return vars()

    def harmless(model, args):
        model.eval()
        return vars(args), model.locals()

    assert _uses_locals(keeps.__code__)
    assert _uses_locals(keeps_too.__code__)
    assert not _uses_locals(harmless.__code__)
