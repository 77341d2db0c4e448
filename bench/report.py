"""Write ``bench/RESULTS.md`` from the stored results: ``python -m bench.report``.

The one way numbers get there: none is typed.
"""

from __future__ import annotations

import json

from bench.harness import RESULTS, ROOT, TARGET_HEADER, format_table, number, say, target_rows

OUTPUT = ROOT / "bench" / "RESULTS.md"
INTRODUCTION = """# Measured results

Written by `python -m bench.report` from the last runs of the commands below; do not edit.

Contestants take turns (A B C, A B C, ...) on the same work, same weights, same threads; a time is printed only
for one that computes the same result.  *min* and *median* are over the turns, *times ours* is the ratio of the
minima, *by turns* the median of the ratios within each turn, *of limit* the time that the machine's measured FMA
peak and copy bandwidth allow over the time taken.
"""


def main() -> None:
    """Write the report of every workload that has a stored result."""
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    if not stored:
        say("nothing is measured yet: python -m bench all")
        return
    parts = [INTRODUCTION]
    targets = sorted(
        (t for data in stored for t in data["targets"]), key=lambda t: (t["number"][0], float(t["number"][1:]))
    )
    if targets:
        reached = sum(t["reached"] for t in targets)
        parts += [
            "## Targets",
            f"{reached} of {len(targets)} reached.",
            format_table(TARGET_HEADER, target_rows(targets)),
        ]
    for data in stored:
        machine, limits = data["machine"], data["limits"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        parts += [
            f"## {data['title']}",
            f"`{data['command']}`, {machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
            f"one core's FMA peak {number(limits['fma_gflops'])} GFLOP/s, copy {number(limits['copy_gbs'])} GB/s; "
            f"{versions}.",
        ]
        for table in data["tables"]:
            parts += [f"### {table['title']}", format_table(table["header"], table["rows"])]
        parts += [f"![{p['title']}]({RESULTS.name}/{p['file']})" for p in data.get("pictures", [])]
        if data["notes"]:
            parts.append("\n".join(f"- {note}" for note in data["notes"]))
    OUTPUT.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    say(f"wrote {OUTPUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
