"""What both files of DDP tests share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def single():
    """Results of scenarios in one process; each is run when it is first asked for."""
    results: dict[Any, Any] = {}

    def get(scenario: Any, *args: Any) -> Any:
        if (scenario, args) not in results:
            results[scenario, args] = scenario(1, *args)
        return results[scenario, args]

    return get
