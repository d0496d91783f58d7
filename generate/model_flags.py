"""Flags of the commands that look at a model's files, measure a model, or make another one of it."""

import argparse

from common.errors import UsageError
from generate import flags, values
from generate.flags import BACKENDS, MODEL_HELP, Parser


def rm(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument("--yes", "-y", action="store_true", help="remove without asking")


def inspect(p: Parser) -> None:
    flags.named_model(p)
    flags.cache(p)


def pack(p: Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("out", type=values.file, metavar="OUT", help="name of a new file, such as model.experts")


def plan(p: Parser) -> None:
    p.add_argument(
        "model",
        metavar="MODEL",
        help=f"{MODEL_HELP}; or the shapes of qwen3.5-122b-a10b, qwen3.5-397b-a17b, qwen3.6-35b-a3b or laguna-xs.2",
    )
    where = p.add_mutually_exclusive_group(required=True)
    p.hints["--machines"] = "--cluster FILE predicts for several machines, --machine NAME for streamed experts on one"
    where.add_argument(
        "--cluster",
        metavar="FILE",
        help="predict how to divide the model among the machines of this JSON file (docs/machines.md)",
    )
    p.add_argument(
        "--prompt-tokens", type=values.positive, metavar="N", help="with --cluster: prompt tokens (default: 512)"
    )
    where.add_argument(
        "--machine",
        metavar="NAME",
        help="predict streamed experts on m1-ultra-64gb, m5-pro-64gb, m4-16gb, rtx3090-24gb, or a JSON file of rates",
    )
    p.add_argument("--expert-cache", metavar="SIZE", help="memory for experts, such as 8GB (default: several sizes)")
    p.add_argument(
        "--expert-profile", metavar="FILE", help="take hit rates from these counts of use (default: from --skew)"
    )
    p.add_argument(
        "--trace",
        metavar="FILE",
        help="take hit rates from a trace of the experts of a text's tokens (default: from --skew)",
    )
    p.add_argument(
        "--skew",
        type=values.number,
        metavar="X",
        help="take hit rates from Zipf's law with this exponent (default: 0.9)",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")


def perplexity(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument("--text", required=True, type=values.source, metavar="FILE", help="the text, UTF-8; - is stdin")
    p.add_argument(
        "--ctx-window", type=values.count, metavar="N", help="tokens of a window (default: 512, or as trained)"
    )
    p.add_argument(
        "--max-tokens", type=values.count, metavar="N", help="read the first N tokens of the text (default: all)"
    )
    r = p.add_mutually_exclusive_group()
    r.add_argument("--reference", metavar="MODEL", help="compare with this model")
    r.add_argument("--reference-file", metavar="FILE", help="compare with a file of --save-reference")
    r.add_argument(
        "--save-reference",
        type=values.file,
        metavar="FILE",
        help="save the log-probabilities: two bytes per scored token and vocabulary entry",
    )
    flags.adapters(p)
    flags.backend(p)
    flags.cache(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")


def fit(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument("--memory", metavar="SIZE", help="24GB (10^9 bytes each) or 24GiB (default: what is free here)")
    p.add_argument(
        "-c",
        "--ctx",
        type=values.tokens,
        metavar="N",
        help="context in tokens (default: 4096, 32768 and the trained context)",
    )
    p.add_argument(
        "--parallel",
        type=values.positive,
        default=1,
        metavar="N",
        help="replies at the same time; on one GPU they share the cache of one context (default: 1)",
    )
    flags.adapters(p)
    p.add_argument("--draft", metavar="DRAFT", help="add a draft's memory: a path, a name on the Hub, mtp or demo")
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    flags.cache(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")


def quantize(p: Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("out", nargs="?", type=values.file, metavar="OUT", help="a new .gguf file, or a new MLX folder")
    p.add_argument("--bits", type=values.count, metavar="N", help="for an MLX folder: 2, 3, 4, 5, 6 or 8 (default: 4)")
    p.add_argument(
        "--group-size",
        type=values.count,
        metavar="N",
        help="for an MLX folder: values per scale, 32, 64 or 128 (default: 64)",
    )
    p.add_argument("--mode", metavar="MODE", help="for an MLX folder: affine, mxfp4 or nvfp4 (default: affine)")
    p.add_argument(
        "--type",
        metavar="TYPE",  # common.quantize.GGUF_TYPES and FLOAT_TYPES
        help="for a .gguf file: Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, F32, F16 or BF16 (default: Q8_0)",
    )
    p.add_argument(
        "--recipe",
        choices=("careful", "uniform", "mixed"),  # common.recipe.RECIPES
        default="careful",
        help="careful (default): 8 bits for embedding, head and projections of decays; uniform: one format for all; "
        "mixed: as careful, with more bits for half of the value and down projections",
    )
    p.add_argument(
        "--layers",
        action="append",
        metavar="PATTERN=FORMAT",
        help="override the recipe for kinds or names: 'down_proj=6', 'model.layers.0.*=keep', 'head=8:32', "
        "'attn_v=Q8_0'; repeatable, the last match counts",
    )
    p.add_argument(
        "--requantize", action="store_true", help="quantize again what is quantized already, from its decoded values"
    )
    p.add_argument(
        "--shard-size",
        type=values.positive,
        metavar="BYTES",
        help="for an MLX folder: largest file (default: 5000000000)",
    )
    flags.adapters(p)
    s = p.add_argument_group("sensitivity: quantize one kind of matrix at a time, in memory, and write nothing")
    s.add_argument("--sensitivity", action="store_true", help="print the loss (KL divergence) by kind of matrix")
    s.add_argument("--text", type=values.source, metavar="FILE", help="the text to measure it on, UTF-8; - is stdin")
    s.add_argument(
        "--ctx-window", type=values.positive, metavar="N", help="tokens of a window (default: 512, or as trained)"
    )
    s.add_argument(
        "--max-tokens", type=values.positive, metavar="N", help="read the first N tokens of the text (default: all)"
    )
    s.add_argument("--plot", type=values.file, metavar="FILE", help="also draw the table as an SVG file")
    s.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")


def check_quantize(args: argparse.Namespace) -> None:
    """Refuse flags of writing with flags of measuring: UsageError."""
    if not args.sensitivity:
        measuring = ("text", "ctx_window", "max_tokens", "plot", "backend")
        if given := next((name for name in measuring if getattr(args, name) is not None), None):
            raise UsageError(f"--{given.replace('_', '-')} goes with --sensitivity")
        if args.out is None:
            raise UsageError("OUT is not named; give a name that ends in .gguf, or that of a new folder")
        return
    if args.out is not None or args.text is None:
        raise UsageError("--sensitivity needs --text FILE and no OUT; it writes no model")
    if args.shard_size is not None:
        raise UsageError("--shard-size goes without --sensitivity, which writes no model")


def calibrate(p: Parser) -> None:
    flags.named_model(p)
    p.add_argument(
        "--text",
        required=True,
        type=values.source,
        metavar="FILE",
        help='a text in UTF-8, or prompts: a .jsonl file of {"prompt": text} lines; - is a text on stdin',
    )
    p.add_argument(
        "--prompts",
        type=values.positive,
        default=32,
        metavar="N",
        help="most prompts, or pieces of the text (default: 32)",
    )
    p.add_argument(
        "--prompt-tokens",
        type=values.positive,
        metavar="N",
        help="tokens of each piece of the text (default: 64)",
    )
    p.add_argument(
        "--new-tokens", type=values.positive, default=64, metavar="N", help="most tokens of a reply (default: 64)"
    )
    p.add_argument(
        "--loss",
        type=values.number,
        default=0.02,
        metavar="X",
        help="share of tokens that may differ from plain decoding (default: 0.02)",
    )
    p.add_argument("--windows", type=values.counts, metavar="N,N", help="masks per step to try (default: 8,16)")
    p.add_argument(
        "--taus", type=values.numbers, metavar="X,X", help="entropies to try, in nats (default: 0.1,0.2,0.4,0.6,0.9)"
    )
    p.add_argument(
        "--lambdas",
        type=values.numbers,
        metavar="X,X",
        help="penalties per position to try, in nats (default: 0.02,0.05,0.1)",
    )
    p.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")


def selftest(p: Parser) -> None:
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    p.add_argument(
        "-m", "--model", metavar="MODEL", help=f"the model of the short bench: {MODEL_HELP} (default: the demo model)"
    )
    p.add_argument(
        "--out", type=values.file, metavar="FILE", help="default: bimetal-selftest-OS-CHIP-DATE.md in this folder"
    )
