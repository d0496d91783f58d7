"""Replies and models in a notebook. A model's text is untrusted: it may format, and no more.

Markdown passes HTML through, so every "<" of a model's text becomes an entity; code, where entities would show, becomes
escaped HTML. Pictures are not fetched, and links lead to http and https alone.
"""

import html
import re
import string
import sys
from collections.abc import Iterator, Sequence

from common.amounts import counted
from common.pieces import Stats

FENCE = re.compile(r"^\s*(`{3,}(?=[^`]*$)|~{3,})")
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
ENTITIES = str.maketrans({char: f"&#{ord(char)};" for char in string.punctuation})


def in_notebook() -> bool:
    """Test whether a Jupyter kernel runs this process."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def reply_markdown(text: str, reasoning: str, calls: Sequence[str], finish_reason: str, stats: Stats) -> str:
    """Render a reply as Markdown: folded reasoning, text, tool calls, and a line of statistics.

    calls  the tool calls as text
    """
    parts = [f"<details><summary>Reasoning</summary>\n\n{safe_markdown(reasoning)}\n\n</details>"] if reasoning else []
    parts += [safe_markdown(text)] if text else []
    parts += [_block(call) for call in calls]
    figures = [
        finish_reason,
        counted(stats.new_tokens, "token") + (f" at {stats.decode_tps:.1f} tok/s" if stats.is_timed else ""),
        f"first token in {stats.prefill_seconds:.2f} s",
    ]
    if stats.accepted is not None:
        figures.append(f"{stats.accepted.length:.2f} tokens per step")
    if stats.wedlm is not None:
        figures.append(f"{stats.wedlm.tokens_per_forward:.2f} tokens per forward")
    return "\n\n".join([*parts, f"<sub>{' · '.join(figures)}</sub>"])


def model_card(name: str, facts: dict[str, str]) -> str:
    """Render a model as a small HTML table."""
    left = 'style="text-align:left"'
    rows = "".join(
        f"<tr><th {left}>{html.escape(key)}</th><td {left}>{html.escape(value)}</td></tr>"
        for key, value in facts.items()
    )
    return f"<table><caption><b>{html.escape(name)}</b></caption>{rows}</table>"


def safe_markdown(text: str) -> str:
    """Markdown of `text` in which nothing but formatting has an effect."""
    return "\n".join(_blocks(text.splitlines()))


def _blocks(lines: Sequence[str]) -> Iterator[str]:
    fence, code = "", list[str]()
    for line in lines:
        if fence:
            if re.fullmatch(rf"\s*{re.escape(fence[0])}{{{len(fence)},}}\s*", line):
                yield _block("\n".join(code))
                fence, code = "", []
            else:
                code.append(line)
        elif found := FENCE.match(line):
            fence = found[1]
        else:
            yield _line(line)
    if fence:
        yield _block("\n".join(code))


def _line(line: str) -> str:
    parts = SPAN.split(line)  # text, backticks, code, text, ...
    return "".join(
        f"<code>{part.translate(ENTITIES)}</code>" if at % 3 == 2 else _inert(part)
        for at, part in enumerate(parts)
        if at % 3 != 1
    )


def _inert(text: str) -> str:
    text = text.replace("<", "&lt;").replace("![", "!&#91;")
    text = re.sub(r"\]\((?!https?://)", "]&#40;", text)
    return re.sub(r"\]:(?!\s*https?://)", "]&#58;", text)


def _block(code: str) -> str:
    return f"\n<pre><code>{html.escape(code)}</code></pre>\n"
