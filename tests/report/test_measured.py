"""The report shows norms by kind and by block, corpora, and the share of clipped steps."""

import json
from pathlib import Path

from megafrontier.report.draw import write_report
from megafrontier.report.measured import by_block, measured_rows
from megafrontier.report.read import Run

STEP = {"clipped": False, "corpus_tokens": {"web": 30.0, "code": 0.0}}
STEPS = [
    STEP | {"step": 1, "corpus_loss": {"web": 4.0, "code": None}},
    STEP
    | {
        "step": 2,
        "clipped": True,
        "clipped_heads": 3.0,
        "corpus_loss": {"web": 3.0, "code": 2.0},
        "grad_norm_kinds": {"matrix": 0.5, "norm": 0.25},
        "grad_norm_blocks": {"embedding": 0.1, "blocks.0": 0.2},
        "attention_logit_bound": {"blocks.0": 9.0},
    },
    {
        "step": 3,
        "grad_norm_kinds": {"matrix": 1.5, "norm": 0.25},
        "grad_norm_blocks": {"embedding": 0.3, "blocks.0": 0.2},
        "update_norm_kinds": {"matrix": 0.01, "norm": 0.002},
    },
]


def test_the_rows_hold_corpora_norms_and_clipping():
    rows = measured_rows([Run("a", Path("a"), None, STEPS, []), Run("b", Path("b"), None, [], [])])
    assert rows == {
        "clipped steps": ["50.0%", ""],
        "clipped heads: last steps, most": ["3, 3", ""],
        "corpus web": ["60 tokens, loss 3.5000", ""],
        "corpus code": ["0 tokens, loss 2.0000", ""],
        "norms of matrix: gradient, update": ["1, 0.01", ""],
        "norms of norm: gradient, update": ["0.25, 0.002", ""],
    }


def test_blocks_are_drawn_if_a_run_has_measured_them(tmp_path):
    run = Run("a", Path("a"), None, STEPS, [])
    assert by_block(run, "grad_norm_blocks") == {"embedding": 0.2, "blocks.0": 0.2}
    assert by_block(run, "attention_logit_bound") == {"blocks.0": 9.0}
    for name, lines in (("a", STEPS), ("b", STEPS[:1])):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
        page = write_report([tmp_path / name]).read_text()
        assert ('alt="blocks"' in page) == (name == "a")
