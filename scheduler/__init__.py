"""Work items of KV-outer attention: hot rows split, heavy items first."""

from sparse_atten.scheduler.reference import (
    Schedule,
    build_schedule,
    target_q_per_cta,
    work_capacity,
)

__all__ = ["Schedule", "build_schedule", "target_q_per_cta", "work_capacity"]
