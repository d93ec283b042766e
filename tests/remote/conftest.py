"""A server of rewards that the tests of both sides ask."""

import pytest

from rewards import jpeg_compressibility
from tests.fixtures.reward_servers import mean, numbers, picky, serving


@pytest.fixture(scope="module")
def url():
    rewards = {"mean": mean, "numbers": numbers, "picky": picky, "jpeg": jpeg_compressibility}
    with serving(rewards, {"mean": 0.5, "jpeg": 0.1, "picky": 0.0}) as address:
        yield address
