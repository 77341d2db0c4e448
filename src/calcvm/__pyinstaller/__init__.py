"""What PyInstaller is told of calcvm (entry point ``pyinstaller40``): applications are frozen without further ado."""

from __future__ import annotations

from pathlib import Path


def get_hook_dirs() -> list[str]:
    """The folder of the hooks."""
    return [str(Path(__file__).parent)]
