"""Train the tokenizer and encode the corpus.

    python tokens.py build/

Reads train.txt, known.txt and unseen.txt; writes tokenizer.json, {train,known,unseen}.bin (uint16, every document
preceded by <|endoftext|>) and tokens.json (bytes and tokens of each).
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 11008
SPECIAL = ["<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]
# The pre-tokenizer of the Qwen3.5 family: letters keep their combining marks, digits stand alone.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def documents(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
    for some in (texts[i : i + 500] for i in range(0, len(texts), 500)):
        for row in tokenizer.encode_batch_fast(some):
            yield np.array([0, *row.ids], np.uint16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample-mb", type=int, default=48, help="text that the tokenizer is trained on")
    args = parser.parse_args()
    texts = documents(args.folder / "train.txt")
    sample = random.Random(0).sample(texts, len(texts))
    sample = sample[: args.sample_mb * 1_000_000 * len(texts) // sum(map(len, texts))]
    tokenizer = train_tokenizer(sample)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(args.folder / "tokenizer.json"))
    counts = {}
    for split in ("known", "unseen", "train"):
        texts = documents(args.folder / f"{split}.txt")
        stream = np.concatenate(list(encode(tokenizer, texts)))
        stream.tofile(args.folder / f"{split}.bin")
        counts[split] = {"bytes": sum(len(t.encode()) for t in texts), "tokens": len(stream), "documents": len(texts)}
        print(split, counts[split], flush=True)
    (args.folder / "tokens.json").write_text(json.dumps(counts, indent=1) + "\n")
