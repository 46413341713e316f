//! Many grows, many chunks, many threads: what must not grow with their number, and what must not mix.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Barrier;
use std::thread;

use cuvmm::{CUresult, Call, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::When;
use cuvmm_sim::{Live, Machine, Simulator};
use cuvmm_tests::{Backend, G, Peer, ROOM, open_files, pattern, require_marks, steps, write_marks};

cuvmm_tests::suite!(
    a_thousand_grows_of_one_buffer_cost_the_same_calls_each,
    a_thousand_chunks_are_let_go_of_in_a_small_stack,
    a_thousand_aliases_of_one_buffer_cost_no_call,
    doubling_to_a_large_size_makes_few_chunks,
    copies_and_fills_cross_the_borders_of_chunks,
    thousands_of_rounds_leave_no_mapping_of_the_process_and_no_file,
    threads_that_grow_aliases_of_one_buffer_get_memory_of_their_own,
    threads_that_allocate_and_close_do_not_disturb_each_other,
    a_thread_whose_calls_fail_gets_its_own_error,
);

/// A little more than the stack that a thread needs for a few calls of the driver's.
const SMALL_STACK: usize = 256 << 10;

fn in_a_small_stack(work: impl FnOnce() + Send + 'static) {
    thread::Builder::new().stack_size(SMALL_STACK).spawn(work).unwrap().join().unwrap();
}

fn a_thousand_grows_of_one_buffer_cost_the_same_calls_each(backend: &Backend) {
    let mut buffers = vec![backend.resource().allocate_with_capacity(G, 1001 * G).unwrap()];
    buffers[0].set_release(Release::Caller).unwrap();
    write_marks(&buffers[0], 1);
    for round in 2..=1001 {
        let last = buffers.last().unwrap();
        let (steps, grown) = steps(backend, || last.grow(round * G).unwrap());
        let calls: Vec<Call> = steps.iter().map(|step| step.call).collect();
        assert_eq!(calls, [Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess], "round {round}");
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        buffers.push(grown);
    }
    let last = buffers.pop().unwrap();
    assert_eq!(last.chunks().len(), 1001);
    require_marks(&last, 1, G);
    // The shorter ones, of which none is the last over any memory.
    let before = backend.ledger.calls().len();
    for buffer in buffers {
        buffer.close().unwrap();
    }
    assert_eq!(backend.live().mappings, 1001);
    let unmaps = backend.ledger.calls()[before..].iter().filter(|call| **call == Call::cuMemUnmap).count();
    assert_eq!(unmaps, 0);
    in_a_small_stack(|| last.close().unwrap());
}

fn a_thousand_chunks_are_let_go_of_in_a_small_stack(backend: &Backend) {
    let mut buffer = backend.resource().allocate_with_capacity(G, 1000 * G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    for size in 2..=1000 {
        buffer = buffer.grow_into(size * G).unwrap();
    }
    assert_eq!(buffer.chunks().len(), 1000);
    in_a_small_stack(|| drop(buffer));
    assert_eq!(backend.live().mappings, 0);
}

fn a_thousand_aliases_of_one_buffer_cost_no_call(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let aliases: Vec<VirtualMemoryBuffer> =
        backend.require_no_call(|| (0..1000).map(|_| buffer.grow(1).unwrap()).collect());
    let mark = backend.mark();
    drop(buffer);
    let mut aliases = aliases;
    let last = aliases.pop().unwrap();
    in_a_small_stack(|| drop(aliases));
    backend.require_unchanged(&mark);
    last.close().unwrap();
}

fn doubling_to_a_large_size_makes_few_chunks(backend: &Backend) {
    let mut buffer = backend.resource().allocate_with_capacity(G, 1 << 30).unwrap();
    let created = backend.watch(Call::cuMemCreate);
    let mut size = G;
    while size < 1 << 30 {
        size *= 2;
        buffer = buffer.grow_into(size).unwrap();
    }
    assert_eq!(created.take_pairs().len(), 9);
    assert_eq!((buffer.size(), buffer.chunks().len()), (1 << 30, 10));
    buffer.close().unwrap();
}

fn copies_and_fills_cross_the_borders_of_chunks(backend: &Backend) {
    let buffer = backend.resource().allocate_with_capacity(G, 8 * G).unwrap();
    let buffer = buffer.grow_into(2 * G).unwrap().grow_into(4 * G).unwrap();
    buffer.fill(0, 4 * G, 0xee).unwrap();
    for (seed, border) in [(1, G), (2, 2 * G)] {
        for (before, after) in [(17, 23), (1, 1), (0, 40), (40, 0), (4096, 65536)] {
            let bytes = pattern(seed, before + after);
            buffer.copy_from_host(border - before, &bytes).unwrap();
            // One byte more on either side, which stays as it was.
            let mut seen = vec![0; before + after + 2];
            buffer.copy_to_host(border - before - 1, &mut seen).unwrap();
            assert_eq!(seen[1..seen.len() - 1], bytes[..]);
            assert_eq!((seen[0], seen[seen.len() - 1]), (0xee, 0xee), "at {border:#x}, {before} and {after}");
            buffer.fill(border - before, before + after, 0xee).unwrap();
            buffer.copy_to_host(border - before - 1, &mut seen).unwrap();
            assert!(seen.iter().all(|byte| *byte == 0xee));
        }
    }
    // Over all three chunks at once.
    let bytes = pattern(9, 2 * G + 100);
    buffer.copy_from_host(G - 50, &bytes).unwrap();
    let mut seen = vec![0; bytes.len()];
    buffer.copy_to_host(G - 50, &mut seen).unwrap();
    assert!(seen == bytes);
    buffer.close().unwrap();
}

/// How many mappings the kernel keeps for this process.
fn mappings_of_the_process() -> usize {
    std::fs::read_to_string("/proc/self/maps").expect("a list of mappings").lines().count()
}

fn thousands_of_rounds_leave_no_mapping_of_the_process_and_no_file(backend: &Backend) {
    Peer::alone(backend, || {
        let resource = backend.resource();
        let round = |number: usize| {
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(Release::Caller).unwrap();
            // Within its capacity, and behind it or elsewhere.
            let grown = buffer.grow(if number.is_multiple_of(2) { 2 * G } else { ROOM + G }).unwrap();
            buffer.close().unwrap();
            grown.close().unwrap();
        };
        // What is made once is made by then.
        (0..100).for_each(round);
        let before = (mappings_of_the_process(), open_files());
        (0..2000).for_each(round);
        let after = (mappings_of_the_process(), open_files());
        // The heap grows by a few.
        assert!(after.0 < before.0 + 16, "{} mappings were {}", after.0, before.0);
        assert_eq!(after.1, before.1);
    });
}

fn threads_that_grow_aliases_of_one_buffer_get_memory_of_their_own(backend: &Backend) {
    const THREADS: u8 = 8;
    let buffer = backend.resource().allocate_with_capacity(G, 32 * G).unwrap();
    write_marks(&buffer, 100);
    let barrier = Barrier::new(usize::from(THREADS));
    let grown: Vec<VirtualMemoryBuffer> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|seed| {
                let (buffer, barrier) = (&buffer, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let mut grown = buffer.grow(2 * G).unwrap();
                    for size in 3..=5 {
                        grown = grown.grow_into(size * G).unwrap();
                    }
                    for offset in (G..5 * G).step_by(G) {
                        grown.copy_from_host(offset, &pattern(seed, 4096)).unwrap();
                    }
                    grown
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // One had the room behind, at most; all share the head; and nobody wrote to another's tail.
    assert!(grown.iter().filter(|grown| grown.address() == buffer.address()).count() <= 1);
    for (seed, grown) in (0..THREADS).zip(&grown) {
        require_marks(grown, 100, G);
        for offset in (G..5 * G).step_by(G) {
            let mut seen = vec![0; 4096];
            grown.copy_to_host(offset, &mut seen).unwrap();
            assert!(seen == pattern(seed, 4096), "thread {seed} at {offset:#x}");
        }
    }
    thread::scope(|scope| {
        for grown in grown {
            scope.spawn(move || grown.close().unwrap());
        }
        scope.spawn(|| buffer.close().unwrap());
    });
}

fn threads_that_allocate_and_close_do_not_disturb_each_other(backend: &Backend) {
    let resource = backend.resource();
    thread::scope(|scope| {
        for seed in 0..8 {
            let resource = &resource;
            scope.spawn(move || {
                for _ in 0..10 {
                    let buffer = resource.allocate(G).unwrap();
                    write_marks(&buffer, seed);
                    let grown = buffer.grow_into(2 * G).unwrap();
                    require_marks(&grown, seed, G);
                    grown.close().unwrap();
                }
            });
        }
    });
}

fn a_thread_whose_calls_fail_gets_its_own_error(backend: &Backend) {
    let resource = backend.resource();
    // Those who ask for three granules have no luck.
    let unlucky = |arguments: &[u64]| arguments[1] == 3 * G as u64;
    backend.faults.fail_when(Call::cuMemCreate, unlucky, CUresult::OUT_OF_MEMORY, When::Before);
    thread::scope(|scope| {
        for index in 0..8_usize {
            let resource = &resource;
            scope.spawn(move || {
                for _ in 0..20 {
                    if index % 2 == 0 {
                        let error = resource.allocate(3 * G).unwrap_err();
                        assert_eq!(error.code(), Some(CUresult::OUT_OF_MEMORY));
                    } else {
                        resource.allocate(G).unwrap().close().unwrap();
                    }
                }
            });
        }
    });
}

/// Of the simulator alone, whose chunks can be so small that there is room for so many.
#[test]
fn twenty_thousand_chunks_are_let_go_of_in_a_small_stack() {
    const CHUNKS: usize = 20_000;
    let simulator = Simulator::new(Machine::small().granularity(|_, _| 4096).poison(None));
    let device = simulator.driver().unwrap().device(0).unwrap();
    let resource = VirtualMemoryResource::new(&device, Options::new().release(Release::Caller)).unwrap();
    let mut buffer = resource.allocate_with_capacity(4096, CHUNKS * 4096).unwrap();
    let mut aliases = Vec::new();
    for count in 2..=CHUNKS {
        let grown = buffer.grow(count * 4096).unwrap();
        // An alias of every tenth length, so that the chain is let go of in pieces too.
        if count % 10 == 0 {
            aliases.push(std::mem::replace(&mut buffer, grown));
        } else {
            buffer = grown;
        }
    }
    assert_eq!(simulator.live().mappings, CHUNKS);
    in_a_small_stack(move || drop(aliases));
    assert_eq!(simulator.live().mappings, CHUNKS);
    in_a_small_stack(move || buffer.close().unwrap());
    assert_eq!(simulator.live(), Live::default());
}
