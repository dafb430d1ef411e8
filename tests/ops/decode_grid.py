"""Calls of `attention.decode` that are easy to get wrong, each with the reason it is here."""

from __future__ import annotations

from collections.abc import Iterator

from decode_tools import BF16, FP8, FP16, Batch

_MIXED = (130, 0, 1, 64, 65, 300)  # empty, one token, a page to the end, one past it
_SMALL = (37, 1, 0, 90)

_TOKEN_SCALES = {"cache": FP8, "k_scale": "token", "v_scale": "token"}
_FOUR = {"q_lens": 4, "group": 8, "kv_heads": 1}  # 32 query rows: tiles of double size, queries in shared memory

_MANY_ROWS: list[tuple[str, Batch, str]] = [
    (
        "many rows window",
        Batch((200, 64, 3, 65, 1), window=33, **_FOUR),
        "a window begins inside a tile of double size",
    ),
    (
        "many rows window fp8",
        Batch((200, 64, 3, 65, 1), window=33, dtype=FP8, q_scale="row", **_FOUR),
        "likewise, 64 tokens",
    ),
    ("many rows token scales", Batch((200, 64, 3, 65, 1), window=33, **_TOKEN_SCALES, **_FOUR), "64 scales of a tile"),
    (
        "many rows ragged fp8",
        Batch((130, 1, 70), q_lens=(8, 1, 3), group=8, kv_heads=1, dtype=FP8, q_scale="row"),
        "64 rows, of which requests have 8 to 64",
    ),
    ("many rows p16 fp8", Batch((200, 33), dtype=FP8, q_scale="row", page=16, **_FOUR), "pages that hold no such tile"),
    ("many rows p48 fp8", Batch((200, 33), dtype=FP8, q_scale="row", page=48, **_FOUR), "likewise"),
    (
        "most rows d64 fp8",
        Batch((130, 9), head_dim=64, value_head_dim=64, q_lens=8, group=16, kv_heads=1, dtype=FP8, q_scale="row"),
        "128 rows: one team",
    ),
    (
        "many rows invariant",
        Batch((5000, 70), schedule="invariant", window=2100, **_FOUR),
        "pieces of tiles of double size",
    ),
    ("many rows static fp8", Batch((5000, 70), schedule="static", dtype=FP8, q_scale="row", **_FOUR), "likewise"),
]

_CALLS: list[tuple[str, Batch, str]] = [
    ("one token", Batch([1], kv_heads=1, group=1), "the least call"),
    ("mixed", Batch(_MIXED), "lengths at the edges of pages; everything dead is NaN"),
    ("mixed fp16", Batch(_MIXED, dtype=FP16, layout="HND"), "fp16, heads before slots"),
    ("mixed fp8", Batch(_MIXED, dtype=FP8, q_scale="row", k_scale="number", v_scale="number"), "everything float8"),
    ("no lse", Batch(_MIXED, lse=False), "lse is optional"),
    ("fp8 tensor scales", Batch(_SMALL, dtype=FP8, q_scale="tensor", k_scale="tensor", v_scale="tensor"), "one scale"),
    ("fp8 head scales", Batch(_SMALL, cache=FP8, k_scale="head", v_scale="head"), "16-bit queries, float8 cache"),
    (
        "fp8 token scales",
        Batch(_SMALL, dtype=FP8, q_scale="row", k_scale="token", v_scale="token", layout="HND"),
        "scales live in pages too, and are NaN where nothing lives",
    ),
    ("fp8 token scales nhd", Batch(_SMALL, dtype=FP16, cache=FP8, k_scale="token", v_scale="head", page=16), "mixed"),
    ("fp8 to fp16", Batch(_SMALL, dtype=FP8, q_scale="row", out=FP16), "an output dtype that q does not say"),
    ("bf16 to fp16", Batch(_SMALL, out=FP16), "an output dtype other than that of q"),
    ("fused q", Batch(_SMALL, views="fused"), "q is a view of a projection"),
    ("joint", Batch(_SMALL, views="joint", layout="HND"), "both caches are views of one tensor"),
    ("spaced", Batch(_SMALL, views="spaced"), "gaps in outputs and table, lse transposed; odd rows of out"),
    ("spaced group 5", Batch(_SMALL, group=5, q_lens=3, kv_heads=1, views="spaced"), "padded rows are not written"),
    ("wide table", Batch(_SMALL, more_width=5, dead_id=2**31 - 1), "entries past the live ones are no page ids"),
    ("ragged", Batch((40, 9, 0, 130, 5), q_lens=(3, 0, 2, 8, 1), group=12, kv_heads=1), "rows of nobody stay"),
    ("ragged fp8", Batch((40, 9, 70), q_lens=(1, 4, 2), dtype=FP8, q_scale="row"), "ragged scales"),
    ("rows before the first token", Batch((3, 1, 70), q_lens=5, group=2), "rows that see nothing: 0 and -inf"),
    ("window", Batch((200, 64, 3, 65), window=64, page=16), "pages before the window have no id"),
    ("window rows", Batch((200, 64, 3, 65), window=33, q_lens=3, page=16), "each row has a window of its own"),
    ("window fp8", Batch((300, 129), window=100, dtype=FP8, q_scale="row", layout="HND"), "begins inside of a page"),
    ("window past all", Batch((3, 1, 70), window=2**31 - 1, q_lens=8), "no difference to a window leaves 32 bits"),
    ("softcap", Batch(_SMALL, softcap=30.0, scale=1.0), "logits past the cap"),
    ("sinks", Batch(_MIXED, sinks=True), "a sink counts once, also for an empty request"),
    ("all options", Batch((200, 64, 3), sinks=True, softcap=5.0, window=70, q_lens=2, page=16), "in this order"),
    ("static", Batch((900, 0, 3, 64), schedule="static"), "the comparison"),
    ("static rows", Batch((900, 0, 3), schedule="static", q_lens=4, sinks=True), "parts without a visible token"),
    ("invariant", Batch((5000, 0, 3, 64), schedule="invariant", kv_heads=1), "more than one piece of fixed length"),
    ("invariant window", Batch((5000, 70), schedule="invariant", window=2100, kv_heads=1), "pieces begin at a window"),
    ("split", Batch((9000,), kv_heads=1, group=8), "one request on every SM"),
    ("split fp8", Batch((9000, 1), kv_heads=1, group=8, dtype=FP8, q_scale="row"), "likewise"),
    *_MANY_ROWS,
    ("many requests", Batch([i % 50 for i in range(700)], kv_heads=1, page=16), "more requests than SMs"),
    ("no requests", Batch([]), "nothing to do"),
]


def calls() -> Iterator[tuple[str, Batch, str]]:
    """Label, batch, reason."""
    yield from _CALLS
    for group in (1, 2, 3, 5, 6, 7, 8, 9, 12, 14, 15, 16):
        yield f"group {group}", Batch(_SMALL, group=group, kv_heads=1, page=16), "padded query rows"
    for kv_heads in (1, 3, 4, 8):
        layout = "HND" if kv_heads == 3 else "NHD"
        yield f"{kv_heads} kv heads", Batch(_SMALL, kv_heads=kv_heads, group=2, layout=layout), "each its own keys"
    for q_len in range(2, 9):
        for group in (1, 3, 8):
            batch = Batch((70, 9, 0, 33), q_lens=q_len, group=group, kv_heads=1)
            yield f"q{q_len} group {group}", batch, "the rows of a tile are those of several tokens"
    yield "q8 group 16", Batch((70, 9), q_lens=8, group=16, kv_heads=1), "most rows"
    for dims in ((64, 64), (256, 256), (192, 128)):
        for dtype in (BF16, FP8):
            scales = {"q_scale": "row", "k_scale": "number"} if dtype == FP8 else {}
            batch = Batch(_SMALL, head_dim=dims[0], value_head_dim=dims[1], dtype=dtype, group=8, **scales)
            yield f"d{dims[0]}+{dims[1]} {str(dtype)[6:]}", batch, "another split of the heads among threads"
    yield "d256 rows", Batch(_SMALL, head_dim=256, q_lens=4, group=8), "most accumulators"
    yield "d192+128 rows", Batch(_SMALL, head_dim=192, value_head_dim=128, q_lens=2, group=16), "128 and 192"
    for page in (1, 3, 16, 32, 48, 128, 256):
        for dtype in (BF16, FP8):
            yield f"p{page} {str(dtype)[6:]}", Batch(_MIXED, page=page, dtype=dtype), "pages against tiles"
    yield "p5 window hnd", Batch(_MIXED, page=5, window=40, q_lens=2, layout="HND"), "slow copies, window inside a page"
    yield "p1 token scales", Batch(_SMALL, page=1, cache=FP8, k_scale="token", v_scale="token"), "a page is a token"
