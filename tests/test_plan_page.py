"""A plan as data and as a page: what they say is what the plan does, and what is looked at in a browser is linked."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
).split()


def graph():
    net = (
        nn.Linear(64)
        >> nn.Tanh()
        >> nn.Dropout(0.1)
        >> nn.Linear(64)
        >> nn.Tanh()
        >> nn.Linear(64)
        >> nn.Tanh()
        >> nn.Linear(4)
    )
    return cv.build_graph(net, (32,), "softmax_cross_entropy", cv.Adam(1e-3))


@pytest.fixture(scope="module")
def plans():
    whole = cv.plan(graph(), batch_size=512, workers=1)
    return [whole, cv.plan(graph(), batch_size=512, workers=1, memory=int(0.8 * whole.heap_bytes))]


@pytest.mark.parametrize("which", [0, 1])
def test_the_data_are_those_of_the_plan(plans, which):
    plan = plans[which]
    told = plan.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["memory_bytes"] == plan.memory_bytes == (None, int(0.8 * plans[0].heap_bytes))[which]
    statements, values = told["statements"], told["values"]
    assert plan.report() == statements and len(statements) == len(plan.statements)
    assert [s["live_bytes"] for s in statements] == list(plan.live_bytes)
    assert [s["peak_bytes"] for s in statements] == np.maximum.accumulate(plan.live_bytes).tolist()
    assert len({v["name"] for v in values}) == len(values)
    assert sum(s["repeats"] is not None for s in statements) == len(plan.recomputed)
    assert (which == 1) == bool(plan.recomputed)
    for s in statements:
        if s["repeats"] is not None:
            first = statements[s["repeats"]]
            assert first["index"] < s["index"] and (first["row"], first["path"]) == (s["row"], s["path"])


@pytest.mark.parametrize("which", [0, 1])
def test_bytes_before_and_after_are_those_that_live_on(plans, which):
    """Reckoned anew from the values' lives: cells are shared in place, in whole cache lines."""
    told = plans[which].to_dict()
    statements, values = told["statements"], told["values"]
    fixed = min(s["bytes_after"] for s in statements)
    for s in statements:
        t = s["index"]
        for key, there in (
            ("bytes_before", lambda v, t=t: v["first"] < t <= v["last"]),
            ("bytes_after", lambda v, t=t: v["first"] <= t < v["last"]),
        ):
            cells = {(v["start_byte"], -(-v["bytes"] // 64) * 64) for v in values if v["shared"] and there(v)}
            assert s[key] == fixed + sum(size for _, size in cells), (t, key)


def test_values_lie_apart_while_they_live(plans):
    """Nothing is written over what is still read: of two that live at once either the cells differ or one is in place."""
    for plan in plans:
        told = plan.to_dict()
        values = told["values"]
        places = {(a, b) for s in told["statements"] for a, b in s["in_place"].items()}
        assert places
        for i, a in enumerate(values):
            for b in values[:i]:
                together = a["first"] <= b["last"] and b["first"] <= a["last"]
                overlap = (
                    a["start_byte"] < b["start_byte"] + b["bytes"] and b["start_byte"] < a["start_byte"] + a["bytes"]
                )
                if together and overlap:
                    assert {(a["name"], b["name"]), (b["name"], a["name"])} & places


# ---------------------------------------------------------------- the page
def test_the_page_holds_the_plan_and_nothing_else(plans, tmp_path):
    g = cv.CalcGraph()
    x = g.placeholder("</script><b>x", (None, 4))
    with g.path("p"):
        cv.tanh(x * 2)
    plan = cv.plan(g, batch_size=3)
    for p in (*plans, plan):
        p.html(tmp_path / "plan.html")
        text = (tmp_path / "plan.html").read_text()
        (data,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', text, re.DOTALL)
        assert json.loads(data) == p.to_dict()
        assert not re.search(r"""(src|href)=|url\(|@import|https?://(?!www\.w3\.org)""", text)
    with pytest.raises(cv.FileError, match="the folder to write to must be there"):
        plan.html(tmp_path / "none" / "plan.html")


LOOK = """<script>
const told = [];
window.addEventListener("error", e => told.push("error " + e.message));
const over = e => e.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: 5, clientY: 5}));
for (const e of document.querySelectorAll("[data-statement]")) {
  over(e);
  const t = +e.dataset.statement, rects = [...document.querySelectorAll("rect.value.on")].map(r => +r.dataset.value).sort((a, b) => a - b);
  const rows = [...document.querySelectorAll("tr.on")].map(r => +r.dataset.statement);
  told.push(["statement", t, rects, rows, document.querySelectorAll(".node.on").length, document.getElementById("tip").textContent]);
}
for (const e of document.querySelectorAll("rect.value")) {
  over(e);
  told.push(["value", +e.dataset.value, [...document.querySelectorAll("tr.on")].map(r => +r.dataset.statement), document.getElementById("tip").textContent]);
}
const find = document.getElementById("find");
find.value = "tanh"; find.dispatchEvent(new Event("input"));
told.push(["found", document.getElementById("found").textContent]);
told.push(["matrices", document.querySelectorAll("canvas").length]);
const out = document.createElement("pre"); out.id = "told"; out.textContent = JSON.stringify(told); document.body.appendChild(out);
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("which", [0, 1])
def test_statements_and_values_are_linked(plans, which, tmp_path):
    plan, file = plans[which], tmp_path / "plan.html"
    plan.html(file)
    file.write_text(file.read_text().replace("</body>", LOOK))
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'user'}", "--dump-dom", file.as_uri()]
    out = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    (text,) = re.findall(r'<pre id="told">(.*?)</pre>', out, re.DOTALL)
    seen = json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    told = plan.to_dict()
    statements, values = told["statements"], told["values"]
    users = [
        [s["index"] for s in statements if any(k in o["values"] for o in s["operands"])] for k in range(len(values))
    ]
    looked = 0
    for kind, *rest in seen:
        assert kind != "error", rest
        if kind == "statement":
            t, rects, rows, nodes, tip = rest
            assert rects == sorted({k for o in statements[t]["operands"] for k in o["values"] if users[k]})
            assert rows == [t] and nodes == 1
            assert statements[t]["row"] in tip and f"{statements[t]['live_bytes']:,} bytes" in tip
            looked += 1
        elif kind == "value":
            k, rows, tip = rest
            assert rows == users[k] and values[k]["name"] in tip and f"{values[k]['bytes']:,} bytes" in tip
            looked += 1
        elif kind == "found":
            assert re.fullmatch(rf"\d+ of {len(statements)}", rest[0]) and not rest[0].startswith("0 ")
        else:
            assert rest == [2 * which]
    assert looked == 2 * len(statements) + sum(v["last"] >= v["first"] for v in values)
