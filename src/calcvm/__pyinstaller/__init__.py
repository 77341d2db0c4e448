"""The hook of PyInstaller for calcvm (entry point ``pyinstaller40``): it freezes applications without further options."""

from __future__ import annotations

from pathlib import Path


def get_hook_dirs() -> list[str]:
    """The folder of the hooks."""
    return [str(Path(__file__).parent)]
