//! Recycling: what is kept of buffers that are gone is mapped again, within a budget, and goes when it is to go; and what
//! somebody else may have is not kept.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod denied;
mod leaving;
mod reuse;

use cuvmm::{Options, Recycling, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{Backend, G};

use denied::*;
use leaving::*;
use reuse::*;

cuvmm_tests::suite!(
    a_chunk_that_is_kept_is_mapped_and_none_is_made,
    a_grow_takes_what_is_kept,
    only_a_chunk_of_exactly_that_size_is_taken_and_the_youngest_first,
    what_moved_is_kept_when_the_last_alias_goes,
    what_is_cut_off_is_kept,
    what_a_graph_had_is_kept_when_the_graph_is_gone,
    what_is_left_to_the_reaper_is_kept_when_its_work_is_over,
    a_chunk_of_another_resource_is_kept_by_that,
    the_budget_holds_and_the_oldest_go_first,
    a_chunk_that_is_too_old_is_released,
    trimming_releases_the_oldest_and_no_more_than_asked_for,
    trimming_goes_on_past_a_failure_and_tells_the_first,
    trimming_in_a_host_function_is_refused,
    where_memory_is_short_what_is_kept_goes_before_the_hook_is_asked,
    where_memory_is_short_what_other_resources_keep_goes_too,
    what_the_hook_frees_is_used_or_released,
    what_was_pending_is_used_where_memory_is_short,
    with_nothing_kept_a_shortage_takes_no_call_more,
    zeroed_memory_is_zero_also_where_it_is_recycled,
    memory_of_the_host_is_recycled_too,
    a_recycled_chunk_has_the_access_of_its_resource,
    a_chunk_that_can_not_be_mapped_is_kept_again,
    what_a_failed_allocation_made_is_not_kept,
    what_could_not_be_unmapped_is_not_kept,
    a_resource_that_is_gone_keeps_nothing,
    closing_a_resource_releases_what_it_keeps,
    threads_share_what_is_kept,
    no_grow_releases_memory,
    memory_that_can_be_shared_is_refused_unless_it_is_opted_in,
    memory_that_network_cards_reach_is_refused_unless_it_is_opted_in,
    memory_that_was_exported_is_not,
    memory_whose_export_was_attempted_is_not,
    memory_that_a_dma_buf_was_asked_for_is_not,
    memory_that_was_imported_is_not,
    memory_that_is_wrapped_is_not_while_it_is,
    memory_that_was_wrapped_and_exported_is_not,
    memory_that_is_taken_over_is_not,
    memory_that_others_made_is_not,
    memory_that_somebody_has_a_share_of_is_not,
    options_that_keep_nothing_are_refused,
);

cuvmm_tests::suite!(two gpus: a_recycled_chunk_has_the_access_of_its_resources_peers);

/// More than any test here keeps.
const BUDGET: usize = 64 * G;

fn options() -> Options {
    Options::new().release(Release::Caller).recycling(Recycling::up_to(BUDGET))
}

fn recycling(backend: &Backend) -> VirtualMemoryResource {
    backend.resource_with(options())
}

fn kept(resource: &VirtualMemoryResource) -> usize {
    resource.statistics().kept.now
}

/// The driver's names of a buffer's chunks.
fn handles(buffer: &VirtualMemoryBuffer) -> Vec<u64> {
    buffer.mappings().iter().map(|mapping| mapping.allocation().handle().0).collect()
}

/// Makes a buffer of one chunk and closes it, and tells the chunk's name.
fn keep(resource: &VirtualMemoryResource, size: usize) -> u64 {
    let buffer = resource.allocate(size).unwrap();
    let handle = handles(&buffer)[0];
    buffer.close().unwrap();
    handle
}
