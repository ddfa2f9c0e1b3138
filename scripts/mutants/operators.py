"""Operators that change one place of a Python file as a real bug would.

Each operator is a function from a node of the syntax tree to the texts that may replace it. Names,
and what an operator mirrors, are in `OPERATORS`.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The bytes [start, stop) of a file, in a statement of lines `line` … `last`, counted from 1,
    and the text that replaces them."""

    operator: str
    line: int
    last: int
    start: int
    stop: int
    new: str


Found = Iterator[tuple[ast.AST, str]]
"""Nodes, and the text that replaces each."""

EXCHANGED = {
    **{"tensor": "context", "context": "tensor", "expert": "expert_data", "data": "tensor"},
    **{"tensor_rank": "data_rank", "data_rank": "work_rank", "work_rank": "data_rank"},
    **{"pipeline_rank": "data_rank", "data_size": "size", "rank": "size", "size": "rank"},
    **{"level": "(level + 1)", "depth": "(depth - 1)", "coordinates": "sizes", "names": "peers"},
    **{"gradients": "optimizer", "optimizer": "gradients", "weights": "optimizer"},
}
_NAMES = {"level", "depth", "rank", "size", "tensor_rank", "work_rank", "data_rank"}
_LEVELS = {"weights", "gradients", "optimizer"}  # as attributes of a placement alone
_DIMENSIONS = "sum mean cat stack unbind chunk split narrow flatten transpose amax amin max gather"
_WAITS = re.compile(r"wait|finish|sync|barrier|drain|join|settle")
_BUFFERS = re.compile(r"zero_|copy_|clear|fill|release|forget|pop|reset|discard|remove|scale")
_HOOKS = re.compile(r"register|hook|queue_callback|start|begin|issue|then|publish|stale|defer")
_NOT_NUMBERS = re.compile(
    r"ledger|label|logger|info\(|heartbeat|describe|status|waiting|log_|record_stream|warn|beat"
)
"""Statements whose results no promise is about: names, logs, and measured seconds."""
_NOT_CODE = re.compile(r"_*(check|refuse|describe|need|explain|warn|report|repr|untimely)")


class Source:
    """A file's text, and the nodes of its tree that operators may change."""

    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        """The bytes [start, stop) of a node."""
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.AST) -> str:
        start, stop = self.span(node)
        return self.raw[start:stop].decode()

    def places(self) -> list[Place]:
        """All places that an operator may change, in their order."""
        found = []
        for node, function, statement in self._nodes(self.tree, "", None):
            for name, (_, operator) in OPERATORS.items():
                for at, new in operator(node, function, self.text):
                    last = getattr(statement, "test", statement).end_lineno
                    place = Place(name, statement.lineno, last, *self.span(at), new)
                    if new != self.text(at):
                        found.append(place)
        return sorted(set(found), key=lambda place: (place.start, place.operator, place.new))

    def _nodes(
        self, node: ast.AST, function: str, statement: Any
    ) -> Iterator[tuple[ast.AST, str, Any]]:
        """(node, name of its function, its statement) of what operators may change."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if _NOT_CODE.match(node.name):
                return
            function = node.name
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
            return
        if isinstance(node, ast.stmt):
            statement = node
            is_simple = not hasattr(node, "body")
            if is_simple and _NOT_NUMBERS.search(self.text(node)):
                return
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                return
            yield node, function, statement
        elif isinstance(node, ast.expr | ast.keyword):
            yield node, function, statement
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases") or (
                name == "test" and _only_raises(node)
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._nodes(child, function, statement)


Text = Callable[[ast.AST], str]


def _only_raises(node: ast.AST) -> bool:
    """Whether a condition guards nothing but an error."""
    body = node.body if isinstance(node, ast.If) else [node]
    return all(isinstance(child, ast.Raise) for child in body)


def _called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _reduction(node: Any, _function: str, text: Text) -> Found:
    if _called(node) in ("sum", "max", "min") and isinstance(node.func, ast.Attribute):
        if text(node.func.value).endswith("world"):
            yield node, text(node.args[0])
        elif _called(node) == "sum":
            yield node, f"(2 * {text(node)})"
    if _called(node) in ("reduce_tokens", "reduce", "all_reduce", "gather_tokens") and node.args:
        yield node, text(node.args[0])
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target, value = text(node.target), text(node.value)
        yield node, f"{target} = {value}"
        yield node, f"{target} += 2 * ({value})"


def _mean(node: Any, _function: str, text: Text) -> Found:
    if _called(node) == "sum" and isinstance(node.func, ast.Attribute):
        yield node, f"({text(node.func.value)}).mean" + text(node)[len(text(node.func)) :]
    if isinstance(node, ast.Constant) and node.value in ("sum", "mean"):
        yield node, repr({"sum": "mean", "mean": "sum"}[node.value])


def _axis(node: Any, _function: str, text: Text) -> Found:
    is_read = isinstance(getattr(node, "ctx", None), ast.Load)
    if isinstance(node, ast.Constant) and node.value in ("tensor", "context", "expert", "data"):
        yield node, repr(EXCHANGED[node.value])
    elif isinstance(node, ast.Name) and is_read and node.id in _NAMES:
        yield node, EXCHANGED[node.id]
    elif isinstance(node, ast.Attribute) and is_read and node.attr in EXCHANGED:
        of, other = text(node.value), EXCHANGED[node.attr]
        if ("placement" in of or node.attr not in _LEVELS) and not other.startswith("("):
            yield node, f"{of}.{other}"
    elif _called(node) in _DIMENSIONS.split():
        for arg in [*node.args, *(k.value for k in node.keywords if k.arg == "dim")]:
            if isinstance(arg, ast.Constant) and type(arg.value) is int and arg.value in (0, 1):
                yield arg, str(1 - arg.value)


def _arguments(node: Any, _function: str, text: Text) -> Found:
    if isinstance(node, ast.Call):
        for one, other in zip(node.args, node.args[1:], strict=False):
            if all(isinstance(a, ast.Name | ast.Attribute | ast.Subscript) for a in (one, other)):
                merged = ast.Tuple([one, other], ast.Load())
                merged.lineno, merged.col_offset = one.lineno, one.col_offset
                merged.end_lineno, merged.end_col_offset = other.end_lineno, other.end_col_offset
                yield merged, f"{text(other)}, {text(one)}"


def _bound(node: Any, _function: str, text: Text) -> Found:
    bounds: list[ast.expr | None] = []
    if isinstance(node, ast.Slice):
        bounds = [node.lower, node.upper]
    elif _called(node) in ("range", "arange", "slice"):
        bounds = node.args[:2]
    elif _called(node) == "narrow":
        bounds = node.args[1:3]
    for bound in bounds:
        if bound is not None and not isinstance(bound, ast.Starred):
            yield bound, f"({text(bound)}) + 1"
            yield bound, f"({text(bound)}) - 1"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        yield node, f"-(-({text(node.left)}) // ({text(node.right)}))"


def _operands(node: Any, *kinds: type[ast.operator]) -> tuple[ast.expr, ...]:
    """The sides of a binary operation of these kinds; none if it is one of lists or texts."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, kinds):
        return ()
    sides = node.left, node.right
    others = ast.List | ast.Tuple | ast.JoinedStr | ast.ListComp
    return () if any(isinstance(side, others) for side in sides) else sides


def _scale(node: Any, _function: str, text: Text) -> Found:
    if sides := _operands(node, ast.Mult, ast.Div):
        (left, right), is_product = map(text, sides), isinstance(node.op, ast.Mult)
        yield node, f"({left})"
        yield node, f"(({left}) {'/' if is_product else '*'} ({right}))"
        if is_product:
            yield node, f"({right})"


def _sign(node: Any, _function: str, text: Text) -> Found:
    if sides := _operands(node, ast.Add, ast.Sub):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield node, f"(({text(sides[0])}) {sign} ({text(sides[1])}))"
    is_minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    if is_minus and not isinstance(node.operand, ast.Constant):
        yield node, text(node.operand)


def _skip(names: re.Pattern[str], others: tuple[re.Pattern[str], ...] = ()) -> Any:
    """The operator that deletes a call whose name matches `names` and none of `others`."""

    def skip(node: Any, _function: str, _text: Text) -> Found:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = _called(node.value)
            if names.search(name) and not any(other.search(name) for other in others):
                yield node, "pass"

    return skip


def _dtype(node: Any, _function: str, text: Text) -> Found:
    if isinstance(node, ast.Attribute) and text(node) in ("torch.float64", "torch.float32"):
        yield node, "torch.bfloat16"
    if _called(node) in ("double", "float") and isinstance(node.func, ast.Attribute):
        yield node, f"({text(node.func.value)}).bfloat16().{_called(node)}()"


def _seed(node: Any, function: str, text: Text) -> Found:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        about = re.search(r"seed|generator|permut|shuffl|order", function + text(node))
        if about and isinstance(node, ast.BinOp):
            yield node, text(node.left)
            yield node, text(node.right)
        elif about:
            yield node, "pass"


def _mask(node: Any, _function: str, text: Text) -> Found:
    of = (
        text(node.func.value) if isinstance(getattr(node, "func", None), ast.Attribute) else "torch"
    )
    if _called(node) in ("where", "masked_fill", "clamp") and of != "torch":
        yield node, f"({of})"
    for side in _operands(node, ast.BitAnd):
        yield node, f"({text(side)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = text(node.left), text(node.comparators[0])
        if right == "IGNORE_INDEX" or (isinstance(node.ops[0], ast.GtE) and right == "0"):
            yield node, f"({left} == {left})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield node, text(node.operand)


def _state(node: Any, function: str, text: Text) -> Found:
    is_state = re.search(r"state|sav|restor|load|resum|buffer|fill|extra", function)
    if is_state and isinstance(node, ast.Dict) and len(node.keys) > 1:
        items = [
            f"**({text(v)})" if k is None else f"{text(k)}: {text(v)}"
            for k, v in zip(node.keys, node.values, strict=True)
        ]
        for left_out, key in enumerate(node.keys):
            rest = [i for n, i in enumerate(items) if n != left_out]
            if key is not None:
                yield node, "{" + ", ".join(rest) + "}"
    if is_state and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield node, text(node.left)
    target = text(node.targets[0]) if isinstance(node, ast.Assign) else ""
    if target.startswith(("self._", "trainer.")) and function != "__init__":
        yield node, "pass"
    if target == "state_names":
        yield node.value, "()"


def _group(node: Any, _function: str, text: Text) -> Found:
    lost = {"weight_decay": "0.0", "lr_scale": "1.0", "momentum": "0.0", "decay": "0.0"}
    key = getattr(node, "attr", getattr(node, "id", None))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
    if isinstance(getattr(node, "ctx", None), ast.Load) and key in lost:
        yield node, lost[key]


def _comparison(node: Any, _function: str, text: Text) -> Found:
    near: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in near:
        yield node, f"{text(node.left)} {near[type(node.ops[0])]} {text(node.comparators[0])}"


def _condition(node: Any, _function: str, text: Text) -> Found:
    if isinstance(node, ast.If | ast.IfExp) and not _only_raises(node):
        yield node.test, f"not ({text(node.test)})"
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, "(" + word.join(f"({text(value)})" for value in node.values) + ")"
    flag = getattr(node.value, "value", None) if isinstance(node, ast.keyword) else None
    if isinstance(flag, bool):
        yield node.value, str(not flag)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({text(node.operand)})"


_NONE_OF = (_WAITS, _BUFFERS, _HOOKS)
OPERATORS: dict[str, tuple[str, Callable[[Any, str, Text], Found]]] = {
    "reduction": ("a sum over ranks or parts is dropped, doubled or overwritten", _reduction),
    "mean": ("a mean for a sum, or the reverse", _mean),
    "axis": ("an axis, level, dimension, rank or size is exchanged", _axis),
    "arguments": ("two arguments are exchanged", _arguments),
    "bound": ("a cut is off by one, or rounds up", _bound),
    "scale": ("a factor is dropped or inverted", _scale),
    "sign": ("+ and - are exchanged", _sign),
    "wait": ("a wait is skipped", _skip(_WAITS)),
    "buffer": ("a buffer is not cleared or not filled", _skip(_BUFFERS, (_WAITS,))),
    "hook": ("a hook or the start of work is skipped", _skip(_HOOKS, (_WAITS, _BUFFERS))),
    "call": ("another call for its effect is skipped", _skip(re.compile("."), _NONE_OF)),
    "dtype": ("a sum or value is rounded to bf16", _dtype),
    "seed": ("a seed or order ignores one of its parts", _seed),
    "mask": ("a mask, bound or padding is ignored", _mask),
    "state": ("an entry or assignment of a state is lost", _state),
    "group": ("a group's decay, momentum or rate is lost", _group),
    "comparison": ("< and <= are exchanged", _comparison),
    "condition": ("a condition or flag is negated", _condition),
}
"""By name: what an operator mirrors, and the operator."""
