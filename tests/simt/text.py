"""The text that MLX hands to Metal for a kernel, and its parts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

KERNEL = re.compile(
    r"(?:template <(?P<params>[^\n]*)>\n)?\[\[kernel\]\] void (?P<name>\w+)\(\n(?P<args>.*?)\) \{\n", re.S
)
ARGUMENT = re.compile(r"\s*(?:const )?(?:(device|constant) )?(\S+?)([*&]?) (\w+) \[\[(\w+)(?:\(\d+\))?\]\]")


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel. mark: * or & for a buffer, nothing for an attribute such as thread_position_in_grid."""

    type: str
    mark: str
    name: str


@dataclass(frozen=True)
class Launch:
    """The request of a kernel call to Metal: the text, and a grid counted in threads."""

    name: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    contiguous: bool


def recorded(kernel: Callable[..., Any], inputs: Sequence[mx.array], **call: Any) -> Launch:
    """The launch that `kernel`, from mx.fast.metal_kernel, makes; MLX records it under export without Metal."""
    seen: list[list[Any]] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("type") == "primitive" and event["name"] == "CustomKernel":
            seen.append(event["arguments"])

    mx.export_function(note, lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
    name, text, *sizes = seen[0]
    return Launch(name, text, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[7])


def without_comments(text: str) -> str:
    """The text with comments blanked and line numbers unchanged."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0])

    return re.sub(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.S)


def arguments(text: str) -> list[Argument]:
    match = KERNEL.search(text)
    assert match, f"MLX's text has no kernel:\n{text[-2000:]}"
    return [Argument(type, mark, name) for _, type, mark, name, _ in ARGUMENT.findall(match["args"])]


def flat(text: str, signature: Callable[[str, str], str]) -> str:
    """The text with the kernel's template arguments as local names and line numbers unchanged.

    signature  makes the kernel's opening, without its brace, from its name and arguments
    """
    text = without_comments(text)
    match = KERNEL.search(text)
    assert match, "MLX's text has no kernel"
    aliases, end = "", len(text)
    if match["params"]:
        name = re.escape(match["name"])
        instance = re.search(rf"^template .* {name}<(.*)>;\n", text[match.end() :], re.M)
        assert instance, "MLX's text does not instantiate its template"
        end = match.end() + instance.start()
        values = instance[1].split(", ")
        for (kind, alias), value in zip((p.split() for p in match["params"].split(", ")), values, strict=True):
            aliases += f"typedef {value} {alias}; " if kind == "typename" else f"constexpr {kind} {alias} = {value}; "
    opening = signature(match["name"], match["args"]) + " { " + aliases + "\n"
    if match["params"]:
        opening = "\n" + opening
    return text[: match.start()] + opening + text[match.end() : end]
