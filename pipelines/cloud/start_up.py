"""How long a rented machine takes until it works, as plans and deadlines assume it."""

WAIT_SECONDS = 180.0  # until there is a node, first and after a preemption; on a local Slurm 25 to 40 s were measured
START_SECONDS = 120.0  # billed: boot, image, interpreter
INSTALL_SECONDS = 180.0  # billed, without an image: 4 GB of packages from PyPI, unpacked
