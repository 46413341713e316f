//! Sizes at the limits of what a number can hold, aliases that grow and close on many threads, and two failures in one
//! life: no panic, no undefined call, and what is left is counted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::Barrier;

use cuvmm_driver::sys::{CUcontext, CUstreamCaptureMode};
use cuvmm_driver::{CUresult, Call};
use cuvmm_handles::Allocation;
use cuvmm_resource::{Error, Options, Outcome, Release, StreamRef, VirtualMemoryResource};
use cuvmm_sim::When;
use support::{Bench, G, R};

const SIZES: [usize; 15] = [
    0,
    1,
    G - 1,
    G,
    1 << 46,
    1 << 47,
    usize::MAX / 2,
    1 << 63,
    usize::MAX - 2 * R,
    usize::MAX - (32 << 20),
    usize::MAX - (32 << 20) + 1,
    usize::MAX - R,
    usize::MAX - G,
    usize::MAX - G + 1,
    usize::MAX,
];

/// No memory for chunks that nobody can have.
fn none<T>(_: usize, _: T) -> Result<Allocation, Error> {
    Err(Error::StreamCapturing)
}

#[test]
fn no_size_at_any_alignment_makes_anything_panic_or_leak() {
    let bench = Bench::small();
    let alignments = [0, 1, 2, R, 1 << 40, 1 << 46, 1 << 47, 1 << 62, 1 << 63];
    for alignment in alignments {
        let resource = bench.resource(Options::new().alignment(alignment));
        for (size, capacity) in SIZES.into_iter().flat_map(|size| SIZES.map(|capacity| (size, capacity))) {
            let Ok(buffer) = resource.allocate_with_capacity(size, capacity) else { continue };
            assert!(buffer.size() >= size && buffer.capacity() >= buffer.size(), "{size} of {capacity}");
            for larger in SIZES {
                if let Ok(grown) = buffer.grow(larger) {
                    assert!(grown.size() >= larger && grown.size() >= size, "{larger}");
                }
            }
        }
        for (size, other) in SIZES.into_iter().flat_map(|size| SIZES.map(|other| (size, other))) {
            drop(resource.allocate(size));
            // Only no chunks at all are a buffer of what gives none.
            assert!(resource.map_chunks(&[size, other], other, none).is_err());
            assert_eq!(resource.map_chunks(&[], size, none).is_ok(), size == 0);
        }
    }
    for alignment in [3, usize::MAX, (1 << 63) + 1] {
        let made = VirtualMemoryResource::new(&bench.device(), Options::new().alignment(alignment));
        assert_eq!(made.map(drop), Err(Error::Alignment { alignment }));
    }
    bench.assert_clean();
}

#[test]
fn no_range_makes_a_transfer_panic() {
    let bench = Bench::small();
    let buffers = [0, G].map(|size| bench.plain().allocate_with_capacity(size, R).unwrap());
    for buffer in &buffers {
        let size = buffer.size();
        for (offset, bytes) in SIZES.into_iter().flat_map(|offset| SIZES.map(|bytes| (offset, bytes))) {
            let fits = offset.checked_add(bytes).is_some_and(|end| end <= size);
            let refused = Err(Error::OutOfBounds { offset, bytes, size });
            let expect = if fits { Ok(()) } else { refused };
            assert_eq!(buffer.fill(offset, bytes, 1), expect, "{bytes} at {offset} of {size}");
            if bytes <= G {
                let mut host = vec![0; bytes];
                assert_eq!(buffer.copy_from_host(offset, &host), expect);
                assert_eq!(buffer.copy_to_host(offset, &mut host), expect);
            }
        }
    }
    drop(buffers);
    bench.assert_clean();
}

#[test]
fn aliases_that_grow_and_close_on_eight_threads_share_the_memory() {
    const THREADS: usize = 8;
    for bench in Bench::presets() {
        let resource = bench.resource(Options::new().release(Release::Caller));
        let root = resource.allocate_with_capacity(G, 32 * G).unwrap();
        root.fill(0, G, 7).unwrap();
        let start = Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (root, start) = (&root, &start);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..60 {
                        let first = root.grow(G * (2 + (round + thread) % 7)).unwrap();
                        let second = first.grow(first.size() + G).unwrap();
                        let covered = first.grow(G).unwrap();
                        assert_eq!((covered.outcome(), covered.size()), (Some(Outcome::Covered), first.size()));
                        second.fill(second.size() - 1, 1, thread as u8).unwrap();
                        match round % 3 {
                            0 => {
                                drop(first);
                                let third = second.grow_into(12 * G).unwrap();
                                third.fill(11 * G, G, thread as u8).unwrap();
                                let mut byte = [0];
                                third.copy_to_host(G - 1, &mut byte).unwrap();
                                assert_eq!(byte, [7]);
                                covered.close().unwrap();
                                third.close().unwrap();
                            }
                            1 => {
                                second.close().unwrap();
                                first.close().unwrap();
                                covered.close().unwrap();
                            }
                            _ => {
                                covered.close().unwrap();
                                let third = first.grow_into(12 * G).unwrap();
                                drop((third, second));
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(bench.bytes_of(&root), [7; G]);
        assert_eq!(bench.simulator.live().mappings, 1);
        // All of its addresses are free again.
        let all = root.grow(root.capacity()).unwrap();
        assert_eq!(all.outcome(), Some(Outcome::InPlace));
        drop((all, root, resource));
        bench.assert_clean();
    }
}

const CALLS: [Call; 23] = [
    Call::cuMemAddressReserve,
    Call::cuMemCreate,
    Call::cuMemMap,
    Call::cuMemSetAccess,
    Call::cuMemUnmap,
    Call::cuMemRelease,
    Call::cuMemAddressFree,
    Call::cuStreamSynchronize,
    Call::cuStreamIsCapturing,
    Call::cuCtxPushCurrent,
    Call::cuCtxPopCurrent,
    Call::cuThreadExchangeStreamCaptureMode,
    Call::cuEventCreate,
    Call::cuEventRecord,
    Call::cuEventSynchronize,
    Call::cuEventDestroy,
    Call::cuDevicePrimaryCtxRetain,
    Call::cuDevicePrimaryCtxRelease,
    Call::cuDevicePrimaryCtxGetState,
    Call::cuCtxGetCurrent,
    Call::cuStreamCreate,
    Call::cuStreamDestroy,
    Call::cuMemsetD8Async,
];

/// A buffer's whole life: filled, fenced, grown in place, moved, closed.
fn live_through(bench: &Bench, stream: &StreamRef) -> Result<(), Error> {
    let resource = bench.plain();
    let first = resource.allocate_with_capacity(G, 2 * G)?;
    // What fails here is told, and nothing comes of it.
    let _ = first.fill(0, G, 3);
    let _ = first.fence(stream);
    let second = first.grow(2 * G)?;
    let third = second.grow_into(64 << 20).unwrap_or_else(|error| error.into_buffer());
    let _ = third.fence(stream);
    for buffer in [third, first] {
        if let Some(buffer) = buffer.close().err().and_then(|error| error.into_buffer()) {
            let _ = buffer.close();
        }
    }
    Ok(())
}

#[test]
fn two_failures_in_one_life_end_in_no_panic_and_what_is_left_is_counted() {
    let steps = CALLS.into_iter().flat_map(|call| [(call, 1), (call, 2), (call, 3)]);
    for ((first, nth), second) in steps.flat_map(|step| CALLS.map(|second| (step, second))) {
        let what = format!("{first} #{nth} and {second} fail");
        let bench = Bench::small();
        let stream = StreamRef::create(&bench.device()).unwrap();
        bench.faults.fail(first, nth, CUresult::UNKNOWN, When::Before);
        bench.faults.fail(second, 1, CUresult::OUT_OF_MEMORY, When::Before);
        // An error is as good as none.
        let _ = live_through(&bench, &stream);
        bench.faults.clear();
        drop(stream);
        assert_eq!(bench.simulator.violations(), [], "{what}");
        if bench.driver.stranded().is_empty() {
            bench.assert_clean();
            assert_eq!(bench.driver.ctx_get_current().unwrap(), CUcontext::NULL, "{what}");
        }
        let mode = bench.driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::GLOBAL).unwrap();
        assert!(mode == CUstreamCaptureMode::GLOBAL || !bench.driver.stranded().is_empty(), "{what}: {mode:?}");
    }
}
