//! No unmap under queued work: closing and dropping wait for what they are to wait for, and for nothing else.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;

use cuvmm::{Call, Options, Outcome, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{Backend, Current, G, Gate, ROOM, Stream, is_idle, occupy_behind, queue_fill, steps};

cuvmm_tests::suite!(
    closing_waits_for_the_release_stream,
    dropping_waits_for_the_release_stream,
    closing_on_a_stream_waits_for_that_one,
    closing_on_a_stream_does_not_wait_for_the_release_stream,
    a_grow_into_that_moves_waits_for_the_release_stream,
    a_grow_into_in_place_waits_for_nothing,
    a_grow_waits_for_nothing,
    an_alias_waits_for_its_own_work_also_while_another_maps_the_memory,
    what_is_grown_inherits_the_release_stream,
    the_release_stream_of_the_options_is_waited_for,
    the_default_stream_is_waited_for_and_blocking_streams_with_it,
    the_default_stream_by_its_token_counts_as_none_given,
    a_fence_waits_for_what_was_queued_on_another_stream,
    a_later_fence_on_a_stream_covers_the_earlier_one,
    fences_on_several_streams_are_all_waited_for,
    a_fence_does_not_wait_for_what_comes_after_it,
    fences_go_with_the_buffer_that_grows_in_place,
    release_by_the_caller_waits_for_nothing,
    a_copy_on_a_stream_comes_after_what_is_queued_there,
    copies_without_a_stream_wait_for_no_other,
    other_buffers_come_and_go_while_a_stream_is_held_up,
    closing_leaves_the_streams_usable,
    a_stream_of_somebody_elses_lives_as_long_as_the_buffer,
    nothing_waits_for_a_whole_context,
);

/// A buffer whose release stream is held up with a fill of the buffer behind the gate.
fn held(backend: &Backend) -> (VirtualMemoryBuffer, StreamRef, Gate) {
    let buffer = backend.resource().allocate(G).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let gate = hold(&stream, &buffer);
    (buffer, stream, gate)
}

/// Holds a stream up, with a fill of the buffer behind the gate.
fn hold(stream: &StreamRef, buffer: &VirtualMemoryBuffer) -> Gate {
    let gate = Gate::close(stream);
    queue_fill(stream, buffer, 0x11);
    gate
}

/// Demands that work on the stream ended well, and that it takes more.
#[track_caller]
fn require_healthy(backend: &Backend, stream: &StreamRef) {
    stream.synchronize().unwrap();
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.fill_on(stream, 0, G, 0x42).unwrap();
    let mut seen = [0; 16];
    buffer.copy_to_host_on(stream, G - 16, &mut seen).unwrap();
    assert_eq!(seen, [0x42; 16]);
    buffer.close().unwrap();
}

fn closing_waits_for_the_release_stream(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    gate.require_wait(&stream, || buffer.close()).unwrap();
    require_healthy(backend, &stream);
}

fn dropping_waits_for_the_release_stream(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    gate.require_wait(&stream, || drop(buffer));
    require_healthy(backend, &stream);
}

fn closing_on_a_stream_waits_for_that_one(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let gate = hold(&stream, &buffer);
    gate.require_wait(&stream, || buffer.close_on(&stream)).unwrap();
    require_healthy(backend, &stream);
}

fn closing_on_a_stream_does_not_wait_for_the_release_stream(backend: &Backend) {
    let (release, instead) = (Stream::non_blocking(&backend.device), Stream::non_blocking(&backend.device));
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Stream(release.clone())).unwrap();
    let gate = Gate::close(&release);
    queue_fill(&instead, &buffer, 1);
    buffer.close_on(&instead).unwrap();
    assert!(!is_idle(&release));
    gate.open();
    require_healthy(backend, &release);
}

fn a_grow_into_that_moves_waits_for_the_release_stream(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    let occupied = occupy_behind(&buffer);
    let moved = gate.require_wait(&stream, || buffer.grow_into(ROOM + G)).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    let mut seen = [0; 16];
    moved.copy_to_host(G - 16, &mut seen).unwrap();
    assert_eq!(seen, [0x11; 16], "what was queued on the old addresses is there");
    moved.close().unwrap();
    require_healthy(backend, &stream);
}

fn a_grow_into_in_place_waits_for_nothing(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    let grown = buffer.grow_into(2 * G).unwrap();
    assert_eq!(grown.outcome(), Some(Outcome::InPlace));
    assert!(!is_idle(&stream));
    // What the old one was to wait for, the new one does.
    gate.require_wait(&stream, || grown.close()).unwrap();
    require_healthy(backend, &stream);
}

fn a_grow_waits_for_nothing(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    let in_place = buffer.grow(2 * G).unwrap();
    let moved = buffer.grow(3 * G).unwrap();
    assert_eq!((in_place.outcome(), moved.outcome()), (Some(Outcome::InPlace), Some(Outcome::Moved)));
    assert!(!is_idle(&stream));
    gate.open();
    stream.synchronize().unwrap();
    let mut seen = [0; 16];
    moved.copy_to_host(0, &mut seen).unwrap();
    assert_eq!(seen, [0x11; 16]);
    for buffer in [buffer, moved, in_place] {
        buffer.close().unwrap();
    }
}

fn an_alias_waits_for_its_own_work_also_while_another_maps_the_memory(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let alias = buffer.grow(G).unwrap();
    alias.set_release(Release::Stream(stream.clone())).unwrap();
    let gate = hold(&stream, &alias);
    gate.require_wait(&stream, || drop(alias));
    // So nothing is left to wait for when the other one unmaps.
    buffer.close().unwrap();
    require_healthy(backend, &stream);
}

fn what_is_grown_inherits_the_release_stream(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let covered = buffer.grow(1).unwrap();
    let in_place = buffer.grow(2 * G).unwrap();
    let moved = buffer.grow(2 * G).unwrap();
    for grown in [covered, in_place, moved] {
        assert!(matches!(grown.released_after(), Release::Stream(of) if of == stream));
        let gate = hold(&stream, &grown);
        gate.require_wait(&stream, || grown.close()).unwrap();
    }
    buffer.close().unwrap();
}

fn the_release_stream_of_the_options_is_waited_for(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let options = Options::new().release(Release::Stream(stream.clone()));
    let resource = VirtualMemoryResource::new(&backend.device, options).unwrap();
    let buffer = resource.allocate(G).unwrap();
    let gate = hold(&stream, &buffer);
    gate.require_wait(&stream, || buffer.close()).unwrap();
}

fn the_default_stream_is_waited_for_and_blocking_streams_with_it(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    assert!(matches!(buffer.released_after(), Release::DefaultStream));
    let stream = Stream::blocking(&backend.device);
    let gate = hold(&stream, &buffer);
    gate.require_wait(&stream, || buffer.close()).unwrap();
    require_healthy(backend, &stream);
}

fn the_default_stream_by_its_token_counts_as_none_given(backend: &Backend) {
    let stream = Stream::blocking(&backend.device);
    for token in Stream::tokens(&backend.driver) {
        assert!(token.is_default());
        let buffer = backend.resource().allocate(G).unwrap();
        buffer.set_release(Release::Stream(token.clone())).unwrap();
        let gate = hold(&stream, &buffer);
        gate.require_wait(&stream, || buffer.close()).unwrap();
        let buffer = backend.resource().allocate(G).unwrap();
        let gate = hold(&stream, &buffer);
        gate.require_wait(&stream, || buffer.close_on(&token)).unwrap();
    }
}

fn a_fence_waits_for_what_was_queued_on_another_stream(backend: &Backend) {
    for release in [Release::Caller, Release::DefaultStream, Release::Stream(Stream::non_blocking(&backend.device))] {
        let buffer = backend.resource().allocate(G).unwrap();
        buffer.set_release(release).unwrap();
        let stream = Stream::non_blocking(&backend.device);
        let gate = hold(&stream, &buffer);
        buffer.fence(&stream).unwrap();
        gate.require_wait(&stream, || buffer.close()).unwrap();
        require_healthy(backend, &stream);
    }
}

fn a_later_fence_on_a_stream_covers_the_earlier_one(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    queue_fill(&stream, &buffer, 1);
    buffer.fence(&stream).unwrap();
    stream.synchronize().unwrap();
    let gate = hold(&stream, &buffer);
    let mark = backend.mark();
    buffer.fence(&stream).unwrap();
    // No event more than before.
    backend.require_unchanged(&mark);
    gate.require_wait(&stream, || buffer.close()).unwrap();
}

fn fences_on_several_streams_are_all_waited_for(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let streams: Vec<StreamRef> = (0..4).map(|_| Stream::non_blocking(&backend.device)).collect();
    let gates: Vec<Gate> = streams.iter().map(|stream| hold(stream, &buffer)).collect();
    for stream in &streams {
        buffer.fence(stream).unwrap();
    }
    // The one that is waited for last is let go of first.
    thread::scope(|scope| {
        scope.spawn(|| {
            for gate in gates.iter().rev() {
                thread::sleep(std::time::Duration::from_millis(10));
                gate.open();
            }
        });
        buffer.close().unwrap();
        assert!(streams.iter().all(is_idle));
    });
}

fn a_fence_does_not_wait_for_what_comes_after_it(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    queue_fill(&stream, &buffer, 1);
    buffer.fence(&stream).unwrap();
    let gate = Gate::close(&stream);
    buffer.close().unwrap();
    assert!(!is_idle(&stream));
    gate.open();
    stream.synchronize().unwrap();
}

fn fences_go_with_the_buffer_that_grows_in_place(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let gate = hold(&stream, &buffer);
    buffer.fence(&stream).unwrap();
    let grown = buffer.grow_into(2 * G).unwrap();
    assert!(!is_idle(&stream));
    gate.require_wait(&stream, || grown.close()).unwrap();
}

fn release_by_the_caller_waits_for_nothing(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let (blocking, other) = (Stream::blocking(&backend.device), Stream::non_blocking(&backend.device));
    let gates = [Gate::close(&blocking), Gate::close(&other)];
    buffer.close().unwrap();
    assert!(!is_idle(&blocking) && !is_idle(&other));
    drop(gates);
    blocking.synchronize().unwrap();
    other.synchronize().unwrap();
}

fn a_copy_on_a_stream_comes_after_what_is_queued_there(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    let mut seen = [0; 16];
    gate.require_wait(&stream, || buffer.copy_to_host_on(&stream, 0, &mut seen)).unwrap();
    assert_eq!(seen, [0x11; 16]);
    let gate = hold(&stream, &buffer);
    gate.require_wait(&stream, || buffer.copy_from_host_on(&stream, 0, &[0x22; 16])).unwrap();
    let gate = Gate::close(&stream);
    gate.require_wait(&stream, || buffer.fill_on(&stream, 4, 4, 0x33)).unwrap();
    buffer.copy_to_host(0, &mut seen).unwrap();
    assert_eq!(seen[..8], [0x22, 0x22, 0x22, 0x22, 0x33, 0x33, 0x33, 0x33]);
    buffer.close().unwrap();
}

fn copies_without_a_stream_wait_for_no_other(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    let (blocking, other) = (Stream::blocking(&backend.device), Stream::non_blocking(&backend.device));
    let gates = [Gate::close(&blocking), Gate::close(&other)];
    buffer.fill(0, G, 0x44).unwrap();
    let mut seen = [0; 16];
    buffer.copy_to_host(0, &mut seen).unwrap();
    assert_eq!(seen, [0x44; 16]);
    assert!(!is_idle(&blocking) && !is_idle(&other));
    drop(gates);
    buffer.close().unwrap();
}

fn other_buffers_come_and_go_while_a_stream_is_held_up(backend: &Backend) {
    let (buffer, stream, gate) = held(backend);
    let resource = backend.resource();
    let own = Stream::non_blocking(&backend.device);
    for _ in 0..50 {
        let other = resource.allocate(G).unwrap();
        other.set_release(Release::Stream(own.clone())).unwrap();
        let grown = other.grow_into(2 * G).unwrap();
        grown.fill_on(&own, 0, 2 * G, 1).unwrap();
        grown.close().unwrap();
    }
    assert!(!is_idle(&stream));
    gate.open();
    stream.synchronize().unwrap();
    let mut seen = [0; 16];
    buffer.copy_to_host(0, &mut seen).unwrap();
    assert_eq!(seen, [0x11; 16]);
    buffer.close().unwrap();
}

fn closing_leaves_the_streams_usable(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    for round in 0..20 {
        let buffer = backend.resource().allocate(G).unwrap();
        buffer.set_release(Release::Stream(stream.clone())).unwrap();
        queue_fill(&stream, &buffer, round);
        if round % 2 == 0 {
            drop(buffer);
        } else {
            buffer.close().unwrap();
        }
    }
    require_healthy(backend, &stream);
}

fn a_stream_of_somebody_elses_lives_as_long_as_the_buffer(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let other = Stream::non_blocking(&backend.device);
    buffer.fence(&other).unwrap();
    queue_fill(&stream, &buffer, 1);
    drop((stream, other));
    assert_eq!(backend.live().streams, 2);
    buffer.close().unwrap();
    assert_eq!(backend.live().streams, 0);
}

fn nothing_waits_for_a_whole_context(backend: &Backend) {
    let _current = Current::push(&backend.device);
    let stream = Stream::blocking(&backend.device);
    let (steps, ()) = steps(backend, || {
        let buffer = backend.resource().allocate(G).unwrap();
        buffer.fill(0, G, 1).unwrap();
        buffer.fill_on(&stream, 0, G, 1).unwrap();
        buffer.fence(&stream).unwrap();
        let grown = buffer.grow(2 * G).unwrap();
        grown.copy_to_host(0, &mut [0; 4]).unwrap();
        let moved = buffer.grow_into(4 * G).unwrap();
        moved.close().unwrap();
        drop(grown);
    });
    let forbidden = [
        Call::cuCtxSynchronize,
        Call::cuMemcpyHtoD,
        Call::cuMemcpyDtoH,
        Call::cuMemcpyDtoD,
        Call::cuMemsetD8,
        Call::cuMemAlloc,
        Call::cuCtxSetCurrent,
    ];
    for step in steps {
        assert!(!forbidden.contains(&step.call), "{step:?}");
    }
}
