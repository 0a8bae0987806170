"""The folder of a run: requests.jsonl with a row for each request as it is measured, run.json with all else."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from adaptivespec.bench.rows import Cell, Row
from adaptivespec.errors import AdaptiveSpecError
from adaptivespec.reports import whole_lines, write_whole

ROWS_NAME = "requests.jsonl"
RUN_NAME = "run.json"
LOCK_NAME = "run.lock"


class StoreError(AdaptiveSpecError, RuntimeError):
    """The folder of a run cannot be written, or belongs to another run."""


def refuse_other_settings(out: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to go on with the run of a folder that was begun with other settings.

    Raises:
        StoreError: naming the first setting that differs.
    """
    for key in settings | before:
        if settings.get(key) != before.get(key):
            raise StoreError(
                where=str(out),
                found=f"a run with {key} {before.get(key)!r}",
                expected=f"{key} {settings.get(key)!r}",
                fix="give the same arguments as before to go on with that run, or another --out",
            )


@dataclass
class Store:
    """What a run has measured so far; opened by `Store.open`.

    Args:
        out: the folder.
        settings: of the run, see `Plan.settings`.
        sessions: provenance of each process that measured, this one's last.
        servers: command, note and memory of each server, by configuration.
        cells: the rows of each cell; the last ones written count, where a turn was measured again.
    """

    out: Path
    settings: dict[str, Any]
    sessions: list[dict[str, str]] = field(default_factory=list)
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[Cell, list[Row]] = field(default_factory=dict)
    _lock: IO[str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, out: Path, settings: dict[str, Any], origin: dict[str, str], *, anew: bool = False) -> "Store":
        """The store of a folder, new or to be continued.

        Args:
            out: the folder, made if absent.
            settings: of this run.
            origin: provenance of this process.
            anew: drop the run that the folder may hold, if it is of tasks of these names.

        Raises:
            StoreError: the folder cannot be used, or holds a run with other settings.
        """
        store = cls(out, settings)
        with store.writing(out):
            out.mkdir(parents=True, exist_ok=True)
            store._lock = (out / LOCK_NAME).open("a")
        store._keep_others_out()
        run = out / RUN_NAME
        if run.exists():
            try:
                before = json.loads(run.read_text("utf-8"))
                settings_before = before["settings"]
                store.sessions, store.servers = before["sessions"], before["servers"]
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise StoreError(
                    where=str(run),
                    found=f"what is no run ({error})",
                    expected="the file of a run",
                    fix="give another --out",
                ) from error
            if anew and settings_before.get("tasks", {}).keys() == settings["tasks"].keys():
                for path in (out / ROWS_NAME, *out.glob("*.png")):
                    path.unlink(missing_ok=True)
                store.sessions, store.servers = [], {}
            else:
                refuse_other_settings(out, settings_before, settings)
                store._load()
        elif (out / ROWS_NAME).exists():
            raise StoreError(
                where=str(out),
                found=f"{ROWS_NAME} without {RUN_NAME}",
                expected="both or none",
                fix="give another --out",
            )
        store.sessions.append(origin)
        store.save()
        return store

    def append(self, rows: Sequence[Row]) -> None:
        """Keep the rows of one cell: written when this returns, so that the end of this process loses none.

        Raises:
            StoreError: they could not be written.
        """
        path = self.out / ROWS_NAME
        text = "".join(json.dumps(row.to_dict()) + "\n" for row in rows)
        with self.writing(path), path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
        self.cells[rows[0].cell] = list(rows)

    def save(self) -> None:
        """Write run.json.

        Raises:
            StoreError: it could not be written.
        """
        data = {"settings": self.settings, "sessions": self.sessions, "servers": self.servers}
        with self.writing(self.out / RUN_NAME):
            write_whole(self.out / RUN_NAME, json.dumps(data, indent=1).encode())

    def has(self, turn: Sequence[Cell]) -> bool:
        """Whether every cell of a turn is complete; where one is missing all are measured again, side by side."""
        return all(cell in self.cells for cell in turn)

    def turns(self) -> Iterator[dict[str, list[Row]]]:
        """The rows of each turn by configuration."""
        found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
        for cell, rows in self.cells.items():
            found.setdefault(cell.turn, {})[cell.configuration] = rows
        yield from found.values()

    def _keep_others_out(self) -> None:
        """As long as this process lives, or the store."""
        assert self._lock is not None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                where=str(self.out),
                found="another run at work in it",
                expected="none",
                fix="wait for its end, or give another --out",
            ) from error

    def _load(self) -> None:
        path = self.out / ROWS_NAME
        with self.writing(path):
            lines = whole_lines(path)
        try:
            rows = [Row.from_dict(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                where=str(path), found=f"a line that is no row ({error})", expected="rows", fix="give another --out"
            ) from error
        for row in rows:
            # Slot 0 begins a cell anew.
            self.cells[row.cell] = [row] if row.slot == 0 else [*self.cells.get(row.cell, ()), row]
        # Of a batch that was cut off while it was written, nothing counts.
        self.cells = {cell: rows for cell, rows in self.cells.items() if len(rows) == cell.batch_size}

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Turn an error of the system into a `StoreError` that names the path."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                where=str(path),
                found=error.strerror or str(error),
                expected="to be able to write there",
                fix="free some space or correct --out, and give the same command again",
            ) from error
