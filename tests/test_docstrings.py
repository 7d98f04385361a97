"""The examples in docstrings run, and every class that a user constructs has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lightning_mp

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(lightning_mp.__path__, "lightning_mp.") if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_public_class_has_an_example():
    classes = [getattr(lightning_mp, name) for name in lightning_mp.__all__ if name[0].isupper()]
    assert classes
    finder = doctest.DocTestFinder(recurse=False)
    assert [cls.__name__ for cls in classes if not any(test.examples for test in finder.find(cls, cls.__name__))] == []
