"""What a launcher told this process: whether it is one of several. Imports nothing."""

import os

# Names that the launchers of mlx's back-ends use: ring, jaccl and nccl, and MPI.
RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def told_rank() -> str | None:
    """The number of this process among those started together; None if none was told."""
    return next((os.environ[name] for name in RANKS if name in os.environ), None)
