"""All handlers: importing this registers them."""

from emulator import (
    bits,
    clc,
    control,
    convert,
    floats,
    integers,
    lanes,
    loads,
    matrices,
    mbarrier,
    mma,
    remote,
    synchronise,
    tcgen05,
    tma,
    wgmma,
)

__all__ = [
    "bits",
    "clc",
    "control",
    "convert",
    "floats",
    "integers",
    "lanes",
    "loads",
    "matrices",
    "mbarrier",
    "mma",
    "remote",
    "synchronise",
    "tcgen05",
    "tma",
    "wgmma",
]
