"""What all tests share: one thread, the same numbers, no adapter without its package."""

import gc
import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["tests.objects"]

collect_ignore = [] if find_spec("quanda") else ["src/dualform/evaluate/quanda.py"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # tests run side by side; threads of each would wait for the others


def manual_seed(seed: int) -> torch.Generator:
    """What torch's own does, without notes for devices that are not there: each has the stack."""
    return torch.default_generator.manual_seed(int(seed))


if not torch.accelerator.is_available():
    torch.manual_seed = manual_seed

gc.disable()  # until all tests are found, whose million objects stay as long as the process

settings.register_profile("same", derandomize=True, deadline=None)  # on a busy machine, too
settings.load_profile("same")


def pytest_sessionstart() -> None:
    """Imports the package as users do, or doctests of `dualform.record` would see the module."""
    import dualform  # noqa: F401


TRAINED = ("fitted", "trained", "stepped")
"""Fixtures that train a case once for all tests of a process."""
TOGETHER = (
    "test_build.py",
    "test_cli.py",
    "test_house.py",
    "test_objects.py",
    "test_ray.py",
    "explore",
)
"""Files and folders that share what takes long: demos, wheels, syntax trees, servers."""


def group_of(item: pytest.Item) -> str | None:
    """What tests are called that run in one process, because they share what takes long to make."""
    if not isinstance(item, pytest.Function):
        return None
    if item.path.parent.name == "studies":
        return item.path.name
    for place in TOGETHER:
        if place in (item.path.name, item.path.parent.name):
            return place
    trained = any(name in item.fixturenames for name in TRAINED)
    given = item.callspec.params if trained and hasattr(item, "callspec") else {}
    return ", ".join(sorted(value for value in given.values() if isinstance(value, str))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`pytest -n 2` hands a group to one process; see `--dist` in pyproject.toml.

    The mark would do, but pytest-xdist 3.8 writes the group to where pytest 9.2 does not read it.
    """
    for item in items:
        group = group_of(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
            if config.getoption("loadgroup", default=False) and hasattr(item, "id"):
                item._id = item.id.parse(f"{item.nodeid}@{group}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there by now is left out when garbage is looked for: a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """What was left out is freed, or extension modules write at exit what they think has leaked."""
    gc.unfreeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fixtures draw the same numbers, whichever tests came before."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """And so do tests, whichever fixtures were made for them."""
    torch.manual_seed(0)
