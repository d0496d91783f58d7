"""How often prompt compression keeps the fact that a question asks for, in texts of several lengths.

    python examples/needles.py --model demo --lengths 2000,8000

A text is many definitions of functions, or of sentences about cities (`--kind prose`), one of which the question at the
end asks for. Each row is a length: the share of the facts' tokens that all rules of `--prefill-compression` keep, and
that as many chunks keep by the drafter's attention alone, at random, and at the end of the text; the tokens that are
left; and the seconds of scoring.
"""

import argparse
import random
import time

import numpy as np

import generate
from common.compression import CHUNK, QUERIES, kept_spans, scored

NOUNS = ["river", "garden", "letter", "engine", "window", "market", "story", "bridge", "lamp", "forest", "clock"]
VERBS = ["crossed", "found", "painted", "left", "opened", "kept", "watched", "moved", "built", "carried"]
CITIES = ["Paris", "Oslo", "Lima", "Cairo", "Delhi", "Rome", "Tokyo", "Quito", "Accra", "Riga"]
PIECE = 32768  # most tokens that are read at once, as in the server


def line(kind: str, rng: random.Random) -> str:
    """A definition or a sentence that answers no question."""
    if kind == "code":
        return f"def {rng.choice(VERBS)}_{rng.choice(NOUNS)}(y):\n    return y + {rng.randrange(1000, 9999)}\n"
    return f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)} near the old {rng.choice(NOUNS)}. "


def text(kind: str, encode, length: int, rng: random.Random) -> tuple[list[int], tuple[int, int]]:
    """The tokens of a text with a question, and where the fact stands that it asks for."""
    if kind == "code":
        name = f"{rng.choice(NOUNS)}_{rng.randrange(100, 999)}"
        needle = f"def {name}(x):\n    return x * {rng.randrange(1000, 9999)}\n"
        question = f"\n# which factor?\nassert {name}(1) =="
    else:
        city = rng.choice(CITIES)
        needle = f"The secret number of {city} is {rng.randrange(1000, 9999)}. "
        question = f"\n\nQuestion: which number belongs to {city}?\nAnswer: the number is"
    each = len(encode(line(kind, rng)))
    lines = [line(kind, rng) for _ in range(length // each)]
    at = rng.randrange(len(lines) // 8, 3 * len(lines) // 4)
    before, after = encode("".join(lines[:at])), encode("".join(lines[at:]) + question)
    fact = encode(needle)
    return [*before, *fact, *after], (len(before), len(before) + len(fact))


def share(spans: list[tuple[int, int]], place: tuple[int, int]) -> float:
    """How much of the fact lies in the spans."""
    inside = sum(max(0, min(end, place[1]) - max(first, place[0])) for first, end in spans)
    return inside / (place[1] - place[0])


def chunks(chosen: np.ndarray) -> list[tuple[int, int]]:
    """The stretches that chunks cover, neighbours in one."""
    spans: list[tuple[int, int]] = []
    for chunk in sorted(int(c) for c in chosen):
        first = spans.pop()[0] if spans and spans[-1][1] == chunk * CHUNK else chunk * CHUNK
        spans.append((first, (chunk + 1) * CHUNK))
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="the drafter")
    parser.add_argument("--backend", help="mlx, cuda or numpy (default: the fastest)")
    parser.add_argument("--lengths", default="2000,8000", help="tokens of the texts (default: 2000,8000)")
    parser.add_argument("--texts", type=int, default=4, help="of each length (default: 4)")
    parser.add_argument("--keep", type=float, default=0.1, help="share of the chunks that is kept (default: 0.1)")
    parser.add_argument("--kind", choices=("code", "prose"), default="code")
    args = parser.parse_args()
    rng = random.Random(1)
    with generate.load(args.model, backend=args.backend, parallel=1) as llm:
        room = min(llm.context, PIECE)
        print(f"{args.model}, {args.kind}, {args.texts} texts of each length, {args.keep:.0%} of the chunks kept")
        print(f"{'tokens':>8} {'all rules':>10} {'attention':>10} {'random':>8} {'end':>6} {'left':>6} {'seconds':>8}")
        for length in map(int, args.lengths.split(",")):
            found, left, seconds = np.zeros(4), [], []
            for _ in range(args.texts):
                tokens, place = text(args.kind, llm.tokenizer.encode_plain, length, rng)
                started = time.perf_counter()
                scores = scored(tokens, lambda ids: llm.attention_to(ids, QUERIES), room)
                seconds.append(time.perf_counter() - started)
                spans = kept_spans(tokens, scores, args.keep)
                count = -(-len(tokens) // CHUNK)
                most = max(1, int(count * args.keep))
                means = [scores[at * CHUNK : (at + 1) * CHUNK].mean() for at in range(count)]
                best = chunks(np.argsort(means)[-most:])
                draws = [chunks(np.array(rng.sample(range(count), most))) for _ in range(200)]
                found += share(spans, place), share(best, place), np.mean([share(d, place) for d in draws]), 0
                found[3] += share([((count - most) * CHUNK, len(tokens))], place)
                left.append(sum(end - first for first, end in spans))
            rules, attention, drawn, end = found / args.texts
            print(
                f"{len(tokens):8} {rules:10.0%} {attention:10.0%} {drawn:8.0%} {end:6.0%} {np.mean(left):6.0f} "
                f"{np.median(seconds):8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
