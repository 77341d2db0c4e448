"""Files: whatever is altered in one, it is refused, or what it says is done: no crash, no hang, no memory beyond its size."""

from __future__ import annotations

from tests.kinds.files import campaign

SAMPLE, WHOLE = 1000, 50_000


def test_altered_files_are_refused_or_run(whole: bool) -> None:
    counts, wrong = campaign(WHOLE if whole else SAMPLE, seed=0)
    print(dict(sorted(counts.items())))
    assert not wrong, "\n".join(wrong[:50])
    assert counts["program refused"] and counts["model refused"] and counts["stored refused"] and counts["kept refused"]
    assert counts["program run"] and counts["model run"] and counts["stored run"] and counts["kept run"], counts
