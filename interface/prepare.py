"""What a KV-outer kernel needs of a token selection: its k2q CSR and its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_atten.contracts import Selection, TokenSelection


@dataclass(frozen=True, eq=False)
class PreparedSelection:
    """A `TokenSelection` with its k2q CSR and work schedule; takes the selection's place."""

    selection: TokenSelection


def selection_of(selection: Selection | PreparedSelection) -> Selection:
    """Return the selection itself, prepared or not."""
    return selection.selection if isinstance(selection, PreparedSelection) else selection
