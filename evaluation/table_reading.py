"""Read Parquet or Arrow files as lines of JSON. Runs in a process of its own, see `table_files.py`.

Bytes on disk do not bound what a table takes in memory: pages are compressed, and values are repeated by a count.
The system's limit bounds the memory of this process.

Arguments:
folder: the folder that holds the package pyarrow.
form: `parquet` or `arrow`.
fields: the needed fields as a JSON list.
memory_bytes: the address space of reading, in addition to interpreter and pyarrow.
max_rows: the most rows of a file.
files: the files.
A line of the output is a list of the file's index and a row. The last line is a text, which is empty without an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

BATCH_ROWS = 256
_ERROR_CHARACTERS = 200


def main(folder: str, form: str, fields: str, memory_bytes: str, max_rows: str, *files: str) -> None:
    """Write the rows of all files."""
    sys.path.append(folder)
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    limit_memory(int(memory_bytes))
    wanted = set(json.loads(fields))
    try:
        for index, file in enumerate(files):
            batches = (
                parquet_batches(pyarrow.parquet, file, wanted, int(max_rows))
                if form == "parquet"
                else arrow_batches(pyarrow, file)
            )
            for batch in batches:
                names = [name for name in batch.schema.names if not wanted or name in wanted]
                for row in batch.select(names).to_pylist():
                    # No task reads a value that JSON does not have, so its kind stands for it.
                    line = json.dumps(
                        [index, row], ensure_ascii=False, default=lambda value: {"kind": type(value).__name__}
                    )
                    sys.stdout.buffer.write(line.encode() + b"\n")
        end = ""
    except BrokenPipeError:
        return
    except MemoryError:
        end = f"it takes more than {int(memory_bytes) >> 20} MiB of memory"
    except Exception as error:  # pyarrow raises errors of many kinds
        end = (str(error).strip() or type(error).__name__).splitlines()[0][:_ERROR_CHARACTERS]
    sys.stdout.buffer.write(json.dumps(end).encode() + b"\n")
    sys.stdout.buffer.flush()


def parquet_batches(parquet: Any, file: str, wanted: set[str], max_rows: int) -> Iterator[Any]:
    """Yield some rows at a time. Pages are read one after another. Raises ValueError for too many rows."""
    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    if table.metadata.num_rows > max_rows:
        raise ValueError(f"it has {table.metadata.num_rows} rows, more than the limit of {max_rows}")
    columns = [name for name in table.schema_arrow.names if name in wanted]
    yield from table.iter_batches(BATCH_ROWS, columns=columns or None, use_threads=False)


def arrow_batches(pyarrow: Any, file: str) -> Iterator[Any]:
    """Yield the batches of a stream or of a file with a footer, cut into some rows at a time."""
    with pyarrow.memory_map(file) as source:
        try:
            batches: Iterator[Any] = iter(pyarrow.ipc.open_stream(source))
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space of this process, where the system can."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            in_use_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    limit_bytes = in_use_bytes + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
