"""Users' recurrent cells on a simulated GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.test_cells import MADE, Layer


@pytest.mark.parametrize("name", MADE)
def test_beside_pytorch(name, gpu):
    layer = Layer(MADE[name], n=3, steps=3, reverse=name == "peephole")
    layer.check(layer.computed(2, device="cuda", mode="grid"))
