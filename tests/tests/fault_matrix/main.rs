//! The fault matrix: every driver call of every operation, on each of its paths, failed with each code that the driver may
//! answer, before its effect and after it. `cargo test -p cuvmm-tests --test fault_matrix -- --nocapture` shows the counts.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod allocate;
mod close;
mod construct;
mod foreign;
mod graphs;
mod grow;
mod peers;
mod share;
mod shrink;

use std::time::{Duration, Instant};

use cuvmm::{OnDrop, Options, Recycling, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::matrix::{Scene, fail_every_call};
use cuvmm_tests::{Backend, G, occupy_behind};

cuvmm_tests::suite!(
    every_failing_call_of_making_a_resource_is_told_and_leaves_nothing,
    every_failing_call_of_allocating_is_told_and_leaves_nothing,
    every_failing_call_of_growing_is_told_and_leaves_the_buffer_as_it_was,
    every_failing_call_of_shrinking_is_told_and_leaves_a_buffer,
    every_failing_call_of_sharing_is_told_and_leaves_nothing,
    every_failing_call_of_closing_is_told_and_strands_what_it_would_have_undone,
    every_failing_call_of_giving_memory_to_a_graph_is_told_and_leaves_the_buffer_as_it_was,
    every_failing_call_about_ranges_of_others_is_told_and_leaves_them_theirs,
);

cuvmm_tests::suite!(two gpus: every_failing_call_about_peers_is_told_and_leaves_what_was);

fn every_failing_call_about_peers_is_told_and_leaves_what_was(backend: &Backend) {
    fail_every_call(backend, peers::ROWS);
}

fn every_failing_call_of_making_a_resource_is_told_and_leaves_nothing(backend: &Backend) {
    fail_every_call(backend, construct::ROWS);
}

fn every_failing_call_of_allocating_is_told_and_leaves_nothing(backend: &Backend) {
    fail_every_call(backend, allocate::ROWS);
}

fn every_failing_call_of_growing_is_told_and_leaves_the_buffer_as_it_was(backend: &Backend) {
    fail_every_call(backend, grow::ROWS);
}

fn every_failing_call_of_shrinking_is_told_and_leaves_a_buffer(backend: &Backend) {
    fail_every_call(backend, shrink::ROWS);
}

fn every_failing_call_of_sharing_is_told_and_leaves_nothing(backend: &Backend) {
    fail_every_call(backend, share::ROWS);
}

fn every_failing_call_of_giving_memory_to_a_graph_is_told_and_leaves_the_buffer_as_it_was(backend: &Backend) {
    fail_every_call(backend, graphs::ROWS);
}

fn every_failing_call_about_ranges_of_others_is_told_and_leaves_them_theirs(backend: &Backend) {
    fail_every_call(backend, foreign::ROWS);
}

fn every_failing_call_of_closing_is_told_and_strands_what_it_would_have_undone(backend: &Backend) {
    fail_every_call(backend, close::ROWS);
}

/// A buffer of `chunks` chunks of one granule, with capacity for `capacity` bytes.
fn chunked(backend: &Backend, chunks: usize, capacity: usize) -> VirtualMemoryBuffer {
    chunked_of(&backend.resource(), chunks, capacity)
}

/// As [`chunked`], of a resource that leaves to another thread whatever a drop would wait for.
fn deferring(backend: &Backend, chunks: usize, capacity: usize) -> VirtualMemoryBuffer {
    chunked_of(&backend.resource_with(Options::new().on_drop(OnDrop::Defer)), chunks, capacity)
}

/// A resource that keeps so many granules, and has kept a chunk of each of these sizes, in granules.
fn keeping(backend: &Backend, granules: usize, kept: &[usize]) -> VirtualMemoryResource {
    let options = Options::new().max_chunk(2 * G).release(Release::Caller).recycling(Recycling::up_to(granules * G));
    let resource = backend.resource_with(options);
    let buffers: Vec<_> = kept.iter().map(|granules| resource.allocate(granules * G).unwrap()).collect();
    buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
    assert_eq!(resource.statistics().kept.now, kept.iter().sum::<usize>() * G);
    resource
}

fn chunked_of(resource: &VirtualMemoryResource, chunks: usize, capacity: usize) -> VirtualMemoryBuffer {
    let mut buffer = resource.allocate_with_capacity(G, capacity).unwrap();
    for chunk in 1..chunks {
        buffer = buffer.grow_into((chunk + 1) * G).unwrap();
    }
    assert_eq!(buffer.chunks().len(), chunks);
    buffer
}

/// Waits for what was left to another thread, if anything was.
fn drain(scene: &Scene) {
    scene.resource.drain(Instant::now() + Duration::from_secs(30)).expect("nothing that stays pending");
}

/// A scene whose buffer waits for nothing, so that closing or cutting it tears down and no more.
fn unattended(buffer: VirtualMemoryBuffer) -> Scene {
    buffer.set_release(Release::Caller).unwrap();
    Scene::of(buffer)
}

/// A scene whose buffer has the addresses behind it occupied.
fn enclosed(buffer: VirtualMemoryBuffer) -> Scene {
    let mut scene = Scene::of(buffer);
    scene.occupied = occupy_behind(scene.buffer());
    scene
}
