"""Texts on a simulated GPU, which runs a step at a time and has the same sampler: the tokens of the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, zoo
from calcvm.errors import CalcError

PROMPTS = [[1, 2, 3], [4], [5, 6]]
NETWORKS = {
    "gpt": lambda: zoo.gpt(11, width=8, layers=1, heads=2, steps=10),
    "lstm": lambda: nn.Embedding(11, 6) >> nn.LSTM(6) >> nn.Linear(11),
}


@pytest.mark.parametrize("mode", ["grid", "graph"])
@pytest.mark.parametrize("name", NETWORKS)
def test_texts(gpu, name, mode):
    def model(**how):
        return cv.Model(
            NETWORKS[name](), input_shape=(10,), optimizer=cv.SGD(0.1), batch_size=4, stream=True, seed=3, **how
        )

    ours, theirs = model(), model(device="cuda", mode=mode, workers=2)
    for how in {"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 4, "top_p": 0.9, "stop": 7}:
        assert (theirs.generate(PROMPTS, 5, **how) == ours.generate(PROMPTS, 5, **how)).all()
    for (at, cells), wanted in zip(theirs.carries.items(), ours.carries.values()):
        np.testing.assert_allclose(cells[:3], wanted[:3], rtol=1e-4, atol=1e-5, err_msg=at)
    with pytest.raises(CalcError, match=r"integers in \[0, 11\), not 11"):
        theirs.generate([11], 2)
