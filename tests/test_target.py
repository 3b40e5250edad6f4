"""The figures of the known products, and what a device without a GPU answers."""

from __future__ import annotations

import pytest
import torch

from sparse_atten.cute_kernels.common.target import (
    TARGETS,
    device_capability,
    device_sm_count,
    target_of,
)


def test_a_cpu_is_no_target():
    cpu = torch.device("cpu")
    assert device_capability(cpu) is None
    assert device_sm_count(cpu) is None
    assert target_of(cpu) is None


def test_capabilities_tell_the_products_apart():
    assert len({target.capability for target in TARGETS.values()}) == len(TARGETS)
    assert all(name == target.name for name, target in TARGETS.items())


@pytest.mark.gpu
def test_the_device_at_hand():
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    assert device_capability(device) == (properties.major, properties.minor)
    assert device_sm_count(device) == properties.multi_processor_count
    target = target_of(device)
    if target is not None and target.name in properties.name:
        assert target.sm_count == properties.multi_processor_count
