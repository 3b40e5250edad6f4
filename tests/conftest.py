"""Shared test configuration: GPU tests skip with a reason where there is no such device."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a device, and `gpu(9, 0)` without one of that capability."""
    present = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None or (present and marker.args in ((), present)):
            continue
        wanted = f" of capability {marker.args[0]}.{marker.args[1]}" if marker.args else ""
        found = f"{present[0]}.{present[1]} is" if present else "none is"
        reason = f"needs a CUDA device{wanted}; {found} present"
        item.add_marker(pytest.mark.skip(reason=reason))
