"""Chats: the assistant's turns and the tokens that end them are trained on, or refused by line."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.text.chats import ChatEncoder, Template
from megafrontier.data.text.prepare import prepare
from megafrontier.data.text.reader import TextRange
from megafrontier.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

END = "<|endoftext|>"
MARKERS = (
    "<|im_start|> <|im_end|> <|header|> <|/header|> <|eot|> <|user|> <|assistant|> <|system|> "
)
MARKERS += "<|observation|> <|end|> <s> </s> [INST] [/INST] <think> </think>"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<s>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
TOOLS = "{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '\\n' + c.function.name }}{% endfor %}"
CHATML_CALLS = CHATML.replace("<|im_end|>", CALLS + "<|im_end|>")
GLM = (
    f"{TOOLS}{{% for m in messages %}}<|{{{{ 'observation' if m.role == 'tool' else m.role }}}}|>"
    f"{{% if m.content %}}{{{{ '\\n' + m.content }}}}{{% endif %}}{CALLS}{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
LAST = (  # an eos at the very end of the chat, and plain text between turns
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
)
GLM_LAST = GLM.replace(
    "<|assistant|>{% endif %}", "<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
PLAIN = LAST.replace("{% else %}{{ eos_token }}", "")
KEEPS_THINK = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
DROPS_THINK = KEEPS_THINK.replace("m.content }}", "m.content.split('</think>')[-1] }}")
QWEN3 = (  # only the last turn has its reasoning, perhaps an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)


def turns(*texts: str, first: str = "user") -> list[dict[str, Any]]:
    """A chat of user and assistant by turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


TWO = turns("Hi?", "Hello!", "More?", "Bye.", "unused")
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}],
}
CALLING = [
    {"role": "user", "content": "Time?"},
    CALL,
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
]
CLOCK = [{"type": "function", "function": {"name": "clock", "description": "tells"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes and of the markers of all templates."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([END, *MARKERS.split()])
    # As Phi-3, whose tokens take in the whitespace behind them.
    fast.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END).save_pretrained(path)
    return path


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(folder))


def encode(
    tokenizer: Tokenizer, *records: dict[str, Any], eod: bool = False, template: Any = "tokenizer"
) -> Iterator[tuple[str, list[str]]]:
    """Yield of each chat its text, and the texts that are trained on."""
    lines = "\n".join(map(json.dumps, records)).encode()
    encoder = ChatEncoder(tokenizer, "messages", eod, False, template)
    batch = encoder.encode([TextRange("x.jsonl", "lines", 1, lines)])
    ids, mask, start = batch.tokens.tolist(), batch.mask.tolist(), 0
    for size in batch.sizes.tolist():
        spans: list[list[int]] = []
        for i in range(start, start + size):
            if mask[i] and (i == start or not mask[i - 1]):
                spans.append([])
            if mask[i]:
                spans[-1].append(ids[i])
        yield tokenizer.decode(ids[start : start + size]), [tokenizer.decode(s) for s in spans]
        start += size


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CHATML, ["Hello!<|im_end|>\n", "Bye.<|im_end|>\n"]),
        (DEFAULT_SYSTEM, ["Hello!<|im_end|>\n", "Bye.<|im_end|>\n"]),
        (LLAMA, ["Hello!<|eot|>", "Bye.<|eot|>"]),
        (GLM, ["\nHello!<|user|>", "\nBye.<|user|>"]),
        (GLM_LAST, ["\nHello!<|user|>", f"\nBye.{END}"]),
        (PHI, ["Hello!<|end|>", f"Bye.<|end|>{END}"]),
        (MISTRAL, [" Hello!</s>", " Bye.</s>"]),
    ],
)
def test_the_token_that_ends_a_turn_is_trained_whatever_the_template(
    folder: Path, template: str, trained: list[str]
) -> None:
    tokenizer = with_template(folder, template)
    ((text, spans),) = encode(tokenizer, {"messages": TWO})
    assert spans == trained
    ((text, spans),) = encode(tokenizer, {"messages": TWO}, eod=True)
    assert spans == trained
    whole = tokenizer.render_chat(TWO[:4])
    marker = "<|user|>" if template == GLM else ""
    assert text == tokenizer.decode(tokenizer.encode(whole + marker)) + END


def test_a_template_without_ends_needs_an_eod_that_is_trained(folder: Path) -> None:
    tokenizer = with_template(folder, PLAIN)
    with pytest.raises(
        UserError, match=r"^--chat: tokenizer, .*no token that ends a turn, need --"
    ):
        list(encode(tokenizer, {"messages": TWO}))
    ((text, spans),) = encode(tokenizer, {"messages": TWO[:2]}, eod=True)
    assert (text, spans) == (f"user: Hi?\nassistant: Hello!\n{END}", [f"Hello!\n{END}"])
    with pytest.raises(UserError, match=r"^x\.jsonl:1: .*turn 1: .* no token that ends it, need"):
        list(encode(tokenizer, {"messages": TWO}, eod=True))


def test_an_eos_at_the_very_end_ends_the_last_turn_only(folder: Path) -> None:
    tokenizer = with_template(folder, LAST)
    ((_, spans),) = encode(tokenizer, {"messages": TWO[:2]})
    assert spans == [f"Hello!\n{END}"]
    with pytest.raises(UserError, match=r"^x\.jsonl:1: .*turn 1: .* no token that ends it, need"):
        list(encode(tokenizer, {"messages": TWO}))
    light = [*TWO[:1], {**TWO[1], "weight": 0}, *TWO[2:]]
    ((_, spans),) = encode(tokenizer, {"messages": light})
    assert spans == [f"Bye.\n{END}"]


def test_a_prompt_that_opens_the_reasoning_is_continued_or_refused(folder: Path) -> None:
    thinking = turns("Hi?", "<think>\nHm.\n</think>\nHello!")
    ((_, spans),) = encode(with_template(folder, KEEPS_THINK), {"messages": thinking})
    assert spans == ["Hm.\n</think>\nHello!<|im_end|>\n"]
    reason = r"turn 1: the chat template asks for it with '<think>\n', but does not write"
    for template, chat in ((KEEPS_THINK, turns("Hi?", "Hello!")), (DROPS_THINK, thinking)):
        with pytest.raises(UserError, match=re.escape(reason)):
            list(encode(with_template(folder, template), {"messages": chat}))


def test_a_template_that_rewrites_a_turn_is_refused_unless_the_turn_has_no_weight(
    folder: Path,
) -> None:
    tokenizer = with_template(folder, QWEN3)
    with pytest.raises(UserError, match="turn 1: the chat template rewrites it when more turns"):
        list(encode(tokenizer, {"messages": TWO}))
    chat = [*TWO[:1], {**TWO[1], "weight": 0}, TWO[2], {**TWO[3], "reasoning_content": "Hm."}]
    ((_, spans),) = encode(tokenizer, {"messages": chat})
    assert spans == ["<think>\nHm.\n</think>\n\nBye.<|im_end|>\n"]


@pytest.mark.parametrize("template", [MISTRAL, DEFAULT_SYSTEM])
def test_a_first_turn_of_the_assistant_is_one_line_with_the_place(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    with_template(folder, template)
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": turns("Hello!", "Hi?", first="assistant")}) + "\n")
    words = ["prepare", str(path), "--chat", "tokenizer", "--tokenizer", str(folder)]
    assert main([*words, "--workers", "1", "--out", str(tmp_path / "made")]) == 2
    line = "x.jsonl:1: 'messages': turn 0 is the assistant's, and the chat template needs another"
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    ((_, spans),) = encode(
        with_template(folder, CHATML), {"messages": turns("Hello!", first="assistant")}
    )
    assert spans == ["Hello!<|im_end|>\n"]


def test_tools_calls_and_null_contents_go_to_the_template(folder: Path) -> None:
    tokenizer = with_template(folder, GLM)
    tools = [CLOCK, json.dumps(CLOCK), None, []]
    records = [{"messages": CALLING, "tools": given} for given in tools]
    made = list(encode(tokenizer, *records))
    assert [spans for _, spans in made] == [["\nclock<|observation|>", "\nNoon.<|user|>"]] * 4
    assert [text.count('"tells"') for text, _ in made] == [1, 1, 0, 0]
    ((text, _),) = encode(with_template(folder, CHATML_CALLS), {"messages": CALLING})
    assert "<|im_start|>assistant\n\nclock<|im_end|>" in text  # and no None
    tokenizer = with_template(folder, GLM)
    called = {key: value for key, value in CALL.items() if key != "content"}
    ((_, spans),) = encode(tokenizer, {"messages": [CALLING[0], called]})
    assert spans == ["\nclock<|observation|>"]


def test_tools_of_a_table_are_read_without_the_nulls_of_arrow(folder: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    with_template(folder, GLM)
    ask = {"type": "function", "function": {"name": "ask", "strict": True}}
    rows = [{"messages": CALLING, "tools": CLOCK}, {"messages": TWO, "tools": [ask]}]
    for row in rows:
        row["messages"] = [
            {**m, "weight": 1} if m["role"] == "assistant" else m for m in row["messages"]
        ]
    source = tmp_path / "x.parquet"
    calls = [{**CALL["tool_calls"][0], "function": {"name": "clock"}}]
    rows[0]["messages"][1]["tool_calls"] = calls
    rows = json.loads(json.dumps(rows, sort_keys=True))  # as older releases of pyarrow store them
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    prepare([str(source)], str(folder), tmp_path / "made", 1, key="messages", chat="tokenizer")
    corpus, tokenizer = IndexedDataset(tmp_path / "made"), load_tokenizer(str(folder))
    for number, row in enumerate(rows):
        part = slice(corpus.document_start(number), corpus.document_start(number + 1))
        chat = [{**m, "content": m.get("content")} for m in row["messages"][:4]]
        whole = tokenizer.render_chat(chat, tools=row["tools"])
        assert tokenizer.decode(corpus.tokens[part].tolist()) == whole + "<|user|>"


@pytest.mark.parametrize("template", get_args(Template))
@pytest.mark.parametrize("key", ["weight", "train"])
def test_turns_of_weight_0_are_read_and_not_trained(folder: Path, template: str, key: str) -> None:
    chat = [*TWO[:1], {**TWO[1], key: 0}, *TWO[2:3], {**TWO[3], key: 1}]
    tokenizer = with_template(folder, GLM)
    ((text, spans),) = encode(tokenizer, {"messages": chat}, template=template)
    assert "Hello!" in text
    assert spans == (["\nBye.<|user|>"] if template == "tokenizer" else [f"Bye.{END}"])
    last = [*TWO[:3], {**TWO[3], key: False}]
    ((text, spans),) = encode(tokenizer, {"messages": last}, template=template)
    assert "Bye." not in text
    assert len(spans) == 1


REASONING = [*TWO[:1], {**TWO[1], "reasoning_content": "Hm."}]


@pytest.mark.parametrize(
    ("template", "record", "says"),
    [
        (CHATML, {"messages": TWO, "tools": CLOCK}, "does not write 'tools'"),
        (CHATML, {"messages": [TWO[0], {**CALL, "content": ""}]}, "turn 1: .* not write 'tool_c"),
        (CHATML, {"messages": REASONING}, "turn 1: .*does not write 'reasoning_content'"),
        (
            CHATML,
            {"messages": [TWO[0], {**TWO[1], "content": None}]},
            "'content' is NoneType, need",
        ),
        (CHATML, {"messages": [TWO[0], {**TWO[1], "weight": 0.5}]}, "turn 1: weight: 0.5, need 0"),
        (CHATML, {"messages": [{**TWO[0], "weight": 1}, TWO[1]]}, "turn 0: weight: 1, need 0"),
        (CHATML, {"messages": [TWO[0], {**TWO[1], "weight": 0}]}, "no turn of the assistant, need"),
        (CHATML, {"messages": TWO, "functions": CLOCK}, "'functions' beside it, which is not"),
        (GLM, {"messages": TWO, "tools": "{"}, "'tools': not valid JSON"),
        (GLM, {"messages": TWO, "tools": "[" * 100_000}, "'tools': JSON too deeply nested"),
        (GLM, {"messages": TWO, "tools": 3}, "'tools' is int, need a list"),
        ("simple", {"messages": TWO, "tools": CLOCK}, "'tools', which --chat simple does not"),
        ("simple", {"messages": REASONING}, "turn 1: 'reasoning_content', which --chat simple"),
        ("simple", {"messages": CALLING}, "turn 1: 'tool_calls', which --chat simple"),
    ],
)
def test_what_is_not_read_or_written_is_refused_by_line(
    folder: Path, template: str, record: dict[str, Any], says: str
) -> None:
    is_simple = template == "simple"
    tokenizer = with_template(folder, CHATML if is_simple else template)
    with pytest.raises(UserError, match=rf"^x\.jsonl:1: 'messages': .*{says}"):
        list(encode(tokenizer, record, template="simple" if is_simple else "tokenizer"))
