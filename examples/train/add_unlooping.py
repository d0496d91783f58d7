"""Add a part of the change that unloop.py made to the target once more (task arithmetic: Ilharco et al. 2212.04089).

    python add_unlooping.py build/ --share 0.9

Adds share · (unlooped.pt − base.pt) to paired.pt, in which train_pair.py left more loops again; writes target.pt.
"""

import argparse
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, required=True)
    args = parser.parse_args()
    saved = {
        name: torch.load(args.folder / f"{name}.pt", map_location="cpu") for name in ("base", "unlooped", "paired")
    }
    base, unlooped, paired = (saved[name]["weights"] for name in ("base", "unlooped", "paired"))
    weights = {}
    for name, weight in paired.items():
        weights[name] = (weight.float() + args.share * (unlooped[name].float() - base[name].float())).bfloat16()
    path = args.folder / "target.pt"
    torch.save({"config": saved["paired"]["config"], "weights": weights}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    main()
