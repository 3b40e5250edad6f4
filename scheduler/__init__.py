"""Work items of KV-outer attention: hot rows split, heavy items first."""

from sparse_atten.scheduler.device import preload
from sparse_atten.scheduler.plan import build_csr_and_schedule, build_schedule
from sparse_atten.scheduler.reference import Schedule, target_q_per_cta, work_capacity

__all__ = [
    "Schedule",
    "build_csr_and_schedule",
    "build_schedule",
    "preload",
    "target_q_per_cta",
    "work_capacity",
]
