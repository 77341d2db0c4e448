"""A model's metadata besides its program and image: seed, number of epochs, settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.errors import CalcError, ProgramError
from calcvm.vm.program import schema
from calcvm.vm.program.schema import boolean, integer, text

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program

MAX_SEED = 2**63 - 1  # kept as int64 in heaps and jobs
MAX_EPOCHS = MAX_LEARNING = 2**40  # products of two of these with samples and epochs must fit int64
DIGEST = text("[0-9a-f]{64}", "a sha256 in hexadecimal digits")
FIELDS = {
    "program": DIGEST,
    "seed": integer(0, MAX_SEED),
    "epochs": integer(0, MAX_EPOCHS),
    "open": boolean,
}
NEEDED = ("program", "seed", "epochs")


class Facts(MutableMapping[str, Any]):
    """Facts of a model by name, which a `FileStore` keeps as JSON beside the image.

    program : hash of the program.
    seed, epochs : determine the sample order of the next epoch.
    learning_batch : samples per update, if that is more than a batch.
    open : the image holds the gradients of an accumulation.

    Other facts may be set to any JSON-able value; replace values instead of changing them in place.  Every value is checked when
    it is set, so that compiled code reads only valid numbers.

    changed : they differ from the store's copy.
    kept : the values, checked.
    """

    __slots__ = ("changed", "kept", "program")

    def __init__(self, program: Program, values: Mapping[str, Any], where: str | None = None):
        """``where`` names the file that the values come from; invalid values then raise a ProgramError."""
        self.program, self.changed = program, False
        missing = [name for name in NEEDED if name not in values]
        if missing:
            raise ProgramError(f"{where}: its facts lack {missing[0]!r}")
        place, error = (f"{where}: its ", ProgramError) if where else ("", CalcError)
        self.kept: dict[str, Any] = {k: self._checked(k, v, place, error) for k, v in values.items()}

    def _checked(self, name: str, value: Any, where: str, error: type[CalcError]) -> Any:
        if name == "learning_batch":
            return check_learning_batch(self.program, value, where, error)
        if name in FIELDS:
            value = schema.check(FIELDS[name], value, where + name, error)
            if name == "program" and value != self.program.hash:
                raise error(f"{where}program is another one, {value}")
            return value
        value = value.item() if isinstance(value, np.generic) else value
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError) as reason:
            raise error(f"{where}{name!r} cannot be written as JSON ({reason})") from None
        return value

    def __getitem__(self, name: str) -> Any:
        return self.kept[name]

    def __setitem__(self, name: str, value: Any) -> None:
        value = self._checked(name, value, "", CalcError)
        if name not in self.kept or self.kept[name] != value:
            self.kept[name] = value
            self.changed = True

    def __delitem__(self, name: str) -> None:
        if name in NEEDED:
            raise CalcError(f"a model has a {name}: it can be set, not removed")
        del self.kept[name]
        self.changed = True

    def __iter__(self) -> Iterator[str]:
        return iter([*self.kept])  # other threads may add some meanwhile

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return f"Facts({self.kept})"


def check_learning_batch(program: Program, n: Any, where: str = "", error: type[CalcError] = CalcError) -> int:
    """``n``, if a program can make updates from that many samples."""
    n = schema.check(integer(1, MAX_LEARNING), n, f"{where}learning_batch", error)
    batch, paths = program.batch_size, program.info.get("paths", {})
    if n < batch:
        raise error(f"{where}learning_batch={n} is below the batch of {batch}: compile with batch_size={n}")
    for name in [] if n == batch else [name for name, facts in paths.items() if facts["backward"]]:
        loss = paths[name]["loss"]
        facts = program.info["variables"][loss]
        if facts.get("over") == "other" and (name == "learn" or "learn" not in paths):
            raise error(
                f"{where}learning_batch={n} is above the batch of {batch}, and rounds cannot make the loss {loss!r} of path {name!r}: "
                f"they add up means or sums over samples, and {facts['why']} combines the whole batch in another way; "
                f"use batch_size={n}, or a loss that is a mean over samples"
            )
    if n > batch and not any(facts.get("accumulate") for facts in paths.values()):
        raise error(
            f"{where}learning_batch={n} is above the batch of {batch}, and the program does not add gradients up: "
            f"compile with accumulate=True (Model: learning_batch={n}), or with batch_size={n}"
        )
    return n
