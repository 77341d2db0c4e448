"""Results that are functions of totals over the samples, such as the root of a mean or a quotient of sums.

Over several batches the totals are added up.  At the end, the rows that compute the results run once more on these totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.slot import as_seen, shape_of
from calcvm.vm.run import job as J


class Totals:
    """The totals that results ``names`` of a path are functions of; their sums come after ``before`` other sums.

    kinds : "mean" or "sum" of a batch, for each total.
    elements : for each sum its offset in the heap, and its kind.
    """

    def __init__(self, model: BaseModel, path: str, names: Sequence[str], before: int = 0):
        loaded = self._loaded = model.loaded
        self.model, self.kinds, self.elements = model, dict[str, str](), list[tuple[int, str]]()
        self._of = {name: loaded.variables[name]["totals"] for name in names}
        self._rows = {name: loaded.making(path, name, totals) for name, totals in self._of.items()}
        self._starts: dict[str, int] = {}
        for total, kind in (item for totals in self._of.values() for item in totals.items()):
            if total not in self.kinds:
                symbol = loaded.symbol(total)
                self.kinds[total], self._starts[total] = kind, before + len(self.elements)
                self.elements += [(symbol.offset + i, kind) for i in range(symbol.elems.b)]

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def table(self, results: Sequence[str]) -> np.ndarray:
        """The words for `calcvm.vm.run.job.FUNCTIONS`; ``results`` : the results of the pass, in order."""
        words = [len(self._rows)]
        for name, rows in self._rows.items():
            cells = []
            for total in self._of[name]:
                symbol = self._loaded.symbol(total)
                cells += [(self._starts[total] + i, symbol.offset + i) for i in range(symbol.elems.b)]
            words += [len(cells), *(word for cell in cells for word in cell), len(rows), *rows]
            words += [results.index(name), self._loaded.symbol(name).offset]
        return np.array(words, np.int64)

    def seen(self, means: np.ndarray) -> dict[str, np.ndarray]:
        """The totals, from the accumulated sums."""
        found = {}
        for total, start in self._starts.items():
            symbol = self._loaded.symbol(total)
            found[total] = as_seen(means[start : start + symbol.elems.b], symbol, shape_of(symbol))
        return found

    def results(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The results, from totals; the caller has the model's turn."""
        self.model.record.forget()
        slot, loaded = self.model.slot, self._loaded
        address, found = loaded.rows(loaded.program.batch_size)[1], {}
        for name, rows in self._rows.items():
            for total in self._of[name]:
                slot.write(loaded.symbol(total), totals[total])
            for pc in rows:
                slot.job[J.ROWS : J.STEPS + 1] = address, pc, pc + 1, 1
                slot.execute("run_rows", slot.job, slot.job_address, 1)
            found[name] = slot.scalar(loaded.symbol(name).offset)
        return found
