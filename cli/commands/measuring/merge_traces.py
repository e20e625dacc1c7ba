"""`moec merge-traces`: many routing traces into one popularity file for `moec compile --popularity`."""

from __future__ import annotations

from pathlib import Path

import click

from moec.manifests.files.output_file import write_output

from ...options.paths import PATH, json_option, output_option
from ...terminal import output
from ...terminal.progress_bar import ProgressBar

_MOST_NAMED = 8


@click.command("merge-traces", short_help="Merge traces of devices for `compile --popularity`.")
@click.argument("traces", nargs=-1, required=True, type=PATH, metavar="TRACE...")
@output_option("-o", "--output", "target_path", required=True, help="The popularity file.")
@json_option
def merge_traces_command(traces: tuple[Path, ...], target_path: Path, as_json: bool) -> None:
    """Merge routing traces of `moec run --trace-out` into one popularity file.

    The file counts how often tokens use each expert, over all devices. Each trace counts by its tokens. It also has
    routes of single tokens, without their order. It has no text and no tokens. Nothing is sent anywhere.

    All traces must be of one model. Their bundles may differ.

    \b
    moec run mixtral-moec --prompt - --trace-out 1.trace
    moec merge-traces *.trace -o fleet.popularity
    moec compile mixtral --loss 2% --data gsm8k/ --popularity fleet.popularity
    """
    from moec.manifests.expert_use import encode_use
    from moec.runtime.trace.merging import merge_traces

    with ProgressBar("merging traces") as progress:
        use = merge_traces(traces, progress)
    write_output(target_path, encode_use(use))
    missing = [f"{layer}.{expert}" for layer, expert in use.never_offered()]
    if as_json:
        facts = {"architecture": use.architecture, "traces": use.traces, "tokens": use.decoded_tokens}
        output.data_json({**facts, "never_offered": missing, "has_routes": bool(use.routes)})
        return
    traced = "1 trace" if use.traces == 1 else f"{use.traces} traces"
    output.say(f"merged {traced} of {use.decoded_tokens:,} tokens into `{target_path}`")
    if missing:
        named = ", ".join(missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        output.say(f"no traced bundle holds the experts {named}{more}: a compile takes their use from calibration")
    if not use.routes:
        output.say("every traced bundle leaves experts out: a compile takes activation paths from calibration")
