"""Makes fim_golden.json: what llama.cpp's server makes of requests to /infill, of tiny models with random weights.

PYTHONPATH=.:tests python tests/data/make_fim_golden.py path/to/llama-server
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_chat
from llama_server import gguf_of, running

CONTEXT, LIMIT = 4096, 128  # also in tests/test_infill.py
MODELS = {"repository": tiny_chat.FIM, "bare": tiny_chat.FIM[:3]}
MUTED = (*tiny_chat.FIM[:3], "<|im_start|>")  # tokens that llama.cpp's replies go on after, and hide
KEPT = ("content", "prompt", "stop_type", "stopping_word", "tokens_evaluated", "has_new_line", "truncated")


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("abc  re\n(x)=") for _ in range(length))


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Short and long texts, some cut to the batch, other files, some cut to the context, and limits by lines."""
    found = []
    for case in range(14):
        files = [(f"f{i}.py", text(rng, rng.choice([3, 50, 900]))) for i in range((0, 1, 4)[case % 3])]
        sent = {"input_prefix": text(rng, rng.choice([0, 5, 300, 2200])), "prompt": text(rng, rng.choice([0, 4, 40]))}
        sent |= {"input_suffix": text(rng, rng.choice([0, 5, 300, 800])), "n_predict": 24}
        sent["input_extra"] = [{"filename": name, "text": content} for name, content in files]
        sent |= {"samplers": ["temperature"], "temperature": 0}
        sent |= {"n_indent": rng.choice([1, 4])} if case % 2 else {}
        sent |= {"stop": ["a", "b"]} if case % 4 == 0 else {}
        found.append(sent)
    found[0]["input_prefix"] += "<|fim_prefix|>x<|im_end|>"
    return found


def draws(rng: random.Random) -> list[dict[str, Any]]:
    """Requests as an editor sends them, for one token, whose answers show which tokens could be drawn."""
    samplers = {"samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.9, "n_probs": 40, "n_predict": 1}
    given = samplers | {"post_sampling_probs": True}
    return [{"input_prefix": text(rng, 30), "input_suffix": text(rng, 9), "seed": at} | given for at in range(60)]


def answers(server: str, name: str, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Return the answers of a server over one model."""
    model = tiny_chat.write(folder / name, fim=MODELS[name], context=CONTEXT)
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    lines = [[token["id"], -90.0] for token in added if token["content"] in MUTED]
    lines += [[_byte(model, byte), 5.0] for byte in ("Ċ", "Ġ")]  # lines
    rarely = [[token["id"], -90.0 if token["content"] in MUTED else -6.0] for token in added]
    found, chosen = [], []
    with running(server, gguf_of(model), f"-np 1 -c {CONTEXT} -n {LIMIT} -b 2048") as post:
        for sent in requests(rng):
            got = post("/infill", sent | {"logit_bias": lines, "cache_prompt": False})
            sent["logit_bias"] = {str(id): value for id, value in lines}
            found.append({"sent": sent, "answer": {key: got[key] for key in KEPT}})
        for sent in draws(rng):
            got = post("/infill", sent | {"logit_bias": rarely})
            for shown in got.get("completion_probabilities", []):  # none of a part of a character
                ids = sorted(each["id"] for each in shown["top_probs"])
                chosen.append({"prompt": got["prompt"], "candidates": ids})
    return {"answers": found, "draws": chosen, "bias": {str(id): value for id, value in rarely}}


def _byte(model: Path, token: str) -> int:
    id: int = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"][token]
    return id


if __name__ == "__main__":
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        golden = {name: answers(sys.argv[1], name, Path(folder), rng) for name in MODELS}
    out = Path(__file__).parent / "fim_golden.json"
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
