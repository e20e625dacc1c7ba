"""Parameters of commands that reach no seam, and the tests that show their effects."""

from __future__ import annotations

SHOWN_ELSEWHERE = {
    "run": {
        "bundle": "test_text_goes_to_stdout_and_talk_to_stderr",
        "prompt": "test_prompt_from_stdin",
        "chat": "test_a_chat_goes_through_the_template",
        "system": "test_a_chat_goes_through_the_template",
        "as_json": "test_json_is_one_object_with_all_counts",
        "trace_out": "test_a_trace_has_the_experts_of_every_token_and_no_text",
    },
    "chat": {
        "bundle": "test_answers_go_to_stdout_and_talk_to_stderr",
        "system": "test_a_system_message_comes_first",
        "plain": "test_plain_ignores_the_template",
        "as_json": "test_a_turn_computes_only_what_is_new",
    },
    "generate": {
        "bundle": "test_prompts_of_unequal_length_are_continued_as_alone",
        "out": "test_prompts_of_unequal_length_are_continued_as_alone",
    },
    "eval": {
        "model": "test_a_16_bit_bundle_scores_what_the_checkpoint_scores",
        "per_item": "test_slots_change_nothing",
        "as_json": "test_a_16_bit_bundle_scores_what_the_checkpoint_scores",
    },
    "bench": {
        "bundle": "test_json_holds_all_of_it",
        "policies": "test_people_get_the_table_of_policies",
        "trace_out": "test_counts_are_those_of_the_run_that_was_recorded",
        "trace_little": "test_the_little_model_of_a_trace_must_be_there",
        "profile": "test_a_profile_divides_a_token_among_kernels_waiting_and_python",
        "as_json": "test_json_holds_all_of_it",
    },
    "tune": {
        "bundle": "test_the_file_lies_beside_the_bundle_and_is_used",
        "as_json": "test_weights_are_fitted_and_compared_on_other_traces",
    },
    "simulate": {
        "bundle": "test_counts_are_those_of_the_run_that_was_recorded",
        "trace_path": "test_counts_are_those_of_the_run_that_was_recorded",
        "as_json": "test_counts_are_those_of_the_run_that_was_recorded",
    },
    "compile": {"as_json": "test_json_is_the_content_of_quality_json"},
}
"""Command -> parameter that reaches no seam -> test of this folder that fails if the parameter has no effect."""
