"""Renderer of chat templates, which are programs in a model's files: Jinja in a sandbox with limits of time and memory.

A thread cannot be stopped from outside, so every step that could be long is checked where it begins: each iteration of
a loop or generator, operator, comparison, test, filter, call, look-up, literal and output checks the clock, and refuses
a value above a limit derived from the conversation. Work of Python between two checks is proportional to that limit.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import islice
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from common.errors import BimetalError
from common.template_limits import SECONDS, LimitError, TemplateLimits

SOURCE = 1 << 16  # characters of a template; published ones have up to 25,000
WORDS = 1000  # characters of a template's own message that are shown
TOKENS = 1 << 14  # of Jinja in a template, which take about a second to compile; published ones have up to 6,000

# Names that chat templates do not need: filters for web pages, results that differ between runs, slow methods.
_NO_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = frozenset(("decode", "encode", "expandtabs", "format_map", "from_bytes", "fromkeys", "maketrans"))
_NO_METHODS |= {"to_bytes", "translate"}


_limits: ContextVar[TemplateLimits] = ContextVar("limits")


class TemplateStoppedError(BimetalError):
    """A template exceeded a limit."""


def run(template: str, inputs: Mapping[str, Any]) -> str:
    """Render `template` (Jinja source) for `inputs`.

    Raises BimetalError with the template's own message if it refuses the inputs, and with one sentence if it fails;
    TemplateStoppedError if it exceeds a limit.
    """
    compiled = compile_template(template)
    try:
        token = _limits.set(TemplateLimits(inputs, SECONDS))
        try:
            return compiled.render(inputs)
        finally:
            _limits.reset(token)
    except TemplateError as error:
        raise BimetalError(f"the chat template refuses this conversation: {error!s:.{WORDS}}") from None
    except LimitError as error:
        raise TemplateStoppedError(f"the chat template was stopped: it {error}") from None
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise BimetalError(f"the chat template fails on this conversation: {words:.{WORDS}}") from None


# -- the sandbox -------------------------------------------------------------------------------------------------------


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        # Constants are not computed at compile time, when no run has limits.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
            finalize=_finalize,
        )
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.tests = {name: _timed(test) for name, test in self.tests.items()}
        self.filters |= {"_steps": _Steps, "_made": lambda value: _limits.get().check(value), "_concat": _concat}
        self.globals.update(namespace=_namespace, dict=_dict)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Guards().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _limits.get().tick()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _limits.get().tick()
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits = _limits.get()
        limits.tick()
        if operator == "%" and isinstance(left, str | bytes):
            limits.check_growth("format", (left, right), {})
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            limits.check_bits(left.bit_length() * right)
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            if not isinstance(value, float) and isinstance(count, int) and limits.size(value) * count > limits.limit:
                raise limits.too_long()
        return limits.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (kwargs take any name)
        limits, method = _limits.get(), getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            limits.check_growth(method.__name__, (owner, *args), kwargs)
        return limits.check(super().call(__context, __obj, *args, **kwargs))

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        limits, held, size = _limits.get(), [], 0
        for piece in pieces:
            limits.tick()
            size += len(piece)
            if size > limits.limit:
                raise limits.too_long()
            held.append(piece)
        return "".join(held)


class _Guards(NodeTransformer):
    """Adds checks to loops, comparisons, literals and `~`, which are neither operators, filters nor calls."""

    def _filter(self, node: nodes.Node, name: str, value: nodes.Node) -> nodes.Node:
        return nodes.Filter(value, name, [], [], None, None).set_lineno(node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2 names these)
        self.generic_visit(node)
        node.iter = self._filter(node, "_steps", node.iter)  # type: ignore[assignment]
        if node.recursive:  # loop(...) goes over values of its own
            tick = self._filter(node, "_made", nodes.Const(None))
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
            node.test = node.test and self._filter(node, "_made", node.test)  # type: ignore[assignment]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops[:-1]:  # of a < b < c
            operand.expr = self._filter(operand, "_made", operand.expr)  # type: ignore[assignment]
        return self._filter(node, "_made", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filter(node, "_concat", nodes.List(node.nodes).set_lineno(node.lineno))

    def _made(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "_made", node)

    visit_List = visit_Dict = _made  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._made(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            return self._made(node)
        return self.generic_visit(node)


class _Steps:
    """The values of a loop, with a check of the clock before each."""

    def __init__(self, values: Any):
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        limits = _limits.get()
        for value in self.values:
            limits.tick()
            yield value

    def __len__(self) -> int:
        return len(self.values)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = hasattr(function, "jinja_pass_arg")  # a context or an environment comes before the value

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        limits = _limits.get()
        limits.check_growth(name, args[passed:], kwargs)
        if name == "sum":  # of lists makes one per step
            args = (*args[:passed], _Steps(args[passed]), *args[passed + 1 :])
        made = function(*args, **kwargs)
        return _values(limits, made) if isinstance(made, Iterator) else limits.check(made)

    return guarded


def _values(limits: TemplateLimits, values: Iterator[Any]) -> Iterator[Any]:
    """Yield `values`, whose total length is limited like that of a list."""
    size = 0
    for value in values:
        limits.tick()
        size += limits.size(value)
        if size > limits.limit:
            raise limits.too_long()
        yield value


def _timed(test: Any) -> Callable[..., Any]:
    @wraps(test)
    def timed(*args: Any, **kwargs: Any) -> Any:
        _limits.get().tick()
        return test(*args, **kwargs)

    return timed


@pass_context
def _finalize(context: Any, value: Any) -> Any:
    return _limits.get().check(value)


def _concat(values: list[Any]) -> str:
    limits = _limits.get()
    if sum(map(limits.size, values)) > limits.limit:
        raise limits.too_long()
    return limits.check("".join(map(str, values)))


class _Generation(Extension):
    """Tag {% generation %}, which marks text of the model for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # a namespace may hold another one many times


def _namespace(*args: Any, **values: Any) -> _Namespace:
    attributes = _dict(*args, **values)
    for name in attributes:
        _check_name(name)
    return _Namespace(attributes)


def _check_name(name: str) -> None:
    if name.startswith("_"):  # such attributes of Python objects would escape the sandbox
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _dict(*args: Any, **values: Any) -> dict:
    """Make a dict, with a check of the clock before each entry: keys of equal hash take quadratic time.

    Templates get this function instead of the type `dict`, whose attributes they could access.
    """
    return dict(*(value if isinstance(value, Mapping) else _Steps(value) for value in args), **values)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    _limits.get().check_format(format)
    return _limits.get().now.strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON; jinja2's own filter escapes for HTML, on which no model was trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def compile_template(template: str) -> Template:
    """Return the program of a Jinja source; raises BimetalError where that is none."""
    if len(template) > SOURCE:
        raise BimetalError(f"the chat template has {len(template)} characters; at most {SOURCE} are supported")
    sandbox = _Sandbox()
    try:
        if any(islice(sandbox.lex(template), TOKENS, None)):
            raise BimetalError(f"the chat template has more than {TOKENS} tokens of Jinja, which is the most supported")
        return sandbox.from_string(template)
    except BimetalError:
        raise
    except TemplateSyntaxError as error:
        raise BimetalError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, MemoryError) as error:  # limits of Python's own parser
        raise BimetalError(f"the chat template is nested too deeply: {error}") from None
    except Exception as error:
        raise BimetalError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from None
