"""A page that learns digits: one file, without a server, in which one draws and watches the network learn.

python examples/browser.py [--out FOLDER] writes learn.html; open it in a browser (extras ``demo`` and ``edge``).
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import calcvm as cv
from calcvm import nn

TRAINED, TESTED, HIDDEN = 240, 60, 16

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>A network that learns here</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem;color:#1d2733;background:#fbfaf7}
h1{font-size:1.5rem;margin:0}main{display:grid;grid-template-columns:auto 1fr;gap:1.5rem 2rem;margin-top:1.5rem}
canvas{background:#fff;border:1px solid #c9cdd2;border-radius:6px;touch-action:none}button{font:inherit;padding:.3rem 1rem;margin-right:.5rem}
.bar{display:grid;grid-template-columns:1rem 1fr 3rem;gap:.6rem;align-items:center}.bar i{display:block;height:.9rem;background:#2f6f9f;border-radius:2px}
.best{font-weight:700}small{color:#5b6672}
</style>
<h1>A network that learns here</h1>
<small>64-HIDDEN-10, Adam, one sample at a time; nothing is sent anywhere. calcvm wrote CODE bytes of WebAssembly.</small>
<main>
<div><canvas id="pad" width="208" height="208"></canvas><br><button id="wipe">Wipe</button></div>
<div id="bars"></div>
<div><canvas id="curve" width="208" height="120"></canvas></div>
<div><p id="told">It has learned nothing yet.</p><button id="learn">Learn</button><button id="forget">Forget</button>
<p><small>Or draw a digit, and say which it is: <span id="keys"></span></small></p></div>
</main>
<script type="module">
MODULE
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const model = await load(bytes("WASM")), start = model.state, data = bytes("DATA"), N = TRAINED, ALL = N + TESTED;
const image = k => Float32Array.from({length: 64}, (_, j) => (data[k * 32 + (j >> 1)] >> 4 * (j & 1) & 15) / 15);
const label = k => data[ALL * 32 + k], $ = id => document.getElementById(id);
const pad = new Float32Array(64), losses = [];
let epochs = 0, busy = false;
for (let d = 0; d < 10; d++) {
  $("bars").insertAdjacentHTML("beforeend", `<div class="bar"><b>${d}</b><i></i><span></span></div>`);
  $("keys").insertAdjacentHTML("beforeend", `<button style="padding:.1rem .5rem;margin:.1rem">${d}</button>`);
}
const best = s => s.indexOf(Math.max(...s));
function show() {
  const c = $("pad").getContext("2d"), scores = model.predict(pad), top = Math.max(...scores);
  for (let j = 0; j < 64; j++) {
    c.fillStyle = `rgb(${255 - 226 * pad[j]},${255 - 216 * pad[j]},${255 - 204 * pad[j]})`;
    c.fillRect(j % 8 * 26, (j >> 3) * 26, 26, 26);
  }
  const e = [...scores].map(s => Math.exp(s - top)), sum = e.reduce((a, b) => a + b);
  [...$("bars").children].forEach((bar, d) => {
    bar.className = d === best(scores) ? "bar best" : "bar";
    bar.children[1].style.width = 100 * e[d] / sum + "%";
    bar.children[2].textContent = Math.round(100 * e[d] / sum) + " %";
  });
  const p = $("curve").getContext("2d");
  p.clearRect(0, 0, 208, 120);
  p.beginPath();
  losses.forEach((l, k) => p.lineTo(4 + 200 * k / Math.max(losses.length - 1, 1), 116 - 110 * l / losses[0]));
  p.strokeStyle = "#c2552d";
  p.lineWidth = 2;
  p.stroke();
}
function epoch() {
  let sum = 0, right = 0;
  for (let k = 0; k < N; k++) { const i = (k * 97 + epochs * 31) % N; sum += model.step(image(i), label(i)); }
  for (let k = N; k < ALL; k++) right += best(model.predict(image(k))) === label(k);
  losses.push(sum / N);
  epochs++;
  $("told").textContent = `Epoch ${epochs}: loss ${losses.at(-1).toFixed(3)}; of ${ALL - N} digits that it has not learned from, ${right} are right.`;
  show();
}
function learn(until) { epoch(); if (epochs < until) requestAnimationFrame(() => learn(until)); else busy = false; }
$("learn").onclick = () => { if (!busy) { busy = true; learn(epochs + 20); } };
$("forget").onclick = () => { model.state = start; losses.length = epochs = 0; $("told").textContent = "It has learned nothing yet."; show(); };
$("wipe").onclick = () => { pad.fill(0); show(); };
[...$("keys").children].forEach((b, d) => b.onclick = () => { for (let k = 0; k < 20; k++) model.step(pad, d); show(); });
$("pad").onpointermove = $("pad").onpointerdown = e => {
  if (!e.buttons) return;
  for (let j = 0; j < 64; j++) {
    const r = Math.hypot(e.offsetX / 26 - j % 8 - .5, e.offsetY / 26 - (j >> 3) - .5);
    pad[j] = Math.min(1, Math.max(pad[j], 1.3 - r));
  }
  show();
};
pad.set(image(N));
if (location.hash === "#learn") for (let k = 0; k < 20; k++) epoch();
show();
</script></html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="where learn.html is written")
    parser.add_argument("--quick", action="store_true", help="as without it: nothing is trained here")
    out = parser.parse_args().out
    scans, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(scans))[: TRAINED + TESTED]
    cells = np.minimum(scans[order], 15).astype(np.uint8)  # 0 to 16, in four bits
    data = (cells[:, ::2] | cells[:, 1::2] << 4).tobytes() + labels[order].astype(np.uint8).tobytes()

    net = nn.Linear(HIDDEN) >> nn.ReLU() >> nn.Linear(10)
    model = cv.Model(net, input_shape=(64,), optimizer=cv.Adam(3e-3), batch_size=1, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        pack = model.export(folder, target="browser", name="digits")
        module, wasm = (Path(folder, f"digits.{kind}").read_bytes() for kind in ("js", "wasm"))
    texts = {
        "MODULE": module.decode(), "WASM": base64.b64encode(wasm).decode(), "DATA": base64.b64encode(data).decode(),
        "TRAINED": str(TRAINED), "TESTED": str(TESTED), "HIDDEN": str(HIDDEN), "CODE": f"{pack.flash:,}",
    }  # fmt: skip
    page = PAGE
    for name, text in texts.items():
        page = page.replace(name, text, 1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "learn.html").write_text(page)
    print(
        f"{out / 'learn.html'}: {len(page.encode()):,} bytes, of which {len(wasm):,} are WebAssembly with its start values"
    )


if __name__ == "__main__":
    main()
