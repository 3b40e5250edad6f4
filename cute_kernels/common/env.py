"""The package's environment variables: the only place that reads them. None changes a result.

============================  ====================================================================
variable                      meaning
============================  ====================================================================
``SPARSE_ATTEN_CACHE_DIR``    folder of compiled kernels; default ``~/.cache/sparse_atten``
``SPARSE_ATTEN_LOG_LEVEL``    level of the logger "sparse_atten", a name such as ``INFO``; setting
                              it also sends the records to standard error
``SPARSE_ATTEN_DUMP_DIR``     folder that receives PTX and machine code of every kernel compiled,
                              source and log of those in CUDA C++; setting it compiles anew instead
                              of reading the cache
============================  ====================================================================
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist yet."""
    named = os.environ.get("SPARSE_ATTEN_CACHE_DIR")
    return Path(named) if named else Path("~/.cache/sparse_atten").expanduser()


def dump_dir() -> Path | None:
    """Folder for what compiling makes; None where nothing is to be dumped."""
    named = os.environ.get("SPARSE_ATTEN_DUMP_DIR")
    return Path(named) if named else None


@cache
def logger() -> logging.Logger:
    """Return the package's logger, set up once as the environment asks.

    Raises
    ------
    ValueError
        ``SPARSE_ATTEN_LOG_LEVEL`` names no level.
    """
    log = logging.getLogger("sparse_atten")
    level = os.environ.get("SPARSE_ATTEN_LOG_LEVEL")
    if level:
        if level.upper() not in _LEVELS:
            raise ValueError(
                f"SPARSE_ATTEN_LOG_LEVEL must be one of {', '.join(_LEVELS)}, got {level!r}"
            )
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
    return log


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables set, for a child process."""
    return {**os.environ, **variables}
