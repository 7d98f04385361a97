"""Fixtures for all tests."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_mp import MasterWeightPrecision


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums are formed in an order that depends on the number of threads, and bits are compared here.

    For each test, as Lightning's launchers set the number of threads of the process that they are called in.
    """
    torch.set_num_threads(1)


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["split", "copy"])
def plugin(request: pytest.FixtureRequest) -> MasterWeightPrecision:
    """A ``bf16-master`` plugin of each storage."""
    return MasterWeightPrecision("bf16-master", master=request.param)


class Said(logging.Handler):
    """What was logged by the package or by Lightning, or warned."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        super().__init__(logging.INFO)
        self._caught = caught
        self._logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._logged.append(record.getMessage())

    @property
    def messages(self) -> list[str]:
        return [*self._logged, *(str(warning.message) for warning in self._caught)]

    def __contains__(self, words: object) -> bool:
        """Whether one message has all the words, which stand apart by ``|``."""
        return self.count(str(words)) > 0

    def count(self, words: str) -> int:
        return sum(all(word in message for word in words.split("|")) for message in self.messages)


@pytest.fixture
def said() -> Iterator[Said]:
    names = ("lightning_mp", "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handler = Said(caught)
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        yield handler
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
