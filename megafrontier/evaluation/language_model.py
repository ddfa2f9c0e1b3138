"""The interface of lm-evaluation-harness to a model. Importing this needs the package lm_eval."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megafrontier.common.errors import need
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.evaluation.rows import Row, RowScorer

MAX_NEW_TOKENS = 256
"""The harness's default for tasks that state no `max_gen_toks`."""


class ShardedLanguageModel(TemplateLM):
    """A model on many ranks, which a `RowScorer` asks. To the harness it is one process.

    Texts are encoded as `prepare` does, without special ids at their ends. A text without context
    follows the tokenizer's first id (`Tokenizer.bos`).
    """

    def __init__(self, scorer: RowScorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._scorer, self._tokenizer = scorer, tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.bos

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """The ids of a text."""
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation given its context, and whether it is greedy.
        Both are ids; what exceeds the sequence length is cut off from the left."""
        limit = self._scorer.sequence_length
        rows = [
            Row((context + continuation)[-limit - 1 :], min(len(continuation), limit))
            for _, context, continuation in requests
        ]
        return [(found.log_probability, found.is_greedy) for found in self._scorer.score(rows)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-probability of each whole text, in windows of the sequence length."""
        windows = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            of_text = get_rolling_token_windows(
                ids, self.prefix_token_id, self._scorer.sequence_length, context_len=1
            )
            windows += [(number, *make_disjoint_window(window)) for window in of_text]
        sums = [0.0] * len(requests)
        for window, found in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[window[0]] += found[0]
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The greedy continuation of each text up to a stop text, all texts at once.

        Where splits leave no cache, each new token is one forward of the whole row.
        """
        answers = [self._begin(request) for request in requests]
        if self._scorer.has_cache:
            contexts = [answer.context for answer in answers]
            self._scorer.extend(contexts, lambda i, new: self._extend(answers[i], new))
        while going := [answer for answer in answers if not answer.is_done]:
            rows = [Row([*answer.context, *answer.new, 0], 1) for answer in going]
            for answer, found in zip(going, self._scorer.score(rows), strict=True):
                self._extend(answer, found.likeliest)
        return [answer.text for answer in answers]

    def _begin(self, request: Any) -> "_Answer":
        text, options = request.args
        is_greedy = not options.get("do_sample") or not options.get("temperature", 1.0)
        need(is_greedy, "evaluate.tasks", request.task_name, "need a task with greedy answers")
        stops = options.get("until") or []
        limit = self._scorer.sequence_length
        most = min(options.get("max_gen_toks", MAX_NEW_TOKENS), limit)
        context = (self.tok_encode(text) or [self.prefix_token_id])[-max(1, limit - most) :]
        return _Answer(context, [stops] if isinstance(stops, str) else list(stops), most)

    def _extend(self, answer: "_Answer", new: int) -> bool:
        """Add a token. Returns whether the answer goes on."""
        if new == self.eot_token_id:
            answer.is_done = True
            return False
        answer.new.append(new)
        decode = self._tokenizer.decode
        before = decode(answer.context)
        answer.text = decode([*answer.context, *answer.new])[len(before) :]
        ends = [at for stop in answer.stops if stop and (at := answer.text.find(stop)) >= 0]
        if ends:
            answer.text = answer.text[: min(ends)]
        is_full = len(answer.context) + len(answer.new) > self._scorer.sequence_length
        answer.is_done = bool(ends) or is_full or len(answer.new) >= answer.most
        return not answer.is_done


@dataclass
class _Answer:
    """A text that is being generated, until one of `stops`, or `most` new tokens."""

    context: list[int]
    stops: list[str]
    most: int
    new: list[int] = field(default_factory=list)
    text: str = ""
    is_done: bool = False
