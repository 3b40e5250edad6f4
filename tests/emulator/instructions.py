"""All handlers: importing this registers them."""

from emulator import (
    clc,
    control,
    convert,
    floats,
    integers,
    lanes,
    loads,
    mma,
    synchronise,
    tcgen05,
    tma,
    wgmma,
)

__all__ = [
    "clc",
    "control",
    "convert",
    "floats",
    "integers",
    "lanes",
    "loads",
    "mma",
    "synchronise",
    "tcgen05",
    "tma",
    "wgmma",
]
