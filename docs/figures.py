"""Draw the figures and write the tables of the documentation, from BENCHMARKS.tsv and docs/kv-cache.tsv.

python docs/figures.py          rewrite them
python docs/figures.py --check  exit with 1 if they are not what the log gives
"""

import csv
import math
import sys
from pathlib import Path

from generate.line_plot import Line, draw

DOCS = Path(__file__).parent
BEGIN, END = "<!-- written by python docs/figures.py: {} -->", "<!-- end of table -->"
H200, COMMIT = "NVIDIA H200, compute capability 9.0", "fb56852"  # the baseline that the pages show
SWEEP = "40bb6ac"  # the baseline of the demo pair by budget
MODELS = {
    "qwen3.6-27b:q4_k_m": "Qwen3.6-27B",
    "wedlm-8b:q4_k_m": "WeDLM-8B",
    "laguna-xs.2:q4_k_m": "Laguna-XS.2",
    "glm-4.7-flash:q4_k_m": "GLM-4.7-Flash",
}
CONTEXTS, ROWS, PREFILLS = (128, 512, 32768), (1, 2, 4, 8, 16, 22, 32, 64), (512, 8192)


def rows(commit: str) -> list[dict[str, str]]:
    """Read the baseline of one commit on one H200."""
    with (DOCS.parent / "BENCHMARKS.tsv").open(newline="") as file:
        return [r for r in csv.DictReader(file, delimiter="\t") if r["commit"] == commit and r["machine"] == H200]


def rate(model: str, n: int, context: int) -> float:
    """Rows per second in steps of `n` rows."""
    found = [r for r in rows(COMMIT) if r["model"] == model and r["decoder"] == f"steps of {n}"]
    return next(float(r["decode_tps_median"]) for r in found if int(r["context"]) == context)


def prefill(model: str, n: int) -> float:
    """Tokens per second of a prompt of `n` tokens."""
    found = [r for r in rows(COMMIT) if r["model"] == model and r["decoder"] == "prefill"]
    return next(float(r["prefill_tps"]) for r in found if int(r["prompt_tokens"]) == n)


def sweep() -> dict[str, tuple[float, float]]:
    """Read the demo pair's results on prompts from unseen packages: tokens per step and per second, by decoder."""
    found = [r for r in rows(SWEEP) if r["note"].startswith("unseen")]
    return {r["decoder"]: (float(r["accept_len"]), float(r["decode_tps_median"])) for r in found}


def losses() -> list[dict[str, str]]:
    """Read the losses of compressed KV caches, by text and pair: docs/kv-cache.tsv."""
    with (DOCS / "kv-cache.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


LOSSES = {  # by name of a table: model, text, tokens of a window
    "demo": ("demo", "code", "2048"),
    "smollm2": ("smollm2", "WikiText-2", "2048"),
    "smollm2-code": ("smollm2", "code", "2048"),
    "smollm2-8192": ("smollm2", "WikiText-2", "8192"),
}


def loss_table(model: str, text: str, window: str) -> str:
    """Tabulate the losses of one model on windows of one text, widest formats first."""
    out = [
        _row(
            "keys, values",
            "bits per value",
            "bytes per token",
            "read exactly",
            "perplexity",
            "mean KL, nats",
            "same top",
        ),
        _row("---", *["---:"] * 2, "---", *["---:"] * 3),
    ]
    for r in losses():
        if (r["model"], r["text"], r["window"]) == (model, text, window):
            apart = f" ({r['apart']})" if r["apart"] else ""
            first, _, latest = r["exact"].partition("+")
            exact = f"first {first}, latest {latest}" if latest else "none"
            kl = f"{r['kl']} ± {r['kl_error']}"
            cells = r["bits"], r["bytes"], exact, f"{r['perplexity']} ({r['rise']} %)", kl, f"{r['same_top']} %"
            out.append(_row(f"`{r['keys']}`, `{r['values']}`{apart}", *cells))
    return "\n".join(out)


def loss_lines() -> list[Line]:
    """KL of the demo model by bits per value: with rows that are read exactly, and from codes alone."""
    lines = []
    for name, kept in (("exact tokens", ("512+128", "4+128")), ("codes alone", ("none",))):
        best: dict[float, float] = {}
        for r in losses():
            widest = (r["keys"], r["values"]) == ("q8_0", "q8_0")  # the right end of both
            if r["model"] == "demo" and not r["apart"] and (widest or r["exact"] in kept):
                bits = float(r["bits"])
                best[bits] = min(best.get(bits, math.inf), float(r["kl"]))
        lines.append(Line(name, sorted(best), [best[bits] for bits in sorted(best)]))
    return lines


def tables() -> dict[Path, dict[str, str]]:
    """Return the text of each generated table, by page and name."""
    speed = [
        _row("tokens per second", *(f"decode, {c:,} tokens" for c in CONTEXTS), *(f"prefill, {n:,}" for n in PREFILLS)),
        _row("---", *["---:"] * (len(CONTEXTS) + len(PREFILLS))),
    ]
    steps = [_row("milliseconds per step", *map(str, ROWS)), _row("---", *["---:"] * len(ROWS))]
    for model, name in MODELS.items():
        cells = [rate(model, 1, c) for c in CONTEXTS] + [prefill(model, n) for n in PREFILLS]
        speed.append(_row(name, *(f"{cell:,.0f}" for cell in cells)))
        steps.append(_row(name, *(f"{n / rate(model, n, 512) * 1e3:.2f}" for n in ROWS)))
    return {
        DOCS / "benchmarks.md": {"speed": "\n".join(speed), "rows": "\n".join(steps)},
        DOCS / "kv-cache.md": {name: loss_table(*of) for name, of in LOSSES.items()},
    }


def figures() -> dict[Path, str]:
    """Return the SVG text of each figure."""
    by_context = [Line(name, CONTEXTS, [rate(m, 1, c) for c in CONTEXTS]) for m, name in MODELS.items()]
    by_rows = [Line(name, ROWS, [rate(m, n, 512) for n in ROWS]) for m, name in MODELS.items()]
    found = sweep()
    budgets = sorted(int(name.split()[1]) for name in found if name.startswith("tree "))
    accepted, speed = [
        [Line("tree", budgets, [found[f"tree {n}"][i] for n in budgets])]
        + [Line(name, budgets, [found[name][i]] * len(budgets), True) for name in ("chain", "lookup", "plain")]
        for i in (0, 1)
    ]
    return {
        DOCS / "decode.svg": draw(
            f"One H200, Q4_K_M, random weights ({COMMIT})",
            ("context length, tokens", "decoded tokens per second", by_context),
            ("rows in a step, context of 512", "rows per second", by_rows),
        ),
        DOCS / "kv-cache.svg": draw(
            "Demo model, code, against its own float32 cache",
            ("bits per value, scales included", "mean KL, nats", loss_lines()),
        ),
        DOCS / "speculative.svg": draw(
            f"Demo pair on one H200, prompts of unseen packages ({SWEEP})",
            ("budget: draft tokens per step", "acceptance length, tokens per step", accepted),
            ("budget: draft tokens per step", "tokens per second, median", speed),
        ),
    }


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def texts() -> dict[Path, str]:
    """Return the expected text of every generated file."""
    out = figures()
    for path, named in tables().items():
        text = path.read_text()
        for name, table in named.items():
            begin = BEGIN.format(name)
            head, found, rest = text.partition(begin)
            assert found, f"{path} lacks {begin}"
            text = f"{head}{begin}\n{table}\n{END}{rest.partition(END)[2]}"
        out[path] = text
    return out


def main(argv: list[str]) -> int:
    stale = [path for path, text in texts().items() if not path.exists() or path.read_text() != text]
    if "--check" in argv:
        for path in stale:
            print(f"{path} is not what BENCHMARKS.tsv gives")
        return int(bool(stale))
    for path, text in texts().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
