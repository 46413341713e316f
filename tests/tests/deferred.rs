//! Deferred release: whoever drops a buffer waits for nothing and calls nothing, and what the buffer had goes once its work
//! is over.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use cuvmm::{Call, OnDrop, Options, Outcome, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_resource::Error;
use cuvmm_tests::{
    Backend, G, Gate, ROOM, Ranges, Stream, after, buffer_on, drain, is_idle, occupy_behind, queue_fill, require_marks,
    until, write_marks,
};

cuvmm_tests::suite!(
    dropping_makes_no_call_and_the_memory_stays_until_its_work_is_over,
    closing_deferred_makes_no_call_whatever_the_option_says,
    closing_waits_whatever_the_option_says,
    ten_closes_behind_a_held_up_stream_are_pending_until_it_goes_on,
    an_alias_keeps_the_memory,
    an_alias_that_is_pending_keeps_the_memory,
    addresses_without_memory_go_too,
    what_shares_no_stream_goes_meanwhile,
    a_fence_is_waited_for_as_well,
    what_is_left_by_a_grow_that_moves_goes_later,
    what_a_truncation_cuts_off_goes_later,
    aliases_of_one_memory_wait_as_one,
    draining_waits_for_what_other_threads_drop,
    nothing_pending_is_drained_without_a_call,
    closing_a_resource_waits_for_its_buffers,
    a_resource_may_go_before_its_buffers,
    buffers_of_several_resources_are_counted_apart,
);

fn deferring(backend: &Backend) -> VirtualMemoryResource {
    backend.resource_with(Options::new().on_drop(OnDrop::Defer))
}

fn mappings(backend: &Backend) -> usize {
    backend.ledger.live().mappings
}

/// Ends a buffer behind whose release stream work is queued by `end`, which must not call, and demands that its memory goes
/// when the work is over and not before.
#[track_caller]
fn require_deferred(backend: &Backend, resource: &VirtualMemoryResource, end: fn(VirtualMemoryBuffer)) {
    let stream = Stream::non_blocking(&backend.device);
    let buffer = buffer_on(resource, &stream);
    let gate = Gate::close(&stream);
    queue_fill(&stream, &buffer, 0x11);
    let ranges = Ranges::of(&buffer);
    backend.require_no_call_here(|| end(buffer));
    assert_eq!((resource.pending(), resource.statistics().pending), (1, 1));
    thread::sleep(Duration::from_millis(20));
    assert_eq!((mappings(backend), resource.pending(), is_idle(&stream)), (1, 1, false));
    gate.open();
    drain(resource);
    backend.require_gone(&ranges);
    stream.synchronize().unwrap();
}

fn dropping_makes_no_call_and_the_memory_stays_until_its_work_is_over(backend: &Backend) {
    require_deferred(backend, &deferring(backend), drop);
}

fn closing_deferred_makes_no_call_whatever_the_option_says(backend: &Backend) {
    for resource in [backend.resource(), deferring(backend)] {
        require_deferred(backend, &resource, VirtualMemoryBuffer::close_deferred);
    }
}

fn closing_waits_whatever_the_option_says(backend: &Backend) {
    let resource = deferring(backend);
    let stream = Stream::non_blocking(&backend.device);
    for within in [false, true] {
        let buffer = buffer_on(&resource, &stream);
        let gate = Gate::close(&stream);
        queue_fill(&stream, &buffer, 1);
        gate.require_wait(&stream, || match within {
            true => buffer.close_within(after(Duration::from_secs(30))),
            false => buffer.close(),
        })
        .unwrap();
        assert_eq!((mappings(backend), resource.pending()), (0, 0));
    }
}

fn ten_closes_behind_a_held_up_stream_are_pending_until_it_goes_on(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    let buffers: Vec<_> = (0..10).map(|_| buffer_on(&resource, &stream)).collect();
    let gate = Gate::close(&stream);
    buffers.iter().for_each(|buffer| queue_fill(&stream, buffer, 2));
    for (count, buffer) in (1..).zip(buffers) {
        buffer.close_deferred();
        assert_eq!(resource.pending(), count);
    }
    let statistics = resource.statistics();
    assert_eq!((statistics.buffers, statistics.pending, statistics.physical.now), (0, 10, 10 * G));
    // A deadline that has passed, and one that passes.
    for deadline in [after(Duration::ZERO), after(Duration::from_millis(30))] {
        assert_eq!(resource.drain(deadline), Err(Error::StillPending { buffers: 10 }));
    }
    assert_eq!(mappings(backend), 10);
    gate.open();
    drain(&resource);
    let statistics = resource.statistics();
    assert_eq!((statistics.pending, statistics.physical.now, statistics.reserved.now), (0, 0, 0));
    assert_eq!((mappings(backend), statistics.stranded), (0, 0));
    backend.require_all_gone();
}

fn an_alias_keeps_the_memory(backend: &Backend) {
    let resource = deferring(backend);
    let buffer = resource.allocate(G).unwrap();
    write_marks(&buffer, 3);
    let alias = buffer.grow(G).unwrap();
    assert_eq!(alias.outcome(), Some(Outcome::Covered));
    drop(buffer);
    // It goes, and the memory stays.
    drain(&resource);
    require_marks(&alias, 3, G);
    assert_eq!(mappings(backend), 1);
    drop(alias);
    drain(&resource);
    backend.require_all_gone();
}

fn an_alias_that_is_pending_keeps_the_memory(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    let buffer = resource.allocate(G).unwrap();
    let alias = buffer_alias_on(&buffer, &stream);
    let gate = Gate::close(&stream);
    queue_fill(&stream, &alias, 4);
    alias.close_deferred();
    // The last one that anybody has does not wait for the other's work, and does not take its memory.
    buffer.set_release(Release::Caller).unwrap();
    buffer.close().unwrap();
    assert_eq!((mappings(backend), resource.pending(), is_idle(&stream)), (1, 1, false));
    gate.open();
    drain(&resource);
    stream.synchronize().unwrap();
    backend.require_all_gone();
}

/// All of a buffer's memory once more, waiting for the stream.
fn buffer_alias_on(buffer: &VirtualMemoryBuffer, stream: &StreamRef) -> VirtualMemoryBuffer {
    let alias = buffer.grow(buffer.size()).unwrap();
    alias.set_release(Release::Stream(stream.clone())).unwrap();
    alias
}

fn addresses_without_memory_go_too(backend: &Backend) {
    let resource = deferring(backend);
    let buffer = resource.allocate_with_capacity(0, 2 * ROOM).unwrap();
    assert_eq!((buffer.size(), backend.ledger.live().reservations), (0, 1));
    backend.require_no_call_here(|| drop(buffer));
    drain(&resource);
    // One that has nothing at all leaves nothing to anybody.
    let empty = resource.allocate(0).unwrap();
    backend.require_no_call_here(|| empty.close_deferred());
    assert_eq!(resource.pending(), 0);
    // But for the last share of a stream, whose end is a call.
    let ends: [fn(VirtualMemoryBuffer); 2] = [drop, VirtualMemoryBuffer::close_deferred];
    for (resource, end) in [resource, backend.resource()].into_iter().zip(ends) {
        let empty = resource.allocate(0).unwrap();
        empty.set_release(Release::Stream(StreamRef::create(&backend.device).unwrap())).unwrap();
        backend.require_no_call_here(|| end(empty));
        assert_eq!(resource.pending(), 0);
        until("the stream is gone", || backend.live().streams == 0);
    }
    backend.require_all_gone();
}

fn what_shares_no_stream_goes_meanwhile(backend: &Backend) {
    let resource = deferring(backend);
    let (busy, idle) = (Stream::non_blocking(&backend.device), Stream::non_blocking(&backend.device));
    let held = buffer_on(&resource, &busy);
    let gate = Gate::close(&busy);
    queue_fill(&busy, &held, 5);
    drop(held);
    for _ in 0..5 {
        let free = buffer_on(&resource, &idle);
        queue_fill(&idle, &free, 6);
        drop(free);
    }
    until("the memory of the others is gone", || mappings(backend) == 1 && resource.pending() == 1);
    assert!(!is_idle(&busy));
    gate.open();
    drain(&resource);
}

fn a_fence_is_waited_for_as_well(backend: &Backend) {
    let resource = deferring(backend);
    let streams = [(); 3].map(|()| Stream::non_blocking(&backend.device));
    let buffer = buffer_on(&resource, &streams[0]);
    let gates = streams.each_ref().map(|stream| {
        let gate = Gate::close(stream);
        queue_fill(stream, &buffer, 7);
        gate
    });
    buffer.fence(&streams[1]).unwrap();
    buffer.fence(&streams[2]).unwrap();
    drop(buffer);
    for gate in &gates {
        assert_eq!(resource.drain(after(Duration::from_millis(10))), Err(Error::StillPending { buffers: 1 }));
        assert_eq!(mappings(backend), 1);
        gate.open();
    }
    drain(&resource);
    assert!(streams.iter().all(is_idle));
}

fn what_is_left_by_a_grow_that_moves_goes_later(backend: &Backend) {
    let resource = deferring(backend);
    let stream = Stream::non_blocking(&backend.device);
    let buffer = buffer_on(&resource, &stream);
    let occupied = occupy_behind(&buffer);
    let gate = Gate::close(&stream);
    queue_fill(&stream, &buffer, 0x22);
    let left = Ranges::of(&buffer);
    let moved = buffer.grow_into(ROOM + G).unwrap();
    assert_eq!((moved.outcome(), is_idle(&stream)), (Some(Outcome::Moved), false));
    // The old addresses, and all of the new.
    assert_eq!((mappings(backend), resource.pending()), (3, 1));
    gate.open();
    drain(&resource);
    drop(occupied);
    assert_eq!(mappings(backend), 2);
    backend.require_gone(&left);
    let mut seen = [0; 16];
    moved.copy_to_host(G - 16, &mut seen).unwrap();
    assert_eq!(seen, [0x22; 16], "what was queued on the old addresses is there");
    drop(moved);
    drain(&resource);
    backend.require_all_gone();
}

fn what_a_truncation_cuts_off_goes_later(backend: &Backend) {
    let resource = deferring(backend);
    let stream = Stream::non_blocking(&backend.device);
    let buffer = buffer_on(&resource, &stream).grow_into(2 * G).unwrap();
    let gate = Gate::close(&stream);
    queue_fill(&stream, &buffer, 0x33);
    let shorter = buffer.truncate_into(G).unwrap();
    assert_eq!((shorter.size(), is_idle(&stream)), (G, false));
    assert_eq!((mappings(backend), resource.pending()), (2, 1));
    gate.open();
    drain(&resource);
    assert_eq!(mappings(backend), 1);
    let mut seen = [0; 16];
    shorter.copy_to_host(G - 16, &mut seen).unwrap();
    assert_eq!(seen, [0x33; 16]);
    drop(shorter);
    drain(&resource);
    backend.require_all_gone();
}

/// How many events many aliases may keep alive: one for the release stream and one for each fenced one, and what is made
/// anew before the old is destroyed.
const FEW_EVENTS: usize = 4;

fn aliases_of_one_memory_wait_as_one(backend: &Backend) {
    const ALIASES: usize = 1000;
    let resource = deferring(backend);
    let (release, fenced) = (Stream::non_blocking(&backend.device), Stream::non_blocking(&backend.device));
    let buffer = buffer_on(&resource, &release);
    let gates = [Gate::close(&release), Gate::close(&fenced)];
    queue_fill(&release, &buffer, 8);
    queue_fill(&fenced, &buffer, 8);
    for index in 0..ALIASES {
        let alias = buffer_alias_on(&buffer, &release);
        if index % 10 == 0 {
            alias.fence(&fenced).unwrap();
        }
        drop(alias);
    }
    assert_eq!(resource.pending(), ALIASES);
    until("few events are left", || backend.ledger.live().events <= FEW_EVENTS);
    // It stays that way, and each is asked about no more often than one would be.
    thread::sleep(Duration::from_millis(20));
    let live = backend.ledger.live();
    assert!(live.events <= FEW_EVENTS, "{live:?}");
    assert_eq!((live.mappings, live.reservations, resource.pending()), (1, 1, ALIASES));
    drop(buffer);
    assert_eq!(resource.pending(), ALIASES + 1);
    drop(gates);
    drain(&resource);
    backend.require_all_gone();
}

fn draining_waits_for_what_other_threads_drop(backend: &Backend) {
    let resource = deferring(backend);
    // What was dropped by others meanwhile may be pending again.
    let drain_for_now = || resource.drain(after(Duration::from_secs(30))).unwrap();
    let work = || {
        let stream = Stream::non_blocking(&backend.device);
        for round in 0..40 {
            let buffer = buffer_on(&resource, &stream);
            queue_fill(&stream, &buffer, round);
            let alias = buffer_alias_on(&buffer, &stream);
            drop(buffer);
            alias.close_deferred();
            if round % 10 == 0 {
                drain_for_now();
            }
        }
    };
    thread::scope(|scope| {
        let threads = [(); 3].map(|()| scope.spawn(work));
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            drain_for_now();
            thread::yield_now();
        }
    });
    drain(&resource);
    assert_eq!((mappings(backend), backend.ledger.live().events), (0, 0));
    backend.require_all_gone();
}

fn nothing_pending_is_drained_without_a_call(backend: &Backend) {
    let resource = deferring(backend);
    backend.require_no_call(|| {
        assert_eq!(resource.pending(), 0);
        resource.drain(after(Duration::ZERO)).unwrap();
    });
    let stream = Stream::non_blocking(&backend.device);
    let buffer = buffer_on(&resource, &stream);
    let gate = Gate::close(&stream);
    drop(buffer);
    backend.require_no_call_here(|| {
        gate.open_after(Duration::from_millis(10), || drain(&resource));
    });
    // The thread that let go of it has nothing to ask any more.
    let total = backend.ledger.total();
    thread::sleep(Duration::from_millis(30));
    assert_eq!(backend.ledger.total(), total);
}

fn closing_a_resource_waits_for_its_buffers(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let resource = deferring(backend);
    let (held, again) = (buffer_on(&resource, &stream), resource.clone());
    let gate = Gate::close(&stream);
    drop(held);
    assert_eq!(resource.close(after(Duration::from_millis(10))), Err(Error::StillPending { buffers: 1 }));
    gate.open_after(Duration::from_millis(20), || again.close(after(Duration::from_secs(30)))).unwrap();
    assert!(is_idle(&stream));
    backend.require_all_gone();
}

fn a_resource_may_go_before_its_buffers(backend: &Backend) {
    let mark = backend.mark();
    // Many times: whoever is last must not be the thread that drops.
    for _ in 0..50 {
        let release = StreamRef::create(&backend.device).unwrap();
        let options = Options::new().on_drop(OnDrop::Defer).release(Release::Stream(release.clone()));
        let resource = backend.resource_with(options);
        let buffer = resource.allocate(G).unwrap();
        let covered = buffer.grow(G).unwrap();
        // A copy is queued on a stream of the resource's own.
        buffer.copy_from_host(0, &[9; 64]).unwrap();
        drop((resource, release));
        drop(covered);
        assert_eq!(backend.live().streams, 2);
        // With the last buffer goes the last share of both streams, whose end is a call.
        backend.require_no_call_here(|| drop(buffer));
        until("nothing is left", || {
            let live = backend.ledger.live();
            (live.streams, live.mappings, live.reservations, live.contexts) == (0, 0, 0, 0)
        });
    }
    backend.require_unchanged(&mark);
    backend.require_all_gone();
}

fn buffers_of_several_resources_are_counted_apart(backend: &Backend) {
    let (one, other) = (deferring(backend), deferring(backend));
    let stream = Stream::non_blocking(&backend.device);
    let (first, second) = (buffer_on(&one, &stream), buffer_on(&other, &stream));
    let third = buffer_on(&other, &stream);
    let gate = Gate::close(&stream);
    drop((first, second, third));
    assert_eq!((one.pending(), other.pending(), other.clone().pending()), (1, 2, 2));
    let calls = [Call::cuMemUnmap, Call::cuMemRelease].map(|call| backend.ledger.count(call));
    assert_eq!(calls, [0, 0]);
    gate.open();
    drain(&one);
    drain(&other);
    assert_eq!(backend.ledger.count(Call::cuMemUnmap), 3);
}
