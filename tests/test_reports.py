"""Failures that others reported of readers of checkpoints, by row of the collection; each is shown by tests here.

The collection itself is not part of the project: what checks the table against it skips where it is missing.
"""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COLLECTION = HERE.parents[1] / "shared" / "cases" / "reports.md"

#: row -> the tests that show it, "file:test"
SHOWN = {
    # NVFP4 without its global scale
    "A1": [
        "reported_files:an_expert_travels_with_its_global_scale_and_one_that_lost_it_is_named_at_open",
        "layout:an_expert_that_lacks_a_tensor_of_its_siblings_is_named",
    ],
    # names of scales
    "A2": ["reported_files:a_scale_is_found_under_each_of_its_names_and_float8_without_one_is_bytes"],
    # one key twice
    "A3": [
        "reported_files:an_expert_that_a_header_names_twice_is_a_duplicate_key",
        "safetensors:a_key_twice_with_two_meanings_is_called_a_duplicate_key",
    ],
    # overlaps, aliases, holes
    "A4": ["reported_files:every_byte_has_one_owner_whatever_the_order_of_the_names"],
    # cut files
    "A6": [
        "reported_files:a_file_that_was_cut_is_refused_at_open_with_what_it_needs_and_has",
        "gguf:a_file_cut_anywhere_is_refused_at_once",
    ],
    # bytes after the data
    "A7": ["reported_files:bytes_after_the_last_tensor_are_refused_by_every_way_in"],
    # no elements
    "A8": ["reported_files:tensors_of_no_elements_are_listed_and_nothing_is_read_for_them"],
    # lengths of headers
    "A9": [
        "safetensors:no_probe_size_is_special",
        "safetensors:a_file_that_is_something_else_is_called_by_its_name",
        "safetensors:a_length_that_the_file_does_not_have_allocates_nothing",
        "safetensors:a_header_above_the_limit_is_refused_with_the_limit",
    ],
    # data on an odd byte
    "A11": ["reported_files:experts_that_begin_on_an_odd_byte_arrive_aligned_and_whole"],
    # types that NumPy lacks
    "A12": [
        "reported_files:every_stored_type_has_its_carrier_and_one_that_nobody_knows_is_refused_only_in_use",
        "layout:an_expert_tensor_of_an_unknown_dtype_has_bytes_and_no_view",
    ],
    # an index and its shards
    "A13": [
        "checkpoint_files:a_missing_shard_a_wrong_shard_and_a_ghost_are_three_different_errors",
        "reported_files:an_index_is_held_against_headers_alone",
    ],
    # files that the index omits
    "A15": ["reported_files:experts_come_from_the_files_of_the_index_and_the_others_open_by_their_path"],
    # names that lead out of the directory
    "A16": [
        "checkpoint_files:an_index_that_leads_out_of_its_directory_is_refused_before_anything_is_opened",
        "checkpoint_files:symbolic_links_out_of_the_directory_are_how_the_hub_cache_looks",
    ],
    # which way round fused experts are
    "A18": ["reported_layouts:orientation_and_interleaving_come_from_the_family_never_from_sizes"],
    # one layout per layer
    "A19": ["reported_layouts:each_layer_has_its_own_layout_and_draft_and_shared_experts_are_not_routed_to"],
    # an expert in two shards
    "A20": ["reported_layouts:an_expert_in_two_files_appears_whole_or_not_at_all"],
    # gate and up merged
    "A22": [
        "reported_layouts:gate_and_up_swapped_are_another_model",
        "gguf_layout:merged_fused_and_per_expert_tensors_of_the_same_weights_give_the_same_bits",
    ],
    # tensors per expert and merged ones
    "A23": ["reported_layouts:tensors_per_expert_and_merged_ones_hold_the_same_bytes_and_never_meet_in_one_layer"],
    # alignment
    "A24": [
        "reported_layouts:experts_are_found_at_every_alignment_whatever_the_length_of_the_metadata",
        "reported_layouts:a_tensor_whose_size_nearly_overflows_is_refused",
        "gguf:data_begins_at_the_alignment_that_the_file_says",
        "gguf:a_broken_header_is_refused_and_nothing_large_is_allocated",
    ],
    # byte order and versions
    "A26": [
        "gguf:a_broken_header_is_refused_and_nothing_large_is_allocated",
        "gguf:data_begins_at_the_alignment_that_the_file_says",
    ],
    # the first tensor
    "A27": [
        "reported_layouts:the_first_tensor_of_a_file_may_be_an_expert",
        "gguf_layout:plain_experts_have_plain_labels_and_the_first_tensor_is_one_of_them",
    ],
    # a thousand experts
    "A28": ["reported_layouts:each_of_a_thousand_experts_has_its_own_bytes_and_a_trace_keeps_their_numbers"],
}


def test_every_row_about_parsing_and_layout_is_in_the_table():
    if not COLLECTION.is_file():
        pytest.skip(f"the collection of reports is not here: {COLLECTION}")
    rows = re.findall(r"^\|\s*(A\d+)\s*\|", COLLECTION.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 0
    assert list(SHOWN) == rows


@pytest.mark.parametrize("row", SHOWN)
def test_the_tests_that_the_table_names_are_there(row):
    assert SHOWN[row]
    for each in SHOWN[row]:
        file, test = each.split(":")
        tree = ast.parse((HERE / f"test_{file}.py").read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert f"test_{test}" in names, each
