"""What defects put in on purpose are put in place of is there; `make mutants` puts them in."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, altered


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_has_its_place(mutant):
    for file, source in altered(mutant).items():
        assert source != (ROOT / "src" / "calcvm" / file).read_text()
        compile(source, file, "exec")
