"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs(index):
    scope: dict[str, object] = {}
    exec(compile(EXAMPLES[index], f"README example {index}", "exec"), scope)
    q, v, out = scope["q"], scope["v"], scope["out"]
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert out.isfinite().all()


def test_there_is_an_example_for_each_front_end():
    text = "\n".join(EXAMPLES)
    for name in (
        "video_sparse_attention",
        "minimax_sparse_attention",
        "nsa_selected_attention",
        "sparse_atten_func",
        "explain",
    ):
        assert f"{name}(" in text


def test_linked_files_exist():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / target).exists(), target
