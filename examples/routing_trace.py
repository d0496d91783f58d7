"""Write a synthetic trace of routing, for `generate bench --synthetic SHAPE --routing FILE`, and print its skew.

python examples/routing_trace.py laguna.npz --layers 39 --experts 256 --used 8
"""

import argparse
from pathlib import Path

from common.routing_trace import Skew, synthetic_trace, write_trace


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description="Write a synthetic trace of routing.")
    p.add_argument("out", type=Path, help="a .npz or .csv file")
    p.add_argument("--layers", type=int, required=True, help="layers that have experts")
    p.add_argument("--experts", type=int, required=True, help="of each layer")
    p.add_argument("--used", type=int, required=True, help="experts per token")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--zipf", type=float, default=Skew.zipf, help="exponent of popularity by rank")
    p.add_argument("--drift", type=float, default=Skew.drift, help="how much a topic changes popularity")
    p.add_argument("--topic", type=int, default=Skew.topic, help="tokens of a topic")
    p.add_argument("--locality", type=float, default=Skew.locality, help="chance that an expert is chosen again")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    skew = Skew(args.zipf, args.drift, args.topic, args.locality)
    trace = synthetic_trace(args.layers, args.experts, args.used, args.tokens, skew, args.seed)
    write_trace(args.out, trace)
    hits = ", ".join(f"{trace.lru_hits(share):.1%} with {share:.0%}" for share in (0.125, 0.3, 0.6))
    print(f"{args.out}: {args.tokens} tokens; hits of an LRU cache of a layer's experts: {hits}")


if __name__ == "__main__":
    main()
