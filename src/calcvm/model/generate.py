"""Generation: tokens one after the other, each drawn from the scores that the path stream gives after the ones before.

A text is a pass of rounds (`calcvm.vm.run.loop.run_rounds`).  Each fetches the tokens of a step, runs the path's rows, and lets the
sampler (`calcvm.vm.run.sampling`) write the tokens of the next step where that fetches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.model.roles import STREAM
from calcvm.model.stream import BATCH, PHASES, Stream, stream_of
from calcvm.ops.dims import show
from calcvm.vm.program.facts import MAX_SEED
from calcvm.vm.run import job as J
from calcvm.vm.run.device import Cpu
from calcvm.vm.run.entry import address, entry
from calcvm.vm.run.feeds import code_of
from calcvm.vm.run.slices import latest

if TYPE_CHECKING:
    from calcvm.vm.run.loaded import Loaded

LEAST, MOST = 1e-300, 2**31  # a temperature whose reciprocal is finite; tokens of a text


class Sampler:
    """Words of a sampler (`calcvm.vm.run.job`), and the arrays that they point to.

    text : int64 (steps, n), the tokens that each step reads.
    scores : the size of the vocabulary, and bytes of a score.
    seeds : int64 (n, 2), of the random numbers.
    """

    def __init__(
        self, prompts: Sequence[np.ndarray], tokens: int, scores: tuple[int, int], seeds: Any, *,
        temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, stop: int | None = None,
    ):  # fmt: skip
        n, end = len(prompts), -1 if stop is None else stop
        self.lengths, self.tokens = np.array([len(prompt) for prompt in prompts]), tokens
        self.text = np.full((self.lengths.max() + tokens, n), end)
        for i, prompt in enumerate(prompts):
            self.text[: len(prompt), i] = prompt
        self._seeds, self._space = np.array(seeds, np.int64), np.empty(3 * scores[0])
        self._reals = np.array([temperature and max(temperature, LEAST), 1.0 if top_p is None else top_p])
        words = self.words = np.zeros(J.SAMPLER_WORDS, np.int64)
        words[[J.DRAW, J.SAMPLES, J.VOCABULARY, J.SCORE_BYTES]] = address("draw"), n, *scores
        words[[J.TOKENS, J.END, J.TOP_K]] = tokens, end, scores[0] if top_k is None else min(top_k, scores[0])
        arrays = self.text, self.lengths, self._seeds, self._reals, self._space
        words[[J.TEXT, J.LENGTHS, J.SEEDS, J.REALS, J.SPACE]] = [array.ctypes.data for array in arrays]
        self._address = words.ctypes.data

    @property
    def over(self) -> bool:
        """Whether all texts are complete (CalcError: scores are not finite)."""
        found = self.words.item(J.OVER)
        if found >= J.STRANGE:
            raise CalcError(
                f"generate: the scores of sample {found - J.STRANGE} after {self.words[J.STEPPED]} tokens are not finite: "
                "has the training diverged?"
            )
        return bool(found)

    def draw(self, scores: np.ndarray) -> None:
        """Set the tokens of the next step, from scores (n, vocabulary)."""
        entry("draw")(self._address, np.ascontiguousarray(scores).ctypes.data)

    def drawn(self) -> np.ndarray:
        """The tokens after each prompt, (n, tokens)."""
        return np.stack([self.text[k : k + self.tokens, i] for i, k in enumerate(self.lengths)])


def run(stream: Stream, sampler: Sampler, token: str, scores: str) -> None:
    """Write the texts in compiled code, in this thread's turn; ``token``, ``scores``: what a step reads, and its result."""
    model, loaded, n = stream.model, stream.model.loaded, stream.batch
    slot, record, program, rounds = model.slot, model.record, model.program, len(sampler.text) - 1
    text, own = sampler.text, token in loaded.own_types
    spans = np.array(loaded.round(STREAM, *PHASES), np.int64)
    feed = np.array([text.ctypes.data, code_of(text, own), 1, loaded.symbol(token).offset])
    drain = np.array([sampler.words.ctypes.data, J.SAMPLED, 0, loaded.symbol(scores).offset])
    job = np.zeros(J.TASK_WORDS, np.int64)
    loaded.device.prepare_task(job, loaded)
    job[[J.HEAP, J.ROW_BYTES, J.ITEMSIZE, J.SEED_OFF]] = slot.address, program.row_bytes, program.itemsize, -1
    job[[J.ROWS_FULL, J.N_SAMPLES, J.BATCH, J.LEARNING]] = stream.rows[1], rounds * n, n, n
    job[[J.SPANS, J.FEEDS, J.DRAINS]] = [array.ctypes.data for array in (spans, feed, drain)]
    job[[J.N_SPANS, J.N_FEEDS, J.N_DRAINS]] = len(spans), 1, 1
    job[J.PACE] = stream.rows[1] + 3
    workers = 1 if n <= loaded.brief(STREAM, PHASES) else model.workers
    record.forget()
    record.changed = True
    while job[J.REACHED] < rounds and not sampler.over:
        job[J.FIRST], job[J.COUNT] = job[J.REACHED], rounds - job[J.REACHED]
        job[J.DEADLINE], job[J.UNTIL] = latest(), 0
        slot.execute("run_rounds", job, job.ctypes.data, workers)


def generated(
    model: Any, prompt: Any, tokens: Any, temperature: Any, top_k: Any, top_p: Any, seed: Any, stop: Any
) -> np.ndarray:
    """`Model.generate`."""
    loaded = model.loaded
    if STREAM not in loaded.paths:
        raise CalcError('generate: the model has no path "stream": make it with cv.Model(..., stream=True)')
    token, scores, read, vocabulary = _roles(loaded)
    tokens = checks.integer("generate: tokens", tokens, 0, MOST)
    how: dict[str, Any] = {
        "temperature": float(checks.number("generate: temperature", temperature, 0)),
        "top_k": None if top_k is None else checks.integer("generate: top_k", top_k),
        "top_p": None if top_p is None else float(checks.number("generate: top_p", top_p, 0, 1, ends="(]")),
        "stop": None if stop is None else checks.integer("generate: stop", stop, 0, vocabulary - 1),
    }
    prompts, alone = _prompts(prompt, read)
    longest, most = max(map(len, prompts)), loaded.most_steps(STREAM)
    if longest + tokens - 1 > most:
        raise CalcError(
            f"generate: a prompt of {longest} tokens and {tokens} more take {longest + tokens - 1} steps, and the network has room "
            f"for {most}: give less, or an input_shape of more steps"
        )
    seeds = _seeds(seed, len(prompts))
    sampler = Sampler(prompts, tokens, (vocabulary, loaded.program.itemsize), seeds, **how)
    if tokens:
        with model.record.change, model.record.turn.mine:  # others' steps wait, so the places need not be taken
            stream = stream_of(model, STREAM, None, len(prompts), takes=False)
            stream.reset()
            if isinstance(loaded.device, Cpu) and loaded.own_types.get(token, "int64") == "int64":
                run(stream, sampler, token, scores)
            else:
                for step in sampler.text[:-1]:
                    sampler.draw(stream(step))
                    if sampler.over:
                        break
    found = sampler.drawn()
    return found[0] if alone else found


def _roles(loaded: Loaded) -> tuple[str, str, int, int]:
    """What a step of a language model reads, and its scores; the numbers of tokens that it reads, and scores."""
    facts, feeds = loaded.paths[STREAM], loaded.feeds(STREAM, PHASES)
    outputs = [name for name in facts.get("outputs", [facts["output"]]) if name is not None]
    form = loaded.forms[outputs[0]] if len(outputs) == 1 and outputs[0] not in loaded.own_types else ()
    for names, fits, wanted in (
        (
            feeds,
            len(feeds) == 1 and loaded.forms[feeds[0]] == BATCH,
            "takes {}, and one token of each sample, (B,), is",
        ),
        (
            outputs,
            len(form) == 2 and form[:1] == BATCH and form[1].constant,
            "gives {} for a step, and scores of the tokens, (B, vocabulary), are",
        ),
    ):
        if not fits:
            shown = " and ".join(f"{name} {show(loaded.forms[name])}" for name in names) or "nothing"
            raise ShapeError(f"generate: path {STREAM!r} {wanted.format(shown)} wanted")
    vocabulary, read = form[1].b, loaded.variables[feeds[0]]["classes"]
    if read is not None and read < vocabulary:
        raise CalcError(
            f"generate: the network gives scores of {vocabulary} tokens, and reads only tokens below {read}"
        )
    return feeds[0], outputs[0], read or vocabulary, vocabulary


def _prompts(given: Any, read: int) -> tuple[list[np.ndarray], bool]:
    """Prompts, arrays of tokens below ``read``, and whether one was given alone."""
    several = getattr(given, "ndim", 0) == 2 or (
        isinstance(given, (list, tuple)) and any(np.iterable(p) and not isinstance(p, (str, bytes)) for p in given)
    )
    prompts = []
    for prompt in given if several else (given,):
        try:
            array = np.asarray(prompt)
        except ValueError:  # its rows differ in length
            array = np.zeros(())
        if array.dtype.kind not in "iu" or array.ndim != 1 or not array.size:
            raise CalcError(
                "generate: a prompt is an array of tokens, which are integers, and at least one: (length,), or (n, length), or a "
                f"list of arrays, not {checks.shown(prompt)}"
            )
        wrong = np.flatnonzero((array < 0) | (array >= read))
        if wrong.size:
            raise CalcError(
                f"generate: tokens of the prompt are integers in [0, {read}), not {array[wrong[0]]}, at index {wrong[0]}"
            )
        prompts.append(array.astype(np.int64))
    if not prompts:
        raise CalcError(
            "generate: there is no prompt in an empty list, and a text has at least one token of it: array of tokens"
        )
    return prompts, not several


def _seeds(seed: Any, n: int) -> list[tuple[int, int]]:
    """(seed, sample) of the random numbers of each of n texts, or (its own seed, 0)."""
    if isinstance(seed, (list, tuple, np.ndarray)):
        if len(seed) != n:
            raise CalcError(f"generate: {len(seed)} seeds for {n} prompts: give one for each, or one for all")
        return [(checks.integer("generate: seed", own, 0), 0) for own in seed]
    one = int(np.random.default_rng().integers(MAX_SEED)) if seed is None else checks.integer("generate: seed", seed, 0)
    return [(one, i) for i in range(n)]
