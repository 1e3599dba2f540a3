"""Steps in folders: which count, how processes write them together, and removing old ones.

A step is a folder `step-00000012` with a manifest in it, which is written last. Beside such folders there may be, after
a crash or while somebody writes:

- `step-00000012.tmp`: is being written, or was left so. Does not count.
- `step-00000012.replaced`: the one of before, while a new one of the same step takes its place. Counts as long as there
  is no `step-00000012`.
- `step-00000012.removed`: is being removed. Does not count.

Process 0 makes the files (`prepare`), each process writes its bytes where they belong in them, process 0 commits. What
a process wrote is on the disk before it says so; the manifest is written when all have said so, and then the folder
gets its name. What only informs processes of each other is gone by then, and need not come to the disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from unidist.checkpoint import disk, manifest
from unidist.checkpoint.checksums import Bytes, crc
from unidist.checkpoint.directory import Directory, Step, name_of
from unidist.checkpoint.manifest import MANIFEST, Told, index_of
from unidist.checkpoint.opened import FolderFiles, Opened
from unidist.checkpoint.tensors import LARGEST_TEXT, FileSpec, Tensor, parse_json, stamped
from unidist.checkpoint.writing import Part, PartWriter
from unidist.errors import CheckpointError

TMP, REPLACED, REMOVED = ".tmp", ".replaced", ".removed"
PREPARED = "prepared.json"
# Of the description of a part, which has four bytes for each 2,048 of data.
_MOST_OF_PART = 1 << 32
_NAME = re.compile(r"step-(\d{8,12})(\.tmp|\.replaced|\.removed)?")


class FolderDirectory(Directory):
    """A folder of folders.

    Args:
        path: of it.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        self.path = Path(path)

    def steps(self) -> list[int]:
        return sorted({step for step, _ in self._found() if self._counted(step) is not None})

    def find(self, step: Step) -> Path:
        """As Directory.find; "latest" of a step's own folder is this folder."""
        if step == "latest" and _is_committed(self.path):
            return self.path
        number = self.number(step)
        return self.folder(number, self._counted(number) or "")

    def folder(self, step: int, suffix: str = "") -> Path:
        """A folder's path, whether there is one or not."""
        return self.path / f"{name_of(step)}{suffix}"

    def opened(self, step: Step) -> tuple[Path, Opened]:
        folder = self.find(step)
        held, named = FolderFiles(folder), _named(folder.name)
        try:
            text = held.manifest()
            return folder, Opened(held, manifest.parsed(text, named and named[0]), len(text))
        except BaseException:
            held.close()
            raise

    def _found(self) -> list[tuple[int, str]]:
        if not self.path.exists():
            return []
        with disk.told(self.path):
            return [found for name in sorted(os.listdir(self.path)) if (found := _named(name)) is not None]

    def _counted(self, step: int) -> str | None:
        return next((suffix for suffix in ("", REPLACED) if _is_committed(self.folder(step, suffix))), None)

    # writing ----------------------------------------------------------------------------------------------------------

    def prepare(self, step: int, files: Sequence[FileSpec]) -> str:
        """Makes the folder in which all processes write a step, with each file's header and size.

        What an earlier try has left there is removed.

        Returns:
            The folder's name.

        Raises:
            CheckpointError: what the system says: no such folder, no right to write, no space.
        """
        folder = self.folder(step, TMP)
        with disk.told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with disk.told(folder):
            if folder.is_symlink() or folder.is_file():
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        writing = secrets.token_hex(16)
        for file in files:
            path = folder / file.name
            with disk.told(path), path.open("xb") as opened:
                opened.write(stamped(file.header, step, writing))
                opened.truncate(file.size)
        told = {"step": step, "writing": writing, "plan": _plan(files)}
        disk.write_whole(folder, PREPARED, [json.dumps(told).encode()])
        return folder.name

    def writer(self, name: str, files: Sequence[FileSpec], place: int) -> FolderWriter:
        _, writing = self._begun(name, files)
        return FolderWriter(self.path / name, files, place, writing)

    def _begun(self, name: str, files: Sequence[FileSpec]) -> tuple[int, str]:
        folder = self.path / name
        with disk.inside(folder) as opened:
            text = disk.read_small(PREPARED, opened, LARGEST_TEXT)
        match parse_json(text, PREPARED):
            case {"step": int() as step, "writing": str() as writing, "plan": int() as plan}:
                if plan != _plan(files):
                    raise CheckpointError(
                        f"{folder}: was prepared for other tensors than this process has", file=str(folder)
                    )
                return step, writing
        raise CheckpointError(f"{folder / PREPARED}: does not say what is written", file=PREPARED)

    def _read(self, name: str, part: str) -> bytes:
        with disk.inside(self.path / name) as opened:
            return disk.read_small(part, opened, _MOST_OF_PART)

    def _described(
        self, name: str, begun: tuple[int, str], files: Sequence[FileSpec], parts: Sequence[Part]
    ) -> tuple[tuple[Told, ...], bytes]:
        told = tuple(_header(self.path / name, file, stamped(file.header, *begun)) for file in files)
        return told, index_of(files)

    def _write(self, name: str, file: str, content: Iterable[bytes]) -> None:
        # With the manifest, the folder comes to the disk, which has the names of all.
        disk.write_whole(self.path / name, file, content, is_kept=True)

    def _stand(self, name: str, step: int, manifest: bytes, parts: Sequence[str]) -> str:
        """Gives a finished folder its name.

        One that counts and has this name gives way, and counts until then.
        """
        folder, final, replaced = self.path / name, self.folder(step), self.folder(step, REPLACED)
        for beside in (PREPARED, *parts):
            with disk.told(folder / beside):
                (folder / beside).unlink()
        disk.write_durably(folder, MANIFEST, manifest)
        with disk.told(final):
            if not (final / MANIFEST).exists():
                self._take_away(step, "")
            if final.exists():
                self._take_away(step, REPLACED)
                final.rename(replaced)
            folder.rename(final)
            disk.sync_folder(self.path)
            self._take_away(step, REPLACED)
        return str(final)

    # removing ---------------------------------------------------------------------------------------------------------

    def _remove(self, step: int) -> None:
        for suffix in (REPLACED, ""):
            self._take_away(step, suffix)

    def _clear(self, newest: int) -> None:
        for step, suffix in self._found():
            is_left = suffix in (TMP, REMOVED) and step < newest
            if is_left or (suffix == REPLACED and self._counted(step) == ""):
                self._take_away(step, suffix)

    def _take_away(self, step: int, suffix: str) -> None:
        """Removes a folder, if it is there. It gets another name first: half of it must not count."""
        folder, away = self.folder(step, suffix), self.folder(step, REMOVED)
        if not folder.exists():
            return
        with disk.told(folder):
            if suffix != REMOVED:
                if away.exists():
                    shutil.rmtree(away)
                folder.rename(away)
                disk.sync_folder(self.path)
            shutil.rmtree(away)


class FolderWriter(PartWriter):
    """Writes one process's part of a step into files that all write, each byte where it belongs.

    Args:
        folder: of the step.
    """

    def __init__(self, folder: Path, files: Sequence[FileSpec], place: int, writing: str) -> None:
        super().__init__(files, place, writing)
        self.folder = folder
        self._opened: dict[str, disk.Early] = {}

    def _put(self, file: FileSpec, tensor: Tensor, begin: int, piece: Bytes) -> None:
        if file.name not in self._opened:
            with disk.inside(self.folder) as folder:
                self._opened[file.name] = disk.Early(disk.open_regular(file.name, folder, os.O_WRONLY))
        opened, at = self._opened[file.name], file.begins[tensor.name] + begin
        with disk.told(self.folder / file.name, tensor.name):
            disk.write_all(opened.descriptor, piece, at)
        opened.wrote(at, at + len(piece))

    def _keep(self) -> None:
        for name, opened in self._opened.items():
            with disk.told(self.folder / name):
                os.fsync(opened.descriptor)
        self.close()

    def _describe(self, name: str, text: bytes) -> None:
        disk.write_whole(self.folder, name, [text])

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1].descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self.close()


def _plan(files: Sequence[FileSpec]) -> int:
    """A number that differs where processes know other files."""
    found = 0
    for file in files:
        found = crc(file.header, crc(file.name.encode(), found))
    return found


def _header(folder: Path, file: FileSpec, due: bytes) -> Told:
    """Returns what the manifest will say of a file, which still has the header and size it was given.

    The file comes to the disk here where nobody has written into it.
    """
    with disk.inside(folder) as there:
        opened = disk.open_regular(file.name, there)
    try:
        size = os.fstat(opened).st_size
        found = disk.read_exactly(opened, len(due), 0, file.name)
        with disk.told(file.name):
            os.fsync(opened)
    finally:
        os.close(opened)
    if size != file.size or found != due:
        raise CheckpointError(f"{file.name}: is not the file that was prepared", file=file.name)
    return Told(file.name, size, len(due), crc(due))


def _named(name: str) -> tuple[int, str] | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    step, suffix = int(found[1]), found[2] or ""
    return (step, suffix) if f"{name_of(step)}{suffix}" == name else None


def _is_committed(folder: Path) -> bool:
    """A folder itself, not a link to one, with a manifest."""
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and stat.S_ISREG((folder / MANIFEST).lstat().st_mode)
    except OSError:
        return False
