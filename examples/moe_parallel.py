"""A mixture of experts over several ranks: experts split among them (ep), or every expert cut along its inner size (tp).

    torchrun --nproc-per-node 2 examples/moe_parallel.py --mode ep --quant fp8_block --tokens 64

Every rank makes the same layer from a seed, keeps its share, runs `fused_moe` on it and adds up with the others
(`torch.distributed`: NCCL where every rank has a GPU, gloo on CPUs). Rank 0 compares the sum with the whole layer computed by
the reference. An expert-parallel rank passes `expert_offset` and the ids as they are: pairs of other ranks contribute nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from hpcjit.cases import Maker
from hpcjit.cases.moe_experts import Experts
from hpcjit.ops.moe import fused_moe
from hpcjit.ops.moe._fused_moe_args import BLOCK, QUANT, FusedMoeArgs

LIMIT = 1e-3  # normalised difference of a token's result


def run(a: FusedMoeArgs, backend: str | None) -> torch.Tensor:
    """The public call."""
    options = {name: value for name, value in a._asdict().items() if name not in FusedMoeArgs._fields[:5]}
    return fused_moe(*a[:5], **options, backend=backend)


def expert_share(a: FusedMoeArgs, rank: int, ranks: int) -> FusedMoeArgs:
    """The experts of a rank."""
    first, end = (a.num_experts * r // ranks for r in (rank, rank + 1))

    def part(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value[first:end]

    weights: dict[str, Any] = {"w13": a.w13[first:end], "w2": a.w2[first:end]}
    place: dict[str, Any] = {"expert_offset": first, "num_global_experts": a.num_experts}
    return a._replace(**weights, w13_scale=part(a.w13_scale), w2_scale=part(a.w2_scale), **place)


def tensor_share(a: FusedMoeArgs, rank: int, ranks: int) -> FusedMoeArgs:
    """A slice of every expert; in `fp8_block` whole blocks of scales, so that those need not be cut."""
    least = {"bf16": 8, "fp8_block": BLOCK}.get(a.quant, 16)
    if a.intermediate_size % (least * ranks):
        raise SystemExit(f"--inner must be a multiple of {least * ranks} for {ranks} ranks in {a.quant}")

    def rows(value: torch.Tensor, size: int) -> torch.Tensor:  # of gate and of up
        cut = value.unflatten(1, (2, size))[:, :, size * rank // ranks : size * (rank + 1) // ranks]
        return cut.flatten(1, 2).contiguous()

    size, blocks = a.intermediate_size, a.intermediate_size // BLOCK
    mine = slice(size * rank // ranks, size * (rank + 1) // ranks)
    changes: dict[str, Any] = {"w13": rows(a.w13, size), "w2": a.w2[..., mine].contiguous()}
    if a.quant == "fp8_channel" and a.w13_scale is not None:
        changes["w13_scale"] = rows(a.w13_scale, size)
    if a.quant == "fp8_block" and a.w13_scale is not None and a.w2_scale is not None:
        changes["w13_scale"] = rows(a.w13_scale, blocks)
        changes["w2_scale"] = a.w2_scale[..., blocks * rank // ranks : blocks * (rank + 1) // ranks].contiguous()
    return a._replace(**changes)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest normalised difference of a token's results."""
    if not len(a):
        return 0.0
    a, b = a.double(), b.double()
    return float((1 - 2 * (a * b).sum(-1) / (a.square() + b.square()).sum(-1).clamp_min(1e-300)).max())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mode", choices=("tp", "ep"), default="ep")
    parser.add_argument("--quant", choices=QUANT, default="fp8_block")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=256, help="intermediate size of the whole layer")
    parser.add_argument("--backend", help="of fused_moe, such as jit; by default what it chooses")
    options = parser.parse_args(argv)

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = distributed.HashStore() if ranks == 1 else None  # without torchrun nobody else is to be found
    distributed.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=ranks, store=store)
    try:
        layer = Experts(options.tokens, options.experts, options.hidden, options.inner, 4, options.quant, codes=False)
        whole = FusedMoeArgs(*layer.make(Maker(device)))
        share = expert_share if options.mode == "ep" else tensor_share
        total = run(share(whole, rank, ranks)._replace(out=torch.empty_like(whole.out)), options.backend).float()
        distributed.all_reduce(total)
        worst = difference(total, run(whole, "torch"))
        if rank == 0:
            word = "ok" if worst < LIMIT else "WRONG"
            where = f"{options.mode} on {ranks} ranks ({device.type}), {options.quant}, {options.tokens} tokens"
            print(f"{where}: difference from the whole layer {worst:.1e}: {word}")
        return int(worst >= LIMIT)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
