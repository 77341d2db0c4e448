"""A small GPT learns to write, character by character, from a text that Python itself brings: its manual.

The text is ``pydoc_data.topics``, what ``help("for")`` and the like print, another one in each version of Python.  The last tenth is held
out.  Beside the network: what counts of letters, pairs and triples in the same text predict.

Needs ``pip install "calcvm[plot]"`` for the picture, out/gpt.png.

    python examples/gpt.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

import calcvm as cv

STEPS, BATCH = 128, 8


def letters_of(length: int) -> tuple[str, np.ndarray]:
    """The letters, and the text as their numbers; rare letters are all one."""
    text = "\n".join(topics[name] for name in sorted(topics))[:length]
    known = "".join(sorted(c for c in {*text} if c != "?" and text.count(c) >= 20)) + "?"
    number = {c: k for k, c in enumerate(known)}
    return known, np.array([number.get(c, len(known) - 1) for c in text])


def counted(tokens: np.ndarray, held: np.ndarray, classes: int, past: int) -> float:
    """Mean cross-entropy, in nats, of the next token from the last ``past`` ones, or fewer if these are rare (Witten and Bell 1991)."""
    p = np.full((1, classes), 1 / classes)
    for n in range(past + 1):
        at = sum(tokens[n - k : len(tokens) - k] * classes**k for k in range(n + 1))  # the last n and the next one
        counts = np.bincount(at, minlength=classes ** (n + 1)).reshape(-1, classes)
        kinds = np.count_nonzero(counts, axis=1, keepdims=True)
        shorter = np.tile(p, (len(counts) // len(p), 1))
        p = (counts + kinds * shorter) / np.maximum(counts.sum(axis=1, keepdims=True) + kinds, 1) + (
            kinds == 0
        ) * shorter
    at = sum(held[past - k : len(held) - k] * classes**k for k in range(past + 1))
    return float(-np.log(p.reshape(-1)[at]).mean())


def picture(history: cv.History, baselines: dict[str, float], path: Path) -> None:
    """Draw the losses over the epochs, with the baselines as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    epochs = range(1, len(history["loss"]) + 1)
    axis.plot(epochs, history["loss"], "o-", label="in training")
    axis.plot(epochs, history["val_loss"], "o-", label="held out")
    for color, (name, loss) in zip(("lightgray", "gray", "black"), baselines.items()):
        axis.axhline(loss, color=color, linestyle="--", label=f"counted {name}")
    axis.set(xticks=[*epochs], xlabel="epoch", ylabel="nats per character", title="a GPT reads Python's manual")
    axis.legend(loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a shorter text, a smaller network: shows that it runs, writes badly"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()

    letters, tokens = letters_of(40_000 if args.quick else 300_000)
    split = len(tokens) * 9 // 10
    baselines = {
        name: counted(tokens[:split], tokens[split:], len(letters), past)
        for past, name in enumerate(("letters", "bigrams", "trigrams"))
    }
    width, epochs = (32, 3) if args.quick else (64, 4)
    every = np.lib.stride_tricks.sliding_window_view(tokens, STEPS + 1)
    train, held = every[: split - STEPS : STEPS // 2], every[split::STEPS]
    net = cv.zoo.gpt(len(letters), width=width, layers=2, heads=4, steps=STEPS)
    schedule = cv.Cosine(epochs * (len(train) // BATCH), warmup_steps=50)
    model = cv.Model(
        net, input_shape=(STEPS,), optimizer=cv.AdamW(4e-3, schedule=schedule, clip_norm=1.0), batch_size=BATCH,
        stream=True, seed=0,
    )  # fmt: skip
    print(
        f"{len(tokens):,} characters, {len(letters)} of them different; the model takes {model.program.heap_bytes:,} bytes"
    )
    start = time.perf_counter()
    history = model.fit(
        train[:, :-1], train[:, 1:], epochs=epochs, validation=(held[:, :-1], held[:, 1:]), progress=False
    )
    print(f"{len(train) * epochs // BATCH:,} steps in {time.perf_counter() - start:.0f} s")
    print(f"held out: {history['val_loss'][-1]:.3f} nats per character", end="")
    print("".join(f", counted {name} {loss:.3f}" for name, loss in baselines.items()))

    prompt = np.array([letters.index(c) for c in "The for stat"])
    start = time.perf_counter()
    written = model.generate(prompt, tokens=STEPS - len(prompt), temperature=0.5, seed=0)
    print(f"{1e6 * (time.perf_counter() - start) / len(written):.0f} us a character: ", end="")
    print("".join(letters[t] for t in [*prompt, *written]))
    picture(history, baselines, args.out / "gpt.png")
    print(f"picture: {args.out / 'gpt.png'}")


if __name__ == "__main__":
    main()
