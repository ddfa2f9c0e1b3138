"""For whom the others wait is told from what each rank says that it is at."""

import pytest

from megafrontier.parallel.rank_status import Place, RankStatus, blockers, decode

LINK, STORAGE = "link world", "run.directory"


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ({0: Place(), 1: Place()}, {}),
        ({0: Place(), 1: Place(STORAGE)}, {1: STORAGE}),
        ({0: Place(LINK, 1), 1: Place(LINK, 0), 2: Place(LINK, 1), 3: Place()}, {0: LINK, 1: LINK}),
        # Rank 1 has come no further, or stands at an exchange over another level.
        ({0: Place(LINK, 1), 1: Place(STORAGE)}, {1: STORAGE}),
        ({0: Place(LINK, 1), 1: Place("link node", 0)}, {}),
        ({0: Place(LINK, 5)}, {}),
    ],
)
def test_who_is_stuck_alone_or_with_a_peer_that_is_too_is_one_of_them(places, found):
    assert blockers(places) == found


def test_a_place_is_left_but_by_who_fails_there():
    activity = RankStatus()
    told = []
    with activity.at(LINK, 3):
        told.append(decode(activity.encode().encode()))
    told.append(decode(activity.encode().encode()))
    with pytest.raises(RuntimeError, match="reset by peer"), activity.at(LINK, 3):
        raise RuntimeError("reset by peer")
    assert [*told, decode(activity.encode().encode())] == [Place(LINK, 3), Place(), Place(LINK, 3)]
