"""An epoch of a certificate's corpora, read plainly."""

import numpy as np
import pytest

from megafrontier.certify.plain import gap_of_samples
from megafrontier.certify.runs import write_corpora
from megafrontier.certify.shrink import LENGTH
from megafrontier.config import CorpusConfig
from megafrontier.data.sampling import samples
from megafrontier.data.sampling.packing import PackedRange
from tests import runs

pytestmark = pytest.mark.fast


@pytest.fixture(params=["none", "best_fit"])
def config(tmp_path, request):
    config = runs.load(runs.make_config_file(tmp_path), f"model.sequence_length={LENGTH}")
    config.data.train = [CorpusConfig(str(tmp_path / f"train-{i}"), 1.0 + i) for i in range(2)]
    config.data.packing, config.data.document_mask = request.param, True
    write_corpora(config)
    return config


def test_an_epoch_has_each_token_once_with_its_target_and_document(config):
    assert gap_of_samples(config).value == 0
    config.data.valid = [config.data.train.pop()]
    write_corpora(config)
    assert gap_of_samples(config).value == 0


def _no_documents(dataset, piece):
    return np.zeros(piece.pairs + 1, np.int32)


def _same_window(index, size, key):
    return index * 0


def test_targets_of_another_document_are_noticed_and_so_are_windows_that_are_read_twice(
    config, monkeypatch
):
    is_cut = config.data.packing == "none"  # only then has a piece several documents
    with monkeypatch.context() as changed:
        changed.setattr(samples, "_documents", _no_documents)
        assert (gap_of_samples(config).value > 0.01) == is_cut
    monkeypatch.setattr(samples, "permute", _same_window)
    assert gap_of_samples(config).value > 0.5


def test_a_piece_of_a_packed_sequence_that_is_lost_is_noticed(config, monkeypatch):
    whole = PackedRange.pieces
    monkeypatch.setattr(PackedRange, "pieces", lambda *of: whole(*of)[:3])
    assert (gap_of_samples(config).value > 0) == (config.data.packing == "best_fit")
