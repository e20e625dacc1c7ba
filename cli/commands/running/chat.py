"""`moec chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import OptionError

from ...chat.conversation import AnswerOptions, Conversation, chat_template
from ...chat.session import ChatSession, MessageReader
from ...lossy_modes.mode_costs import say_mode_cost
from ...lossy_modes.mode_sweep import say_decisions
from ...options.opening import open_engine, verdict_of
from ...options.paths import bundle_argument, json_option
from ...options.prompts import prompt_limit_bytes
from ...options.runtime_options import build_options, runtime_options
from ...options.sampling_options import chosen_sampling, recommended_sampling_options
from ...terminal import output
from ...terminal.help_sections import SectionCommand

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.text.sampling import SamplingOptions

_WITHOUT_TEMPLATE = "no chat template: the model continues the text as it is written"


@click.command("chat", cls=SectionCommand, short_help="Talk to a model in the terminal.")
@bundle_argument
@click.option("--max-new-tokens", type=int, default=512, show_default=True, metavar="N", help="Cut an answer here.")
@recommended_sampling_options
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@click.option("--plain", is_flag=True, help="Use no chat template: the model continues the text as it is written.")
@json_option
@runtime_options
def chat_command(
    bundle: Path,
    max_new_tokens: int,
    stop: tuple[str, ...],
    system: str | None,
    plain: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Talk to the bundle in folder BUNDLE. Each line is a message, and /help lists the commands.

    Answers go to stdout, everything else to stderr. Ctrl-C stops an answer. The next answer computes only what is new
    in the conversation, and its text is that of a run that computes everything. Tokens are drawn as the bundle's
    generation_config.json recommends; `--temperature 0` takes the likeliest ones. An answer ends when its last 64 or
    more tokens repeat at most 32 tokens, 8 times or more. A bundle without a chat template continues the text as it is
    written. If stdin is no terminal, each line of it is answered in turn.

    \b
    moec chat mixtral-moec --memory 2GiB --system "Answer in one sentence."
    printf 'Name a colour.\\nAnd another one.\\n' | moec chat mixtral-moec --json
    """
    if max_new_tokens < 1:
        raise OptionError(f"`--max-new-tokens` must be at least 1, found {max_new_tokens}", "leave it out for 512")
    options = build_options(values, bundle=bundle)
    conversations = list[Conversation]()
    samplings: list[tuple[SamplingOptions, str]] = []

    def prepare(opened: Bundle) -> None:
        template = None if plain else chat_template(opened, options.verify)
        conversations.append(Conversation(template, system))
        samplings.append(chosen_sampling(opened, options.verify, values))

    with open_engine(bundle, options, values["kernels"], prepare) as engine:
        output.say(engine.mode)
        if verdict := verdict_of(bundle):
            output.say(f"verdict: {verdict}")
        ((sampling, said),) = samplings
        output.say(said)
        say_mode_cost(bundle, engine)
        (conversation,) = conversations
        reader = MessageReader(prompt_limit_bytes(engine.memory.context))
        if conversation.template is None:
            output.say(_WITHOUT_TEMPLATE)
        if reader.is_terminal:
            output.say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
        answers = AnswerOptions(max_new_tokens, sampling, stop)
        ChatSession(engine, conversation, reader, answers, bundle.resolve().name, as_json).run()
        say_decisions(engine)
