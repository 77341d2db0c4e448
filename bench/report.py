"""Write ``bench/RESULTS.md`` from the stored results: ``python -m bench.report``.

All numbers there come from this program.  Workloads are measured on different machines and days.  The section of a
workload without a stored result here is kept as it is.
"""

from __future__ import annotations

import json
from typing import Any

from bench.gpu import NOT_MEASURED
from bench.harness import RESULTS, ROOT, TARGET_HEADER, format_table, number, say, target_rows

OUTPUT = ROOT / "bench" / "RESULTS.md"
GPU = "On a GPU"  # prefix of the titles of GPU workloads
INTRODUCTION = """# Measured results

Written by `python -m bench.report` from the last runs of the commands below; do not edit.

Contestants take turns (A B C, A B C, ...) on the same work, same weights, same threads; a time is printed only
for one that computes the same result.  *min* and *median* are over the turns, *times ours* is the ratio of the
minima, *by turns* the median of the ratios within each turn, *of limit* the time that the machine's measured FMA
peak and copy bandwidth allow over the time taken.
"""


def main() -> None:
    """Write the report.  Workloads without a stored result keep their old section."""
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    old_targets, sections = written(OUTPUT.read_text() if OUTPUT.exists() else "")
    if not stored and not sections:
        say("nothing is measured yet: python -m bench all")
        return
    found = [t for data in stored for t in data["targets"]]
    numbers = {t["number"] for t in found}
    targets = [row for row in old_targets if row[0] not in numbers] + target_rows(found)
    targets.sort(key=lambda row: (row[0][0], float(row[0][1:])))
    sections |= {data["title"]: section(data) for data in stored}
    sections.pop(GPU, None)
    if not any(title.startswith(GPU) for title in sections):
        sections[GPU] = f"`python -m bench gpu`: {NOT_MEASURED}."
    parts = [INTRODUCTION]
    if targets:
        reached = sum(row[-1] == "reached" for row in targets)
        parts += ["## Targets", f"{reached} of {len(targets)} reached.", format_table(TARGET_HEADER, targets)]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items()]
    OUTPUT.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    say(f"wrote {OUTPUT.relative_to(ROOT)}")


def section(data: dict[str, Any]) -> str:
    """One workload's machine, tables, pictures and notes."""
    machine, limits = data["machine"], data["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"`{data['command']}`, {machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"one core's FMA peak {number(limits['fma_gflops'])} GFLOP/s, copy {number(limits['copy_gbs'])} GB/s; "
        f"{versions}.",
    ]
    if "gpu" in data:
        parts.append(f"GPU: {data['gpu']['text']}.")
    for table in data["tables"]:
        parts += [f"### {table['title']}", format_table(table["header"], table["rows"])]
    parts += [f"![{p['title']}]({RESULTS.name}/{p['file']})" for p in data.get("pictures", [])]
    if data["notes"]:
        parts.append("\n".join(f"- {note}" for note in data["notes"]))
    return "\n\n".join(parts)


def written(report: str) -> tuple[list[list[str]], dict[str, str]]:
    """Rows of the target table, and the sections by title, of an earlier report."""
    sections = {}
    for part in report.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        sections[title.strip()] = text.strip()
    lines = [line for line in sections.pop("Targets", "").splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines], sections


if __name__ == "__main__":
    main()
