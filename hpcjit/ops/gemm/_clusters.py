"""What a Hopper GPU has room for: of a multiprocessor, and of clusters, whose blocks share a GPC and leave others empty."""

from __future__ import annotations

REGISTERS = 65536  # of a multiprocessor
SHARED = 227 * 1024  # bytes, of a block
H200_SMS = 132

# Clusters at a time on an H200, by their blocks, for 1 to 6 blocks that fit a multiprocessor
# (cudaOccupancyMaxActiveClusters).
CLUSTERS: dict[int, tuple[int, ...]] = {
    1: (132, 264, 396, 528, 660, 792),
    2: (66, 132, 198, 264, 330, 396),
    3: (39, 79, 124, 163, 203, 248),
    4: (30, 62, 92, 124, 154, 186),
    5: (22, 47, 69, 94, 124, 146),
    6: (17, 39, 62, 79, 101, 124),
    7: (15, 32, 47, 69, 84, 101),
    8: (15, 30, 45, 62, 77, 92),
    10: (7, 21, 30, 44, 58, 65),
    12: (7, 16, 28, 37, 44, 58),
    14: (7, 14, 21, 30, 37, 44),
    16: (7, 14, 21, 28, 35, 42),
}
MOST_BLOCKS = 6  # of a multiprocessor, that the table knows


def room(cluster: int, blocks_per_sm: int, num_sms: int = H200_SMS) -> int:
    """Clusters that run at a time; on another device in proportion."""
    return max(1, CLUSTERS[cluster][blocks_per_sm - 1] * num_sms // H200_SMS)
