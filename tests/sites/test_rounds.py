"""All sites come to the same answer about an exchange."""

from dataclasses import replace

from megafrontier.sites.rounds import NO_CHECKSUM, Decision, Report, Rounds, decide
from megafrontier.sites.transport import SiteUnreachable


def report(site: int, holds=(0, 1, 2), checksum: int = 5, tokens: float = 10.0, step: int = 30):
    return Report(4, site, step, tokens, checksum, tuple(holds))


def test_sites_that_hold_each_other_take_part_with_their_tokens() -> None:
    reports = [report(0), report(1, tokens=20.0, step=31), report(2)]
    assert decide(reports) == Decision(4, {0: 10.0, 1: 20.0, 2: 10.0}, 31, 5)


def test_a_site_whose_message_others_lack_is_left_out() -> None:
    reports = [report(0, (0, 1)), report(1, (0, 1)), report(2)]
    assert sorted(decide(reports).tokens) == [0, 1]


def test_a_site_with_other_weights_is_left_out_and_most_sites_count() -> None:
    reports = [report(0, checksum=6), report(1), report(2)]
    found = decide(reports)
    assert sorted(found.tokens) == [1, 2]
    assert found.checksum == 5
    # Of one and one, the lower number.
    assert sorted(decide(reports[:2]).tokens) == [0]


def test_a_site_that_sends_nothing_does_not_hold_up_the_others() -> None:
    joined = report(2, tokens=0.0)
    assert sorted(decide([report(0, (0, 1)), report(1, (0, 1)), joined]).tokens) == [0, 1]


def test_the_lowest_site_decides_when_all_have_reported_and_not_before() -> None:
    rounds = Rounds(0, {}, deadline=100.0)
    rounds.hear(1)
    own, other = report(0, (0, 1)), report(1, (0, 1))
    assert rounds.resolve(own) is None
    header = {"ask": "report", **vars(other)}
    assert rounds.answer({**header, "holds": [1]}, 4) == {}
    assert rounds.resolve(own) is None, "site 1 does not hold the message of site 0"
    assert rounds.answer({**header, "holds": [0, 1]}, 4) == {}
    decision = rounds.resolve(own)
    assert decision == Decision(4, {0: 10.0, 1: 10.0}, 30, 5)
    assert rounds.answer({"ask": "decision", "event": 4}, 5)["tokens"] == {0: 10.0, 1: 10.0}


def test_nobody_waits_for_a_message_that_some_site_refuses() -> None:
    rounds = Rounds(0, {}, deadline=100.0)
    for site in (1, 2):
        rounds.hear(site)
    header = {"ask": "report", **vars(report(1, (0, 1)))}
    assert rounds.answer({**header, "refuses": [2]}, 4) == {}
    assert rounds.answer({"ask": "report", **vars(report(2))}, 4) == {}
    decision = rounds.resolve(report(0))
    assert decision is not None
    assert sorted(decision.tokens) == [0, 1]


def test_after_the_deadline_a_late_site_is_not_waited_for_any_more() -> None:
    rounds = Rounds(0, {}, deadline=0.0)
    rounds.hear(1)
    assert rounds.resolve(report(0, (0,))) == Decision(4, {0: 10.0}, 30, 5)
    patient = Rounds(0, {}, deadline=100.0)
    assert patient.resolve(replace(report(0, (0,)), event=5)) is not None, "nobody else is heard of"


def test_others_go_on_without_a_site_that_answers_but_does_not_come_to_the_exchange() -> None:
    """Such as one that evaluates for long, also if it is the one that decides."""
    header = {"ask": "report", **vars(report(1, (1,)))}
    patient = Rounds(0, {}, deadline=100.0)
    assert patient.answer(header, 4) == {}
    rounds = Rounds(0, {}, deadline=0.0)
    assert rounds.answer(header, 4)["tokens"] == {1: 10.0}
    assert rounds.resolve(report(0)) == Decision(4, {1: 10.0}, 30, 5), "what it told the other"


def test_a_late_report_is_heard_and_the_next_exchange_waits_for_its_site() -> None:
    rounds = Rounds(0, {}, deadline=100.0)
    assert rounds.resolve(report(0, (0,))) is not None
    assert rounds.answer({"ask": "report", **vars(report(1))}, 5)["tokens"] == {0: 10.0}
    assert rounds.resolve(replace(report(0, (0,)), event=5)) is None


def test_a_site_that_asks_about_a_forgotten_exchange_is_told_to_take_the_weights() -> None:
    answer = Rounds(0, {}, deadline=100.0).answer({"ask": "decision", "event": 4}, 5)
    found = Decision.from_json(answer)
    assert found.checksum == NO_CHECKSUM
    assert list(found.tokens) == [0]


class Cut:
    """A client of a site that cannot be reached."""

    def request(self, header):
        raise SiteUnreachable("cut")


def test_a_lonely_site_waits_longer_than_most_of_them() -> None:
    rounds = Rounds(2, {0: Cut(), 1: Cut()}, deadline=10.0)  # type: ignore[dict-item]
    for site in (0, 1):
        rounds.hear(site)
    own = report(2, (2,))
    assert rounds.resolve(own) is None
    rounds._events[4].began -= 12
    assert rounds.resolve(own) is None
    rounds._events[4].began -= 4
    decision = rounds.resolve(own)
    assert decision is not None
    assert list(decision.tokens) == [2]
