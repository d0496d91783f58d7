"""What a notebook shows of replies and models: Markdown and HTML in which a model's text has no effect."""

import re
from pathlib import Path

import nbformat
import pytest
import tiny_chat
from nbclient import NotebookClient

import generate
from common.decode.run import DecodeStats
from common.pieces import Stats
from common.scores import PREFILL_ROWS
from generate.notebook import model_card, safe_markdown
from generate.streams import Reply

STATS = Stats(9, 0, 33, 0.25, 2.0, 0, 0, 0)
WIDGET = "application/vnd.jupyter.widget-view+json"
OURS = r"</?(?:code|pre|sub|details|summary)>"

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a ` b\n` <script>x</script> `",
    "`` ` <b> ` ``",
    "`<b>` and ``<i>`` and \\`<u>`",
    "```\n<script>\n```\n<script>",
    "```html\n</code></pre><script>",
    "~~~\n```\n<b>\n~~~\n<b>",
    "    <script>indented</script>",
    "> <script>\n- <script>\n# <script>",
    "</details><iframe src=javascript:alert(1)>",
    "[x](javascript:alert(1)) [y]( data:text/html,x) [z]\n(x)",
    "[x]\n\n[x]: javascript:alert(1)",
    "[x](java&#115;cript:alert(1)) <javascript:alert(1)>",
    "![tracker](https://example.com/?q=secret)",
    "&lt;script&gt;",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", ["text", "reasoning", "tool_calls"])
def test_a_models_text_has_no_effect(text, place):
    value = [{"function": {"name": "f", "arguments": text}}] if place == "tool_calls" else text
    parts = {"text": "", "tokens": [1], "finish_reason": "stop", "stats": STATS, "logprobs": []} | {place: value}
    shown = Reply(**parts)._repr_markdown_()
    rest = re.sub(OURS, "", shown)
    assert "<" not in rest
    if place != "tool_calls":  # whose block is HTML
        assert "![" not in rest
        assert not re.search(r"\]\((?!https?://)|\]:(?!\s*https?://)", rest)
    assert shown.count("<details>") == shown.count("</details>") == (place == "reasoning")
    assert shown.count("<pre>") == shown.count("</pre>")


def test_formatting_stays():
    text = "# Title\n\n**bold** `a < b & *c*` [link](https://example.com/a_b)\n\n- x > y\n\n| a | b |\n|---|---|"
    expected = text.replace("`a < b & *c*`", "<code>a &#60; b &#38; &#42;c&#42;</code>")
    assert safe_markdown(text) == expected
    assert safe_markdown("x\n```python\nif a < b:\n\n    f('x')\n```\ny").split("\n") == [
        *("x", "", "<pre><code>if a &lt; b:", "", "    f(&#x27;x&#x27;)</code></pre>", "", "y")
    ]


def test_a_reply_folds_its_reasoning_and_ends_with_figures():
    calls = [{"function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]
    reply = Reply("Yes.", [1], "stop", STATS, [], "Hm.", calls)
    assert reply._repr_markdown_() == (
        "<details><summary>Reasoning</summary>\n\nHm.\n\n</details>\n\nYes.\n\n"
        "\n<pre><code>weather({&quot;city&quot;: &quot;Ulm&quot;})</code></pre>\n\n\n"
        "<sub>stop · 33 tokens at 16.0 tok/s · first token in 0.25 s</sub>"
    )
    short = Reply("Yes.", [1], "stop", Stats(9, 0, 1, 0.25, 2.0, 0, 0, 0), [])
    assert short._repr_markdown_() == "Yes.\n\n<sub>stop · 1 token · first token in 0.25 s</sub>"
    fast = Reply("Yes.", [1], "stop", Stats(9, 0, 33, 0.25, 2.0, 0, 0, 0, accepted=DecodeStats()), [])
    assert "tokens per step</sub>" in fast._repr_markdown_()


def test_the_card_of_a_model(tmp_path):
    folder = tiny_chat.write(tmp_path / "tiny<b>")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_k": 20}')
    with generate.load(folder, backend="numpy", ctx=100) as llm:
        card = llm._repr_html_()
        assert repr(llm) == "<LLM tiny<b>: llama on numpy, context 100>"
    for fact in ("tiny&lt;b&gt;", "llama", "numpy", "100 of 256 tokens", "GiB", "temperature 0.7, top_k 20"):
        assert fact in card
    assert "<b>&lt;i&gt;</b>" in model_card("<i>", {})


@pytest.mark.long
def test_loading_and_long_prompts_show_the_notebooks_bar(tmp_path):
    """Each in the cell that waits for it, unless the caller chose otherwise."""
    sources = (
        f"import bimetal\nllm = bimetal.load({str(tiny_chat.write(tmp_path))!r}, backend='numpy', ctx=1000)",
        f"llm.generate([40] * {PREFILL_ROWS + 1}, max_tokens=1)",
        f"llm.generate([41] * {PREFILL_ROWS + 1}, max_tokens=1, on_prefill=lambda read, total: None)",
        f"bimetal.load({str(tmp_path)!r}, backend='numpy', progress=False).close()",
    )
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    where = {"metadata": {"path": Path(__file__).parents[1]}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    data = [[out.get("data", {}) for out in cell.outputs] for cell in notebook.cells]
    bars = [[d["text/plain"].partition(":")[0] for d in cell if WIDGET in d] for cell in data]
    assert bars == [["loading"], ["prefill"], [], []]
