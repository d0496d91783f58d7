"""What each block type costs the demo model: docs/quantization.md and docs/quantization.svg.

    python examples/quantization.py build/ docs/

Every matrix of the target that examples/train has left in build/ is written in one type by llama.cpp's encoders,
without calibration; the gate projections of four rows stay in F32, as do vectors. `python -m generate perplexity`
compares each file with the F32 one over the first tokens of build/unseen.txt, packages never trained on.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "train"))

import export
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from target import load

ROOT = Path(__file__).parents[1]
TYPES = ["F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4"]
TYPES += ["NVFP4", "Q3_K", "Q2_K", "TQ2_0", "TQ1_0"]
TOKENS, WINDOW = 2048, 512
BEGIN, END = "<!-- written by python examples/quantization.py -->\n", "\n<!-- end of table -->"  # around the table


def bits(name: str) -> float:
    elements, size = GGML_QUANT_SIZES[Type[name]]
    return 8 * size / elements


def measure(path: Path, text: Path, reference: Path, *, save: bool) -> dict:
    command = [sys.executable, "-m", "generate", "perplexity", str(path), "--text", str(text), "--json"]
    command += ["--ctx-window", str(WINDOW), "--max-tokens", str(TOKENS)]
    command += ["--save-reference" if save else "--reference-file", str(reference)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def table(rows: list[dict]) -> str:
    lines = ["| type | bits per weight | perplexity | mean KL, nats | same top token |", "|---|---|---|---|---|"]
    for r in rows:
        kl = f"{r['kl']:.5f} ± {r['kl error']:.5f}" if r["type"] != "F32" else "—"
        top = f"{r['top1']:.1%} ± {r['top1 error']:.1%}" if r["type"] != "F32" else "—"
        lines.append(f"| {r['type']} | {r['bits']:g} | {r['perplexity']:.4g} | {kl} | {top} |")
    return "\n".join(lines)


def plot(rows: list[dict]) -> str:
    """SVG of divergence (logarithmic) by bits per weight, with the share of equal top tokens at each point."""
    width, height, left, bottom = 860, 520, 70, 50
    low, high = -5.0, 1.5  # powers of ten

    def x(value: float) -> float:
        return left + (math.log2(value) - math.log2(1.5)) / (math.log2(18) - math.log2(1.5)) * (width - left - 30)

    def y(value: float) -> float:
        return 20 + (high - math.log10(max(value, 10**low))) / (high - low) * (height - 20 - bottom)

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(-5, 2):
        at = y(10.0**power)
        svg.append(f'<path d="M{left} {at:.0f}H{width - 30}" stroke="#ddd"/>')
        svg.append(f'<text x="{left - 8}" y="{at + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
    for tick in (1.5, 2, 3, 4, 5, 6, 8, 12, 16):
        svg.append(f'<path d="M{x(tick):.0f} 20V{height - bottom}" stroke="#eee"/>')
        svg.append(f'<text x="{x(tick):.0f}" y="{height - bottom + 18}" text-anchor="middle">{tick:g}</text>')
    svg.append(f'<text x="{(width + left) / 2:.0f}" y="{height - 8}" text-anchor="middle">bits per weight</text>')
    svg.append(f'<text x="16" y="{height / 2:.0f}" text-anchor="middle" transform="rotate(-90 16 {height / 2:.0f})">')
    svg.append("mean KL divergence from F32, nats</text>")
    for r in (r for r in rows if r["type"] != "F32"):
        colour = "#c33" if r["type"].startswith(("IQ", "TQ")) else "#36c" if r["type"].endswith("_K") else "#383"
        svg.append(f'<circle cx="{x(r["bits"]):.1f}" cy="{y(r["kl"]):.1f}" r="4" fill="{colour}"/>')
        label = f"{r['type']} {r['top1']:.0%}"
        svg.append(f'<text x="{x(r["bits"]) + 6:.1f}" y="{y(r["kl"]) - 5:.1f}" font-size="10">{label}</text>')
    return "\n".join([*svg, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("docs", type=Path)
    args = parser.parse_args()
    model = load(args.build / "target.pt")
    tensors, rows = export.target_tensors(model), []
    with tempfile.TemporaryDirectory() as folder:
        text, reference = Path(folder, "text"), Path(folder, "reference")
        text.write_text((args.build / "unseen.txt").read_text()[: 6 * TOKENS].replace("\0", "\n"))
        for name in ["F32", *sorted(TYPES, key=bits, reverse=True)]:
            path = Path(folder, f"{name}.gguf")
            kind = Type[name]
            export.write_target(
                path,
                model.c,
                tensors,
                args.build / "tokenizer.json",
                lambda n, kind=kind: Type.F32 if "ssm_alpha" in n or "ssm_beta" in n else kind,
            )
            result = measure(path, text, reference, save=name == "F32")
            path.unlink()
            row = {"type": name, "bits": bits(name), "perplexity": result["perplexity"]["value"]}
            if agreement := result["agreement"]:
                row |= {"kl": agreement["kl"]["value"], "kl error": agreement["kl"]["error"]}
                row |= {"top1": agreement["top1"]["value"], "top1 error": agreement["top1"]["error"]}
            rows.append(row)
            print(row, flush=True)
    page = args.docs / "quantization.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2])
    (args.docs / "quantization.svg").write_text(plot(rows))


if __name__ == "__main__":
    main()
