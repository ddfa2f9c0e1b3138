"""What bad input is told."""

import pytest

from megafrontier.common.errors import UserError


def refusal(call, *arguments):
    """The one line that a call ends with."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
