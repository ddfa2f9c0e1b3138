"""What evaluating a checkpoint counts."""

import torch

from megafrontier.data.samples import IGNORED, Batch
from megafrontier.data.tokenizer import ByteTokenizer
from megafrontier.training.evaluating import text_bytes


def test_a_character_that_two_rows_share_counts_its_own_bytes():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("ßä€x")
    assert len(ids) == 8
    targets = torch.tensor([[*ids[:3], tokenizer.eod], [*ids[3:6], IGNORED], [*ids[6:], 0, 0]])
    targets[2, 2:] = IGNORED
    batch = Batch(targets, targets, None, 0)
    # Where € is cut, the two bytes before the cut cannot be told from one.
    assert text_bytes(tokenizer, batch) == 7
