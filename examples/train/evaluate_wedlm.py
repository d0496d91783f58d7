"""Accuracy and speed of a WeDLM demo over its held-out questions, as a Markdown table.

    python evaluate_wedlm.py demo-wedlm --count 200

A reply is right if it is the answer, token for token. Tokens per forward are over all replies of a task, their end
tokens included.
"""

import argparse
import time

import wedlm_tasks

import generate
from common.decoders import PRESETS

WAYS = {
    "one token per step": {"spec": "off"},
    **{f"{name} ({preset.words})": {"wedlm_preset": name} for name, preset in PRESETS.items()},
    "16, 0.4, 0.02": {"wedlm_window": 16, "wedlm_tau": 0.4, "wedlm_lambda": 0.02},
    "verify": {"wedlm_verify": True, "wedlm_window": 16, "wedlm_tau": 1},
}


def measure(llm: generate.LLM, task: str, count: int, options: dict) -> tuple[float, float, float, float]:
    """Share of right answers, tokens per forward, rows per token, tokens per second."""
    right = tokens = fills = rows = 0
    started = time.perf_counter()
    for question, answer in wedlm_tasks.held_out(task)[:count]:
        reply = llm.generate(question, max_tokens=80, **options)
        right += reply.text == answer
        tokens += reply.stats.new_tokens
        windows = reply.stats.wedlm
        fills += windows.fills if windows else reply.stats.new_tokens
        rows += windows.rows if windows else reply.stats.new_tokens
    return right / count, tokens / fills, rows / tokens, tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo-wedlm")
    parser.add_argument("--count", type=int, default=wedlm_tasks.HELD_OUT)
    parser.add_argument("--backend")
    args = parser.parse_args()
    print("| task | decoding | accuracy | tokens per forward | rows per token | tok/s |\n|---|---|---|---|---|---|")
    with generate.load(args.model, backend=args.backend) as llm:
        for task in wedlm_tasks.TASKS:
            for way, options in WAYS.items():
                accuracy, length, rows, speed = measure(llm, task, args.count, options)
                print(f"| {task} | {way} | {accuracy:.3f} | {length:.2f} | {rows:.2f} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
