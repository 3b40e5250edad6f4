"""All handlers: importing this registers them."""

from emulator import (
    control,
    convert,
    floats,
    integers,
    lanes,
    loads,
    synchronise,
)

__all__ = ["control", "convert", "floats", "integers", "lanes", "loads", "synchronise"]
