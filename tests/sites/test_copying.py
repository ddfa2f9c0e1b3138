"""A site that takes over another one's weights shows the others a whole state all the while."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from megafrontier.sites.exchange import Progress, SiteExchange
from tests import runs
from tests.ranks import run_mesh
from tests.sites.jobs import ports, site_options


def test_a_site_that_copies_gives_out_its_old_state_until_all_of_the_new_is_here(tmp_path):
    config_file, found = runs.make_config_file(tmp_path), ports(2)
    keys = ("fragments: 2", "every: 4", "wire: fp32")
    options = [site_options(tmp_path, found, number, *keys) for number in range(2)]
    configs = [runs.load(config_file, *runs.ONE, *own) for own in options]

    def body(mesh):
        with ExitStack() as stack:
            trainers = [stack.enter_context(runs.open_trainer(c, mesh)) for c in configs]
            copier, source = (SiteExchange(t, t.config.sites) for t in trainers)
            with ThreadPoolExecutor(2) as pool:  # they meet
                list(pool.map(SiteExchange.at_start, (copier, source), trainers))
            for weights, momentum in zip(source.outer.weights, source.outer.momentum, strict=True):
                weights.add_(1)
                momentum.fill_(2)
            source._progress = Progress(2, 4, [1, 1], [2, 4])
            fetch, seen = copier._endpoint.fetch_state, []

            def state_of_copier():
                parts = [source._endpoint.fetch_state(0, fragment)[0] for fragment in range(2)]
                return [(part.version, torch.cat(part.messages)) for part in parts]

            def fetch_and_look(site, fragment):
                result = fetch(site, fragment)
                seen.append(state_of_copier())
                return result

            before = state_of_copier()
            copier._endpoint.fetch_state = fetch_and_look
            copier._adopt(trainers[0], [1], "a test")
            after = state_of_copier()
            for exchange in (copier, source):
                exchange._endpoint.close()
        for states in seen:
            torch.testing.assert_close(states, before, rtol=0, atol=0)
        assert [version for version, _ in after] == [1, 1]
        own = [fetched for _, fetched in after]
        sums = [(float(x.view(torch.float32).sum())) for x in own]
        theirs = [float(torch.cat(source.outer.weights[f::2]).sum()) for f in range(2)]
        counts = [sum(len(w) for w in source.outer.weights[f::2]) for f in range(2)]
        return len(seen), sums, [x + 2 * n for x, n in zip(theirs, counts, strict=True)]

    ((looks, sums, expected),) = run_mesh((1,), body)
    assert looks == 2
    torch.testing.assert_close(sums, expected)
