"""The figures of the known products, and what a device without a GPU answers."""

from __future__ import annotations

import pytest
import torch

from sparse_atten.cute_kernels.common.target import (
    PRODUCTS,
    device_capability,
    product_of,
    target_of,
)


def test_a_cpu_is_no_target():
    cpu = torch.device("cpu")
    assert device_capability(cpu) is None
    assert target_of(cpu) is None
    assert product_of(cpu) is None


def test_architectures_tell_the_products_apart():
    assert len({product.target.arch for product in PRODUCTS.values()}) == len(PRODUCTS)
    assert all(name == product.name for name, product in PRODUCTS.items())


@pytest.mark.gpu
def test_the_device_at_hand():
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    assert device_capability(device) == (properties.major, properties.minor)
    target, product = target_of(device), product_of(device)
    assert target.num_sms == properties.multi_processor_count
    if product is not None and product.name in properties.name:
        assert product.target == target
