"""Arguments and options that are paths, said once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

PATH = click.Path(path_type=Path)
bundle_argument = click.argument("bundle", type=PATH)
file_option = partial(click.option, type=PATH, metavar="FILE")
