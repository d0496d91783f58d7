"""The command line's flags. Imports nothing heavy: `--help` must answer at once."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from common.errors import UsageError

COMMANDS = {
    "devices": "what was found on this machine, what is chosen and why",
    "inspect": "a model's architecture, shapes, block types, tokenizer and memory by context length",
    "bench": "prefill and decode speed at several context lengths, as a table",
    "perplexity": "how well a model predicts a text, and how far it is from a reference",
    "fit": "which of a model's files fit into memory, and with how much context",
    "selftest": "the conformance tests and a short bench on this machine, as a report to send us",
}
BACKENDS = ("cuda", "mlx", "numpy")
KINDS = ("off", "lookup", "chain", "tree", "lookup+chain", "lookup+tree")  # common.decode.speculative


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse(argv: list[str]) -> argparse.Namespace:
    """The parsed arguments; `run` on them is the command's function."""
    if argv and argv[0] in COMMANDS:
        name, argv = argv[0], argv[1:]
        flags, run = {
            "devices": (_devices, _run_devices),
            "inspect": (_inspect, _run_inspect),
            "bench": (_bench, _run_bench),
            "perplexity": (_perplexity, _run_perplexity),
            "fit": (_fit, _run_fit),
            "selftest": (_selftest, _run_selftest),
        }[name]
        args = flags(f"python -m generate {name}").parse_args(argv)
        args.run = run
        return args
    if argv and not argv[0].startswith("-"):
        raise UsageError(f"{argv[0]!r} is not a command; commands: {', '.join(COMMANDS)}; a prompt goes after --prompt")
    args = _text("python -m generate").parse_args(argv)
    if args.chat and args.prompt is not None:
        raise UsageError("--chat and --prompt exclude each other; in a chat the prompt is typed")
    if args.chat and args.raw:
        raise UsageError("--chat and --raw exclude each other; a chat needs the model's template")
    if args.think is not None and args.raw:
        raise UsageError("--think and --raw exclude each other; thinking is a matter of the model's template")
    if args.system is not None and args.raw:
        raise UsageError("--system and --raw exclude each other; a system prompt needs the model's template")
    if not args.chat and args.prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt TEXT, a prompt on stdin, or --chat")
    args.run = _run_chat if args.chat else _run_prompt
    return args


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that `LLM.stream` takes."""
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    guessing = ("spec", "tree_budget", "tree_topk", "chain_seed")
    names = (*sampling, "seed", "max_tokens", *guessing)
    return {name: getattr(args, name) for name in names} | {"stop": args.stop}


def _text(prog: str) -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:12}{what}" for name, what in COMMANDS.items())
    p = Parser(
        prog=prog,
        description="Generate text with a local model.",
        epilog=f"commands (python -m generate COMMAND --help):\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = p.add_argument_group("what to generate")
    what.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; without it, stdin is the prompt")
    what.add_argument("--chat", action="store_true", help="talk in turns; /help lists the commands")
    what.add_argument("--system", metavar="TEXT", help="system prompt")
    what.add_argument("--raw", action="store_true", help="send the prompt as it is, without the model's chat template")
    model = p.add_argument_group("model")
    _model(model)
    model.add_argument(
        "--fa-window",
        type=_positive,
        metavar="N",
        help="let decoding attend to the last N tokens alone: faster in long contexts, and LOSSY (default: to all)",
    )
    model.add_argument(
        "--max-kv-size",
        type=_positive,
        metavar="N",
        help="hold keys and values of N tokens, the first 4 and the latest: bounds memory, and LOSSY (default: all)",
    )
    s = p.add_argument_group("sampling (penalties, temperature, top-k, top-p, min-p, in that order)")
    s.add_argument("--temperature", "--temp", type=_number, default=0.0, metavar="X", help="0 is greedy (default)")
    s.add_argument("--top-p", type=_number, default=1.0, metavar="X", help="share of probability kept (default: 1)")
    s.add_argument("--top-k", type=_count, default=0, metavar="N", help="tokens kept; 0 keeps all (default)")
    s.add_argument(
        "--min-p", type=_number, default=0.0, metavar="X", help="least share of the best token's probability"
    )
    s.add_argument("--repetition-penalty", "--repeat-penalty", type=_number, default=1.0, metavar="X", help="1 is none")
    s.add_argument("--frequency-penalty", type=_number, default=0.0, metavar="X", help="per occurrence in the reply")
    s.add_argument("--presence-penalty", type=_number, default=0.0, metavar="X", help="for any occurrence in the reply")
    s.add_argument("--seed", type=_count, metavar="N", help="same seed, same text")
    _speculation(p.add_argument_group("speculative decoding (faster, the same text)"))
    r = p.add_argument_group("reply")
    r.add_argument(
        "-n", "--max-tokens", type=_count, metavar="N", help="most tokens of the reply (default: the context)"
    )
    r.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="reason before the answer, or not (default: as the model's template has it); a terminal shows the "
        "reasoning dimmed, a pipe gets the answer alone",
    )
    r.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the reply before TEXT; repeatable")
    r.add_argument("--stats", action="store_true", help="print speed, time to first token and peak memory to stderr")
    return p


def _devices(prog: str) -> argparse.ArgumentParser:
    return Parser(prog=prog, description=COMMANDS["devices"], allow_abbrev=False)


def _inspect(prog: str) -> argparse.ArgumentParser:
    p = Parser(prog=prog, description=COMMANDS["inspect"], allow_abbrev=False)
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    return p


# What is benched, and the flags that go with it beside those for all, with their defaults.
OF_MODEL: dict[str, Any] = dict(model="demo", ctx=None)
OF_DRAFT: dict[str, Any] = dict(draft=None, draft_device=None, tree_topk=8)
BENCHES = {
    "a model alone": OF_MODEL | dict(contexts=[128, 512, 2048], new_tokens=64, runs=5, peer=None),
    "--spec": OF_MODEL
    | OF_DRAFT
    | dict(spec=None, prompts=16, new_tokens=64, tree_budget=None, budgets=None, plot=None),
    "--synthetic": dict(
        synthetic=None, contexts=[128, 512, 2048], rows=[1, 2, 4, 8, 16, 22, 32, 64], prefill=[512, 8192], runs=5
    ),
    "--synthetic with a draft": OF_DRAFT | dict(synthetic=None, contexts=[128], runs=5, budgets=[15, 22, 31, 63, 127]),
}


def _bench(prog: str) -> argparse.ArgumentParser:
    """Flags of BENCHES are None where they are not given."""
    p = Parser(prog=prog, description=COMMANDS["bench"], allow_abbrev=False)
    _model(p)
    p.set_defaults(model=None)
    p.add_argument(
        "--contexts",
        type=_counts,
        metavar="N,N",
        help="prompt tokens of each row (default: 128,512,2048; with a synthetic draft 128)",
    )
    p.add_argument(
        "--synthetic",
        metavar="SHAPE:RECIPE",
        help="in a model's place: real shapes with random weights, such as qwen3.6-27b:q4_k_m",
    )
    p.add_argument(
        "--rows",
        type=_counts,
        metavar="N,N",
        help="with --synthetic: rows of the steps (default: 1,2,4,8,16,22,32,64)",
    )
    p.add_argument(
        "--prefill",
        type=_counts,
        metavar="N,N",
        help="with --synthetic: tokens of a prompt (default: 512,8192)",
    )
    p.add_argument("--new-tokens", type=_count, metavar="N", help="decoded tokens of each run (default: 64)")
    p.add_argument("--runs", type=_count, metavar="N", help="runs of each row; medians count (default: 5)")
    _speculation_bench(p.add_argument_group("speculative decoding"))
    p.add_argument(
        "--peer", choices=("mlx-lm",), help="time it on the same weights in turn with ours (a safetensors folder)"
    )
    p.add_argument("--log", metavar="FILE", help="append the rows to a TSV file such as BENCHMARKS.tsv")
    p.add_argument("--verdict", choices=("keep", "drop", "info"), default="info", help="what the logged rows decided")
    p.add_argument("--note", default="", metavar="TEXT", help="why, for the log")
    return p


def _perplexity(prog: str) -> argparse.ArgumentParser:
    p = Parser(
        prog=prog,
        description="The perplexity of a model over a text, by llama-perplexity's convention: windows read from an "
        "empty state, the second half of each scored. Against a reference also KL divergence and agreement.",
        allow_abbrev=False,
    )
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--text", required=True, metavar="FILE", help="the text, UTF-8")
    p.add_argument("--ctx-window", type=_count, default=512, metavar="N", help="tokens of a window (default: 512)")
    p.add_argument("--max-tokens", type=_count, metavar="N", help="read the first N tokens of the text (default: all)")
    r = p.add_mutually_exclusive_group()
    r.add_argument("--reference", metavar="MODEL", help="compare with this model")
    r.add_argument("--reference-file", metavar="FILE", help="compare with what --save-reference left")
    r.add_argument(
        "--save-reference",
        metavar="FILE",
        help="keep the log-probabilities, two bytes per scored token and vocabulary entry",
    )
    _backend(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def _fit(prog: str) -> argparse.ArgumentParser:
    p = Parser(
        prog=prog,
        description="What a model takes in memory, by file and context, while a prompt of the whole context is read. "
        "Of a repository on the Hub only headers are fetched.",
        allow_abbrev=False,
    )
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--memory", metavar="SIZE", help="24GB (10^9 bytes each) or 24GiB (default: what is free here)")
    p.add_argument(
        "-c", "--ctx", type=_positive, metavar="N", help="tokens (default: 4096, 32768 and what it was trained for)"
    )
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def _selftest(prog: str) -> argparse.ArgumentParser:
    p = Parser(
        prog=prog,
        description="Run the repository's tests of a backend and a short bench, and write what came of them to one "
        "file, which names the machine. Your home folder is written as ~ there.",
        allow_abbrev=False,
    )
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    p.add_argument("-m", "--model", metavar="MODEL", help=f"to time: {MODEL_HELP} (default: the demo model)")
    p.add_argument("--out", metavar="FILE", help="default: bimetal-selftest-OS-CHIP-DATE.md in this folder")
    return p


def _speculation(p: Any) -> None:
    _draft(p, "a DFlash draft for the model, named as models are; or demo")
    p.add_argument(
        "--spec",
        choices=KINDS,
        help="how to guess ahead: from the text so far (lookup), by the draft's likeliest block (chain), by its "
        "likeliest prefixes (tree), or both (default: tree with a draft, else off)",
    )
    p.add_argument(
        "--tree-budget",
        type=_budget,
        metavar="N",
        help="guessed tokens per step, or auto: as measured while decoding (default)",
    )
    p.add_argument(
        "--tree-topk", type=_positive, default=8, metavar="N", help="tokens a tree considers at each place (default: 8)"
    )
    p.add_argument("--chain-seed", action="store_true", help="begin trees with the draft's likeliest block")


def _speculation_bench(p: Any) -> None:
    p.add_argument("--spec", metavar="FILE", help='decode the prompts of a JSON Lines file, {"prompt": text}, each way')
    p.add_argument("--prompts", type=_positive, metavar="N", help="the first N of them (default: 16)")
    _draft(p, "a draft for the model; or demo, or synthetic with --synthetic")
    p.add_argument("--tree-budget", type=_budget, metavar="N", help="guessed tokens per step (default: auto)")
    p.add_argument("--tree-topk", type=_positive, metavar="N", help="tokens considered at each place (default: 8)")
    p.add_argument("--budgets", type=_counts, metavar="N,N", help="also trees of exactly so many guesses")
    p.add_argument("--plot", metavar="FILE.svg", help="draw tokens per step and per second over --budgets")


MODEL_HELP = "GGUF file, safetensors folder, owner/repo, owner/repo:Q4_K_M, demo, or smollm2"


def _model(p: Any) -> None:
    p.add_argument("-m", "--model", default="demo", metavar="MODEL", help=f"{MODEL_HELP} (default: demo)")
    p.add_argument(
        "-c",
        "--ctx",
        type=_count,
        metavar="N",
        help="most tokens of prompt and reply (default: as trained, on CUDA if they fit)",
    )
    _backend(p)


def _backend(p: Any) -> None:
    p.add_argument("--backend", choices=BACKENDS, help="default: the fastest that this machine can run")
    p.add_argument(
        "--devices",
        type=_indices,
        metavar="N,N",
        help="NVIDIA GPUs, by the numbers that `devices` prints, which share the layers in this order (default: 0)",
    )
    p.add_argument(
        "--split",
        type=_numbers,
        metavar="X,X",
        help="proportions of the model's bytes on each of --devices, such as 1,3 (default: as memory is free)",
    )


def _draft(p: Any, help: str) -> None:
    p.add_argument("--draft", metavar="DRAFT", help=help)
    p.add_argument(
        "--draft-device", type=_count, metavar="N", help="the GPU of the draft (default: the last of --devices)"
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _budget(text: str) -> int | None:
    try:
        return None if text == "auto" else _positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number of at least 1") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _indices(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [_number(part) for part in text.split(",")]


def _run_prompt(args: argparse.Namespace) -> int:
    from generate.reply import run

    return run(args)


def _run_chat(args: argparse.Namespace) -> int:
    from generate.chat import run

    return run(args)


def _run_devices(args: argparse.Namespace) -> int:
    from generate.backends import run

    return run()


def _run_inspect(args: argparse.Namespace) -> int:
    from generate.inspect import run

    return run(args.model)


def _run_bench(args: argparse.Namespace) -> int:
    if args.spec is not None and args.synthetic is not None:
        raise UsageError("--spec and --synthetic exclude each other; random weights accept next to nothing")
    what = "--spec" if args.spec is not None else "a model alone" if args.synthetic is None else "--synthetic"
    if what == "--synthetic" and args.draft is not None:
        what = "--synthetic with a draft"
    for name in sorted({name for flags in BENCHES.values() for name in flags} - BENCHES[what].keys()):
        if getattr(args, name) is not None:
            places = " or ".join(place for place, flags in BENCHES.items() if name in flags)
            raise UsageError(f"--{name.replace('_', '-')} goes with {places}, not with {what}")
    for name, default in BENCHES[what].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    from generate import bench, bench_spec

    if args.log:
        bench.check_log(Path(args.log))
    run = {
        "--spec": bench_spec.run,
        "--synthetic": bench.run_synthetic,
        "--synthetic with a draft": bench_spec.run_synthetic,
    }
    return run.get(what, bench.run)(args)


def _run_perplexity(args: argparse.Namespace) -> int:
    from generate.perplexity import run

    return run(args)


def _run_fit(args: argparse.Namespace) -> int:
    from generate.fit import run

    return run(args)


def _run_selftest(args: argparse.Namespace) -> int:
    from generate.selftest import run

    return run(args)
