"""Check the exported files with other implementations: transformers for the folder, llama.cpp for the GGUF files; then
read every export with bimetal's own loaders.

    python check.py build/ out/
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import export
import gguf
import llama_cpp
import numpy as np
import torch
from draft import load as load_draft
from gguf import GGMLQuantizationType as Type
from target import load
from train_target import stream
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

SAMPLE = 8192
ROOT = Path(__file__).parents[2]


def dequantized(path: Path, expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file in float32, each near its tensor of `expected`."""
    stored = {}
    for t in gguf.GGUFReader(path).tensors:
        stored[t.name] = gguf.quants.dequantize(t.data, t.tensor_type).reshape(expected[t.name].shape)
    assert stored.keys() == expected.keys()
    worst = max(np.linalg.norm(stored[n] - w) / np.linalg.norm(w) for n, w in expected.items())
    print(f"{path.name}: largest relative error of a tensor {worst:.4f}")
    return stored


def bits_per_byte(path: Path, folder: Path) -> float:
    """Bits per byte of the first SAMPLE tokens of the unseen packages, by llama.cpp, in windows of 2048."""
    about = json.loads((folder / "tokens.json").read_text())["unseen"]
    tokens, nats = stream([folder / "unseen.bin"], "cpu")[:SAMPLE].long(), []
    llama = llama_cpp.Llama(str(path), n_ctx=2048, logits_all=True, verbose=False)
    for window in tokens.split(2048):
        llama.reset()
        llama.eval(window.tolist())
        scores = torch.tensor(np.array(llama.scores[: len(window) - 1]))
        nats.append(torch.nn.functional.cross_entropy(scores, window[1:]).item())
    return float(np.mean(nats)) / math.log(2) * about["tokens"] / about["bytes"]


def own_loaders(folder: Path, out: Path) -> None:
    """Read every export of the target in bimetal, and compare it with the safetensors folder, which is not rounded."""
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text")
        text.write_text((folder / "unseen.txt").read_text()[:20_000].replace("\0", "\n"))
        command = [
            sys.executable,
            "-m",
            "generate",
            "perplexity",
            "--text",
            str(text),
            "--max-tokens",
            "2048",
            "--json",
        ]
        for path in [*sorted(out.glob("demo-qwen35-Q*.gguf")), *out.glob("demo-qwen35-mlx-*")]:
            args = [*command, str(path.resolve()), "--reference", str((out / "demo-qwen35").resolve())]
            found = json.loads(subprocess.run(args, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
            kl, top1 = (found["agreement"][name]["value"] for name in ("kl", "top1"))
            print(f"bimetal, {path.name}: perplexity {found['perplexity']['value']:.4f}, KL {kl:.5f}, top-1 {top1:.1%}")
            assert kl < (1e-3 if "Q8_0" in path.name else 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokens = stream([args.folder / "unseen.bin"], "cpu")[:300].long()[None]
    model, draft = load(args.folder / "target.pt"), load_draft(args.folder / "draft.pt")
    other = Qwen3_5ForCausalLM.from_pretrained(args.out / "demo-qwen35", dtype=torch.float32)
    with torch.no_grad():
        ours = model.head(model(tokens)[-1])[0]
        reference = other(tokens).logits[0]
    error = (ours - reference).abs().max().item()
    print(f"transformers: largest difference {error:.1e} of logits up to {reference.abs().max():.1f}")
    assert error < 1e-3

    tokenizer = AutoTokenizer.from_pretrained(args.out / "demo-qwen35")
    text = str(tokenizer.decode(tokens[0, 1:]))
    assert tokenizer.encode(text) == tokens[0, 1:].tolist(), "the tokenizer does not round-trip"

    values, tokenizer_json = export.target_tensors(model), args.folder / "tokenizer.json"
    with tempfile.TemporaryDirectory() as folder:
        # llama.cpp reads F32 copies: a wrong name, order or constant shows, and the kernels' own rounding does not.
        copy = Path(folder) / "copy.gguf"
        export.write_target(copy, model.c, values, tokenizer_json, lambda _: Type.F32)
        llama = llama_cpp.Llama(str(copy), n_ctx=512, logits_all=True, verbose=False)
        assert llama.tokenize(text.encode(), add_bos=False, special=False) == tokens[0, 1:].tolist()
        llama.eval(tokens[0].tolist())
        theirs = torch.tensor(np.array(llama.scores[: tokens.shape[1]])).log_softmax(-1)
        ours = ours.log_softmax(-1)
        divergence = (ours.exp() * (ours - theirs)).sum(-1).max().item()
        print(f"llama.cpp: largest divergence {divergence:.1e} nats")
        assert divergence < 1e-3  # its versions differ in how they guard the norm of a key against zero
        print(f"bits per byte, {SAMPLE} tokens, not quantized: {bits_per_byte(copy, args.folder):.4f}")
        for path in sorted(args.out.glob("demo-qwen35-Q*.gguf")):
            stored = dequantized(path, values)
            export.write_target(copy, model.c, stored, tokenizer_json, lambda _: Type.F32)
            print(f"bits per byte, {SAMPLE} tokens, {path.name}: {bits_per_byte(copy, args.folder):.4f}")
    for path in args.out.glob("demo-qwen35-dflash-*.gguf"):
        dequantized(path, export.draft_tensors(draft))
    own_loaders(args.folder, args.out)


if __name__ == "__main__":
    main()
