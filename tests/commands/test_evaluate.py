"""What evaluating a checkpoint counts."""

import torch

from megafrontier.commands.evaluate import text_bytes
from megafrontier.data.sampling.samples import Batch
from megafrontier.data.tokenizers.tokenizer import ByteTokenizer
from megafrontier.model.loss import IGNORE_INDEX


def batch_of(rows, before):
    """Rows of targets, each with the token before it."""
    targets = torch.tensor(rows)
    tokens = torch.cat([torch.tensor(before)[:, None], targets[:, :-1]], 1)
    return Batch(tokens, targets, None, 0)


def test_a_character_that_two_rows_share_counts_its_own_bytes():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("ßä€x")
    assert len(ids) == 8
    rows = [
        [*ids[:3], tokenizer.eod],
        [*ids[3:6], IGNORE_INDEX],
        [*ids[6:], IGNORE_INDEX, IGNORE_INDEX],
    ]
    batch = batch_of(rows, [tokenizer.eod, ids[2], ids[5]])
    # Where € is cut, the two bytes before the cut cannot be told from one.
    assert text_bytes(tokenizer, batch) == 7


def test_a_space_at_a_rows_beginning_counts_though_the_tokenizer_leaves_it_out_there():
    class Llamas(ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    tokenizer = Llamas()
    ids = tokenizer.encode(" ab cd ef")  # the first space is the tokenizer's own
    batch = batch_of([ids[:3], ids[3:6], ids[6:]], [tokenizer.eod, ids[2], ids[5]])
    assert text_bytes(tokenizer, batch) == len("ab cd ef")
