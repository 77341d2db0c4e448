"""Model and program files taken apart and put together again, with checksums that are right."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
DEEP = "lists in lists in lists"  # written as such, deeper than Python reads


def rewritten(
    data: bytes,
    documents: Callable[[dict[str, Any]], Any] | None = None,
    arrays: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
) -> bytes:
    """A file with altered documents (in place) and arrays, as an attacker would write it."""
    found_documents, found_arrays = parts(data)
    if documents is not None:
        documents(found_documents)
    if arrays is not None:
        found_arrays = arrays(found_arrays)
    members = [("document", name, dumped(value)) for name, value in found_documents.items()]
    return sealed([*members, *(("array", name, npy(value)) for name, value in found_arrays.items())], data)


def parts(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Documents and arrays of a whole file."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        documents, arrays = {}, {}
        for entry in json.loads(file.read(MANIFEST))["members"]:
            content = file.read(entry["member"])
            if entry["type"] == "document":
                documents[entry["name"]] = json.loads(content)
            else:
                arrays[entry["name"]] = np.load(io.BytesIO(content))
    return documents, arrays


def dumped(document: Any) -> bytes:
    """A document's bytes, also of what Python does not write."""
    try:
        return json.dumps(document).encode().replace(f'"{DEEP}"'.encode(), b"[" * 100_000 + b"]" * 100_000)
    except ValueError:  # longer integers than Python writes
        return b"1" * 5000


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array), version=(1, 0), allow_pickle=False)
    return out.getvalue()


def sealed(
    members: list[tuple[str, str, bytes]], like: bytes, alter: Callable[[dict[str, Any]], Any] | None = None
) -> bytes:
    """A file of (type, name, content), of the kind and version of another; its manifest may be altered before it is sealed."""
    with zipfile.ZipFile(io.BytesIO(like)) as file:
        manifest = json.loads(file.read(MANIFEST))
    manifest["members"] = [
        {
            "member": f"{kind}s/{i}.{'json' if kind == 'document' else 'npy'}", "type": kind, "name": name,
            "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(),
        }
        for i, (kind, name, content) in enumerate(members)
    ]  # fmt: skip
    names = [entry["member"] for entry in manifest["members"]]
    if alter is not None:
        alter(manifest)
    head = dumped(manifest)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        file.comment = hashlib.sha256(head).hexdigest().encode()
        file.writestr(zipfile.ZipInfo(MANIFEST), head)
        for name, (_, _, content) in zip(names, members):
            file.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()
