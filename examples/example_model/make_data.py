"""Write the splits: ``python -m example_model.make_data [FOLDER]``."""

import json
import sys
from pathlib import Path

from example_model.items import FIELDS, splits

DATA = Path(__file__).parents[1] / "data"


def write_splits(folder: Path) -> None:
    """Write ``FOLDER/TASK/SPLIT.jsonl``, one item per line."""
    for task in FIELDS:
        (folder / task).mkdir(parents=True, exist_ok=True)
        for name, items in splits(task).items():
            lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
            (folder / task / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write_splits(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
