import pytest


@pytest.fixture(scope="session")
def exhaustive(pytestconfig):
    """Whether to go through every size of a range, instead of a covering set."""
    return pytestconfig.getoption("--exhaustive")
