"""Config files that a test writes, and the line that bad input ends with."""

import pytest

from megafrontier.common.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def base(write):
    return write("base.yaml", "model: {layers: 2, hidden: 64, heads: 4}\n")


def refusal(call, *arguments):
    """The one line that a call ends with."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
