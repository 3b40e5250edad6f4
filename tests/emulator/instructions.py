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
    mbarrier,
    mma,
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
    "mbarrier",
    "mma",
    "synchronise",
    "tcgen05",
    "tma",
    "wgmma",
]
