"""Run launch plans on a PTX emulator, as the kernel tests want it.

`SPARSE_ATTEN_EMULATOR` names it: "own" is the package `emulator` beside this file, anything else a
folder that holds a package `emu`; the tests that need one skip without it.
"""

from __future__ import annotations

import os

VARIABLE = "SPARSE_ATTEN_EMULATOR"
OWN = os.environ.get(VARIABLE) == "own"
if OWN:
    from emulation_own import SCHEDULES, emulator, issued, run, schedules
else:
    from emulation_other import SCHEDULES, emulator, issued, run, schedules

__all__ = ["OWN", "SCHEDULES", "VARIABLE", "emulator", "issued", "run", "schedules"]
