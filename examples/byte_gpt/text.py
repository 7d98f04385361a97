"""Find a text and read it into one tensor of bytes.

By default the text is the Python source of the standard library: some 12 MB that every machine with Python has, a
little different in each Python release. Files are joined in the order of a hash of their relative paths. So the bytes
depend on the files' names and contents and on nothing else, and any stretch of them is a fair sample: in alphabetical
order the last tenth, which is held out, would be help topics, a kind of text that the rest hardly has.
"""

import os
import sysconfig
from collections.abc import Iterable
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

# Installed packages differ from machine to machine, and tests would be half of the text.
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def find_files(folder: Path, pattern: str, skipped: Iterable[str] = ()) -> list[Path]:
    """Files under ``folder``, at any depth, whose name matches ``pattern``, in an order fixed by their relative paths.

    Hidden folders and folders named in ``skipped`` are not entered.
    """
    skipped = set(skipped)
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(root, name) for name in names if fnmatch(name, pattern)]
    files = (file for file in found if file.is_file())
    return sorted(files, key=lambda file: sha256(file.relative_to(folder).as_posix().encode()).digest())


def read_text(path: str | Path | None, pattern: str, max_bytes: int | None) -> Tensor:
    """Read the first ``max_bytes`` bytes of a text.

    Args:
        path: A file, which is mapped into memory rather than read; a folder, whose matching files are joined; or None
            for the standard library.
        pattern: Shell pattern of file names inside a folder, such as ``"*.txt"``.
        max_bytes: Where to cut the text; None reads all of it.

    Returns:
        The bytes, (N,) uint8. N is 0 for an empty file.

    Raises:
        FileNotFoundError: ``path`` does not exist, or no file in the folder matches.
    """
    if path is None:
        folder, skipped = Path(sysconfig.get_path("stdlib")), STDLIB_SKIPPED
    else:
        folder, skipped = Path(path).expanduser(), frozenset()
    if not folder.exists():
        raise FileNotFoundError(
            f"ByteText(path={str(folder)!r}): there is no such file or folder. Give a text file, a folder of files that"
            f" match {pattern!r}, or leave `path` out to use the standard library's source."
        )
    if folder.is_file():
        size = folder.stat().st_size
        size = size if max_bytes is None else min(size, max_bytes)
        return torch.from_file(str(folder), shared=False, size=size, dtype=torch.uint8)

    files = find_files(folder, "*.py" if path is None else pattern, skipped)
    if not files:
        raise FileNotFoundError(
            f"ByteText(path={str(folder)!r}): no file in this folder matches {pattern!r}. Set `pattern` to what the"
            " files are called (for example '*.txt'), or give `path` a file or another folder."
        )
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if max_bytes is not None and len(text) >= max_bytes:
            del text[max_bytes:]
            break
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
