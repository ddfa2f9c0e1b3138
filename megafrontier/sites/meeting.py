"""Meet the other sites at the start of a job, and wait for them at its end."""

import time
from collections.abc import Callable

from megafrontier.common.errors import UserError
from megafrontier.common.signals import stop_requested
from megafrontier.sites.rounds import Rounds
from megafrontier.sites.transport import Header

PAUSE_SECONDS = 0.02


def meet(
    rounds: Rounds, fingerprint: str, seconds: float, info: Callable[[str], None]
) -> dict[int, int]:
    """Wait for all other sites to answer, at most so many seconds or until this job is asked to
    stop. Returns by the number of a site how many exchanges are over there. Raises UserError for a
    site that trains something else."""
    late, seen = time.monotonic() + seconds, dict[int, int]()
    is_told = False
    while len(seen) < len(rounds.others) and time.monotonic() < late and not stop_requested():
        for site in _missing(rounds, seen):
            if answer := rounds.ask(site, {"ask": "hello"}):
                _check(site, answer["fingerprint"], fingerprint)
                seen[site] = sum(answer["versions"])
                rounds.hear(site)
                info(f"sites: site {site} answers")
        if not is_told and (missing := _missing(rounds, seen)):
            names = ", ".join(map(str, missing))
            info(f"sites: waiting for site {names}, at most {seconds:g} s")
            is_told = True
        time.sleep(PAUSE_SECONDS)
    for site in _missing(rounds, seen):
        info(f"sites: going on without site {site}: {rounds.why_silent(site)}")
    return seen


def _missing(rounds: Rounds, seen: dict[int, int]) -> list[int]:
    return [site for site in rounds.others if site not in seen]


def _check(site: int, theirs: str, own: str) -> None:
    if theirs != own:
        raise UserError(
            f"sites: site {site} trains another model, or exchanges it in another way, "
            "need the same model, parallel, train.steps and sites everywhere"
        )


def wait_for_others(
    rounds: Rounds, seconds: float, is_there: Callable[[Header], bool]
) -> dict[int, Header]:
    """Wait until `is_there` of the place of every other site that answers, at most so many seconds.
    Returns these places by the number of a site."""
    late, found = time.monotonic() + seconds, dict[int, Header]()
    waiting = set(rounds.others)
    while waiting and time.monotonic() < late:
        for site in sorted(waiting):
            answer = rounds.ask(site, {"ask": "hello"})
            if not answer:
                waiting.discard(site)
            elif is_there(answer):
                found[site] = answer
                waiting.discard(site)
        time.sleep(PAUSE_SECONDS)
    return found
