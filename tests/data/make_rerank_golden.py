"""Makes rerank_golden.json: scores of transformers for the tiny rerankers of tests/tiny_reranker.py.

A causal model's score is the softmax over the logits of "no" and "yes" after the prompt of Qwen3-Reranker's model card,
a classifier's the sigmoid of its one logit, or the softmax over two. Made with transformers 5.24 and torch 2.13 on the
CPU, in float32.

PYTHONPATH=.:tests python tests/data/make_rerank_golden.py
"""

import json
import tempfile
from pathlib import Path

import tiny_reranker
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3ForSequenceClassification

QUERY = "What is the capital of France?"
DOCUMENTS = [
    "Paris is the capital of France.",
    "Bread is made of flour, water and salt.",
    "",
    "\n  Zürich lies in der Schweiz  ",
    "France is a country in Europe, with many rivers. " * 3,
]
INSTRUCTIONS = [None, "Find passages about food"]


@torch.no_grad()
def scores(folder: Path, labels: int, instruction: str | None) -> list[float]:
    kind = Qwen3ForSequenceClassification if labels else Qwen3ForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    begin, end = (
        tokenizer.encode(text, add_special_tokens=False) for text in (tiny_reranker.SYSTEM, tiny_reranker.END)
    )
    found = []
    for document in DOCUMENTS:
        task = instruction or tiny_reranker.INSTRUCTION
        pair = f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = torch.tensor([[*begin, *tokenizer.encode(pair, add_special_tokens=False), *end]])
        logits = model(ids).logits[0]
        if not labels:
            no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
            logits = logits[-1, [no, yes]]
        found.append(float(logits.sigmoid() if labels == 1 else logits.softmax(-1)[1]))
    return found


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, given in tiny_reranker.FORMS.items():
            path = tiny_reranker.write(Path(folder) / name, **given)
            golden[name] = [scores(path, given.get("labels", 0), instruction) for instruction in INSTRUCTIONS]
    given = {"query": QUERY, "documents": DOCUMENTS, "instructions": INSTRUCTIONS}
    out = Path(__file__).parent / "rerank_golden.json"
    out.write_text(json.dumps({**given, "scores": golden}, indent=1) + "\n")


if __name__ == "__main__":
    main()
