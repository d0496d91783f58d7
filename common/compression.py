"""Choice of the parts of a long prompt that compression keeps: chunks by score, the beginning and the end.

After PFlash: a small model's attention scores each token, chunks are kept by their mean score, and chunks that hold the
words of the question are kept in any case. Compression is lossy: the model reads another text. Texts of messages
are cut before the template is applied, so that roles stay whole and the small model may have a tokenizer of its own.
Prompts beyond its context are scored in pieces; PFlash's block-sparse attention would leave its trained positions.
"""

from collections.abc import Callable, Sequence

import numpy as np

CHUNK = 32  # tokens that are kept or left out together
QUERY = 96  # last tokens of a prompt, which are taken as its question
QUERIES = 8  # last tokens of the question whose attention is measured
HEAD, TAIL = 8, 24  # chunks kept at either end, but at most half of all kept chunks
NGRAM = 4  # tokens in a row of the question that mark a chunk: up to a quarter of those between the ends
POOL = 13  # tokens over which scores are averaged
SINKS = 64  # attention sinks: first tokens of the prompt, with which each piece of it begins
RADII = ((1024, 2, 8), (2048, 4, 16), (2**62, 8, 32))  # below this number of chunks: neighbours, places of an n-gram


def scored(tokens: Sequence[int], attention: Callable[[list[int]], np.ndarray], max_tokens: int) -> np.ndarray:
    """Compute the score of each of `tokens`: (T,) float32.

    attention   takes the tokens of a text; returns the attention of its last tokens to each of them, (n,) float32
    max_tokens  of such a text: a longer prompt is read in pieces, each between the prompt's beginning and its end
    """
    ids = list(tokens)
    if len(ids) <= max_tokens:
        return attention(ids)
    head, tail = ids[:SINKS], ids[-QUERY:]
    size = max_tokens - len(head) - len(tail)
    out = np.zeros(len(ids), np.float32)
    for at in range(SINKS, len(ids) - QUERY, size):
        piece = ids[at : min(at + size, len(ids) - QUERY)]
        found = attention([*head, *piece, *tail])
        out[at : at + len(piece)] = found[SINKS : SINKS + len(piece)]
        out[-QUERY:] = np.maximum(out[-QUERY:], found[-QUERY:])
        out[:SINKS] = np.maximum(out[:SINKS], found[:SINKS])
    return out


def kept_spans(tokens: Sequence[int], scores: np.ndarray, ratio: float) -> list[tuple[int, int]]:
    """Choose the ranges (first, end) of `tokens` to keep, in order: `ratio` of the chunks, by `scores` (T,)."""
    ids, count = np.asarray(tokens, np.int64), -(-len(tokens) // CHUNK)
    most = max(1, int(count * ratio))
    kept = dict.fromkeys(_ends(count, most))
    marked = len(kept) + (most - len(kept)) // 4
    for found, room in ((_anchors(ids, count), marked), (_ranked(scores, count), most)):
        for chunk in found:
            if len(kept) >= room:
                break
            kept[chunk] = None
    spans: list[tuple[int, int]] = []
    for chunk in sorted(kept):
        first, end = chunk * CHUNK, min((chunk + 1) * CHUNK, len(ids))
        if spans and spans[-1][1] == first:
            first = spans.pop()[0]
        spans.append((first, end))
    return spans


def _ends(count: int, chunks: int) -> list[int]:
    """List the last and the first of `count` chunks; these are among the `chunks` to keep, whatever their scores."""
    tail = max(1, min(TAIL, chunks * TAIL // (2 * (HEAD + TAIL))))
    head = min(HEAD, chunks * HEAD // (2 * (HEAD + TAIL)))
    return [*range(max(count - tail, 0), count), *range(min(head, max(count - tail, 0)))]


def _anchors(ids: np.ndarray, count: int) -> list[int]:
    """List the chunks with an n-gram of the question, those with rare n-grams first, and then their neighbours."""
    first = max(len(ids) - QUERY, 0)
    radius, places = next((r, h) for below, r, h in RADII if count < below)
    grams: dict[tuple[int, ...], list[int]] = {tuple(ids[at : at + NGRAM]): [] for at in range(first, len(ids) - NGRAM)}
    windows = np.lib.stride_tricks.sliding_window_view(ids[:first], NGRAM) if first >= NGRAM else ids[:0]
    for gram, found in grams.items():
        if len(windows):
            found += np.flatnonzero((windows == np.array(gram)).all(axis=1)).tolist()
    hits = [at // CHUNK for found in sorted(grams.values(), key=len) if len(found) <= places for at in found]
    near = [hit + sign * far for far in range(1, radius + 1) for hit in hits for sign in (-1, 1)]
    return [chunk for chunk in (*hits, *near) if 0 <= chunk < count]


def _ranked(scores: np.ndarray, count: int) -> list[int]:
    """Return all chunks, the best first, by the mean of their tokens' scores, each averaged with its neighbours'."""
    weights = np.convolve(np.ones(len(scores)), np.ones(POOL), "same")
    pooled = np.convolve(scores, np.ones(POOL), "same") / weights
    means = [pooled[at * CHUNK : (at + 1) * CHUNK].mean() for at in range(count)]
    return np.argsort(-np.array(means), kind="stable").tolist()
