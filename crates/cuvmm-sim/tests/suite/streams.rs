//! Streams, events and host functions: rules R48, R62, R97 and R98, and the legacy default stream.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::*;

use crate::common::{Gpu, UNIT, ok};

const NON_BLOCKING: CUstream_flags = CUstream_flags::NON_BLOCKING;

#[test]
fn work_of_one_stream_runs_in_order() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        let buffer = gpu.buffer(UNIT);
        let gate = gpu.hold(stream);
        for value in 1..=9 {
            assert_eq!(gpu.fill(buffer.address, value, 10 - usize::from(value), stream), 0);
        }
        assert_eq!(gpu.query(stream), 600);
        assert_eq!(gpu.simulator.peek(CUdeviceptr(buffer.address), 1).unwrap(), [0xA5], "nothing has run yet");
        gate.open();
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(gpu.query(stream), 0);
        assert_eq!(gpu.read(buffer.address, 10).unwrap(), [9, 8, 7, 6, 5, 4, 3, 2, 1, 0xA5]);
    }
}

#[test]
fn non_blocking_streams_do_not_wait_for_each_other_or_for_the_legacy_one() {
    let gpu = Gpu::strict().with_context();
    let (held, free) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
    let gate = gpu.hold(held);
    let buffer = gpu.buffer(UNIT);
    assert_eq!(gpu.fill(buffer.address, 1, 1, free), 0);
    assert_eq!(gpu.synchronize(free), 0);
    assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
    assert_eq!(gpu.read(buffer.address, 1).unwrap(), [1]);
    assert_eq!(gpu.query(held), 600);
    gate.open();
}

#[test]
fn the_legacy_stream_waits_for_blocking_ones_and_they_for_it() {
    for legacy in [CUstream::NULL, CUstream::LEGACY] {
        let gpu = Gpu::strict().with_context();
        let (one, two) = (gpu.stream(CUstream_flags::DEFAULT), gpu.stream(CUstream_flags::DEFAULT));
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let order = order.clone();
            move || order.lock().unwrap().push(name)
        };
        let gate = gpu.hold(one);
        assert_eq!(gpu.host(one, note("one")), 0);
        assert_eq!(gpu.host(legacy, note("legacy")), 0);
        assert_eq!(gpu.host(two, note("two")), 0);
        assert_eq!([gpu.query(legacy), gpu.query(two)], [600, 600]);
        gate.open();
        assert_eq!(gpu.synchronize(two), 0);
        assert_eq!(*order.lock().unwrap(), ["one", "legacy", "two"]);
    }
}

#[test]
fn a_wait_for_the_legacy_stream_is_one_for_blocking_streams() {
    let gpu = Gpu::strict().with_context();
    let stream = gpu.stream(CUstream_flags::DEFAULT);
    let count = Arc::new(AtomicUsize::new(0));
    let gate = gpu.hold(stream);
    let counted = count.clone();
    assert_eq!(gpu.host(stream, move || _ = counted.fetch_add(1, Ordering::SeqCst)), 0);
    gate.open();
    assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[test]
fn each_thread_has_a_default_stream_of_its_own() {
    let gpu = Gpu::strict();
    let context = gpu.enter(0);
    let gate = gpu.hold(CUstream::PER_THREAD);
    assert_eq!(gpu.query(CUstream::PER_THREAD), 600);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(gpu.set_current(context), 0);
            assert_eq!(gpu.query(CUstream::PER_THREAD), 0);
        });
    });
    gate.open();
    assert_eq!(gpu.synchronize(CUstream::PER_THREAD), 0);
}

#[test]
fn events_order_streams() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (one, two) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (event, buffer) = (gpu.event(), gpu.buffer(UNIT));
        assert_eq!(gpu.event_query(event), 0, "never recorded");
        let gate = gpu.hold(one);
        assert_eq!(gpu.fill(buffer.address, 1, 8, one), 0);
        assert_eq!(gpu.record(event, one), 0);
        assert_eq!(gpu.event_query(event), 600);
        assert_eq!(gpu.wait_event(two, event), 0);
        assert_eq!(gpu.fill(buffer.address, 2, 4, two), 0);
        assert_eq!(gpu.query(two), 600, "it waits for the event");
        gate.open();
        assert_eq!(gpu.event_synchronize(event), 0);
        assert_eq!(gpu.synchronize(two), 0);
        assert_eq!(gpu.read(buffer.address, 8).unwrap(), [2, 2, 2, 2, 1, 1, 1, 1]);
        assert_eq!(gpu.event_destroy(event), 0);
        assert_eq!(gpu.event_destroy(event), 400);
        assert_eq!(gpu.violations().len(), 1);
    }
}

#[test]
fn an_event_destroyed_before_it_completes_still_orders() {
    let gpu = Gpu::strict().with_context();
    let (one, two) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
    let event = gpu.event();
    let gate = gpu.hold(one);
    assert_eq!([gpu.record(event, one), gpu.wait_event(two, event), gpu.event_destroy(event)], [0, 0, 0]);
    assert_eq!(gpu.host(two, || {}), 0);
    assert_eq!(gpu.query(two), 600);
    gate.open();
    assert_eq!(gpu.synchronize(two), 0);
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        let (event, buffer) = (gpu.event(), gpu.buffer(UNIT));
        let gate = gpu.hold(stream);
        assert_eq!(gpu.fill(buffer.address, 3, 1, stream), 0);
        assert_eq!(gpu.record(event, stream), 0);
        assert_eq!(gpu.destroy(stream), 0);
        assert_eq!(gpu.simulator.live().streams, 0);
        assert_eq!(gpu.query(stream), 400);
        assert_eq!(gpu.violations().len(), 1, "a dead stream was asked");
        gate.open();
        assert_eq!(gpu.event_synchronize(event), 0);
        assert_eq!(gpu.read(buffer.address, 1).unwrap(), [3]);
        assert_eq!(gpu.destroy(CUstream::LEGACY), 400);
    }
}

#[test]
fn a_host_source_is_taken_when_the_call_returns() {
    let gpu = Gpu::strict().with_context();
    let stream = gpu.stream(NON_BLOCKING);
    let buffer = gpu.buffer(UNIT);
    let gate = gpu.hold(stream);
    let mut source = *b"before";
    let to = CUdeviceptr(buffer.address);
    // SAFETY: the source outlives the call.
    assert_eq!(unsafe { gpu.raw().cuMemcpyHtoDAsync(to, source.as_ptr().cast(), 6, stream) }.0, 0);
    source.copy_from_slice(b"after!");
    gate.open();
    let mut seen = [0; 6];
    // SAFETY: the destination outlives the call, which returns when it is written.
    assert_eq!(unsafe { gpu.raw().cuMemcpyDtoHAsync(seen.as_mut_ptr().cast(), to, 6, stream) }.0, 0);
    assert_eq!(&seen, b"before");
    assert_eq!(&source, b"after!");
}

#[test]
fn copies_between_buffers_may_overlap_mappings_of_different_length() {
    let gpu = Gpu::strict().with_context();
    let stream = gpu.stream(NON_BLOCKING);
    let source = gpu.buffer(4 * UNIT);
    let range = gpu.reserve(4 * UNIT, 0, 0).unwrap();
    for index in 0..4 {
        let handle = gpu.create(UNIT).unwrap();
        let at = range + index * UNIT as u64;
        assert_eq!([gpu.map(at, UNIT, handle), gpu.grant(at, UNIT, &[crate::common::read_write(0)])], [0, 0]);
    }
    let pattern: Vec<u8> = (0..4 * UNIT).map(|index| (index / 7) as u8).collect();
    assert_eq!(gpu.write(source.address, &pattern), 0);
    assert_eq!(gpu.copy(range + 5, source.address + 3, 4 * UNIT - 5, stream), 0);
    assert_eq!(gpu.synchronize(stream), 0);
    assert!(gpu.read(range + 5, 4 * UNIT - 5).unwrap() == pattern[3..4 * UNIT - 2]);
}

#[test]
fn an_unmap_under_queued_work_is_a_violation_and_breaks_the_context() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        let (buffer, other) = (gpu.buffer(UNIT), gpu.buffer(UNIT));
        let ran = Arc::new(AtomicUsize::new(0));
        let gate = gpu.hold(stream);
        assert_eq!(gpu.fill(buffer.address, 1, UNIT, stream), 0);
        let counted = ran.clone();
        assert_eq!(gpu.host(stream, move || _ = counted.fetch_add(1, Ordering::SeqCst)), 0);
        gpu.close(other);
        assert_eq!(gpu.violations(), [""; 0], "of another range");
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert_eq!(gpu.violations(), ["cuMemUnmap: unmap under queued work"]);
        gate.open();
        assert_eq!(gpu.synchronize(stream), 700);
        assert_eq!(ran.load(Ordering::SeqCst), 0, "no host function runs in a broken context");
        assert_eq!(gpu.synchronize(stream), 700, "for good");
    }
}

#[test]
fn virtual_memory_calls_still_work_in_a_broken_context() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(NON_BLOCKING);
        let (buffer, event) = (gpu.buffer(UNIT), gpu.event());
        let gate = gpu.hold(stream);
        assert_eq!(gpu.fill(buffer.address, 1, 1, stream), 0);
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        gate.open();
        assert_eq!(gpu.synchronize(stream), 719);
        assert_eq!(gpu.free(buffer.address, UNIT), 0);
        assert_eq!(gpu.release(buffer.handle), 0);
        let again = gpu.buffer_of(gpu.create_exportable(UNIT), UNIT);
        assert!(gpu.export(again.handle).is_ok());
        gpu.close(again);
        let (mut free, mut total, mut plain) = (0, 0, CUdeviceptr(0));
        // SAFETY: the outputs are locals.
        unsafe {
            assert_eq!(gpu.raw().cuCtxSynchronize().0, 719);
            assert_eq!(gpu.raw().cuMemAlloc(&raw mut plain, 1).0, 719);
            assert_eq!(gpu.raw().cuMemGetInfo(&raw mut free, &raw mut total).0, 719);
        }
        assert_eq!(gpu.event_query(event), 719);
        assert_eq!([gpu.destroy(stream), gpu.event_destroy(event)], [719, 719], "nor are they destroyed");
    }
}

#[test]
fn access_taken_away_under_queued_work_is_a_violation() {
    let gpu = Gpu::strict().with_context();
    let stream = gpu.stream(NON_BLOCKING);
    let buffer = gpu.buffer(UNIT);
    let gate = gpu.hold(stream);
    assert_eq!(gpu.fill(buffer.address, 1, 1, stream), 0);
    assert_eq!(gpu.grant(buffer.address, UNIT, &[crate::common::read_write(0)]), 0);
    assert_eq!(gpu.violations(), [""; 0], "granting it again is harmless");
    assert_eq!(gpu.grant(buffer.address, UNIT, &[crate::common::grant(CUmemLocation::device(0), 1)]), 0);
    assert_eq!(gpu.violations(), ["cuMemSetAccess: access taken away under queued work"]);
    gate.open();
    assert_eq!(gpu.synchronize(stream), 719);
}

#[test]
fn memory_remapped_before_work_runs_is_what_it_writes() {
    let gpu = Gpu::measured().with_context();
    let stream = gpu.stream(NON_BLOCKING);
    let buffer = gpu.buffer(UNIT);
    let gate = gpu.hold(stream);
    assert_eq!(gpu.fill(buffer.address, 5, 1, stream), 0);
    assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
    let other = gpu.create(UNIT).unwrap();
    assert_eq!(gpu.map(buffer.address, UNIT, other), 0);
    assert_eq!(gpu.grant(buffer.address, UNIT, &[crate::common::read_write(0)]), 0);
    gate.open();
    assert_eq!(gpu.synchronize(stream), 0);
    assert_eq!(gpu.read(buffer.address, 1).unwrap(), [5]);
}

#[test]
fn calls_in_a_host_function_are_refused_and_each_is_a_violation() {
    type Refused = fn(&Gpu) -> u32;
    let table: [(&str, Refused); 6] = [
        ("cuCtxGetCurrent", |gpu| gpu.current().unwrap_err()),
        ("cuMemUnmap", |gpu| gpu.unmap(0, 0)),
        ("cuMemAddressReserve", |gpu| gpu.reserve(UNIT, 0, 0).unwrap_err()),
        ("cuCtxSetCurrent", |gpu| gpu.set_current(CUcontext::NULL)),
        ("cuMemRelease", |gpu| gpu.release(0)),
        ("cuDeviceGetCount", |gpu| {
            let mut count = 0;
            // SAFETY: the output is a local.
            unsafe { gpu.raw().cuDeviceGetCount(&raw mut count) }.0
        }),
    ];
    for gpu in Gpu::both() {
        let gpu = Arc::new(gpu.with_context());
        let stream = gpu.stream(NON_BLOCKING);
        for (name, call) in table {
            gpu.simulator.clear_violations();
            let (sender, answer) = std::sync::mpsc::channel();
            let inside = gpu.clone();
            assert_eq!(gpu.host(stream, move || sender.send(call(&inside)).unwrap()), 0);
            assert_eq!(answer.recv().unwrap(), 800, "{name}");
            assert_eq!(gpu.violations(), [format!("{name}: a call in a host function")]);
            assert_eq!(gpu.synchronize(stream), 0);
        }
        assert_eq!(gpu.unmap(0, 0), 1, "elsewhere it is refused for what it is");
    }
}

#[test]
fn a_wait_for_its_own_stream_in_a_host_function_answers_instead_of_hanging() {
    for gpu in Gpu::both() {
        let gpu = Arc::new(gpu.with_context());
        let stream = gpu.stream(NON_BLOCKING);
        let other = gpu.stream(NON_BLOCKING);
        let (sender, answer) = std::sync::mpsc::channel();
        let inside = gpu.clone();
        let work = move || sender.send([inside.query(stream), inside.synchronize(other), inside.synchronize(stream)]);
        assert_eq!(gpu.host(stream, move || work().unwrap()), 0);
        assert_eq!(answer.recv().unwrap(), [600, 0, 800]);
        assert_eq!(gpu.violations().len(), 4, "one for each call, and one for the hang");
    }
}

#[test]
fn a_context_wait_covers_all_streams() {
    let gpu = Gpu::strict().with_context();
    let streams: Vec<CUstream> = (0..4).map(|_| gpu.stream(NON_BLOCKING)).collect();
    let count = Arc::new(AtomicUsize::new(0));
    for stream in &streams {
        let counted = count.clone();
        assert_eq!(gpu.host(*stream, move || _ = counted.fetch_add(1, Ordering::SeqCst)), 0);
    }
    // SAFETY: it takes nothing.
    assert_eq!(unsafe { gpu.raw().cuCtxSynchronize() }.0, 0);
    assert_eq!(count.load(Ordering::SeqCst), 4);
}

#[test]
fn many_threads_work_on_one_driver() {
    for gpu in Gpu::both() {
        let context = gpu.enter(0);
        std::thread::scope(|scope| {
            for thread in 0..8_u8 {
                let gpu = &gpu;
                scope.spawn(move || {
                    assert_eq!(gpu.set_current(context), 0);
                    let stream = gpu.stream(NON_BLOCKING);
                    for _ in 0..20 {
                        let buffer = gpu.buffer(UNIT);
                        assert_eq!(gpu.fill(buffer.address, thread, 4096, stream), 0);
                        assert_eq!(gpu.synchronize(stream), 0);
                        assert_eq!(gpu.read(buffer.address, 4096).unwrap(), [thread; 4096]);
                        gpu.close(buffer);
                    }
                    assert_eq!(gpu.destroy(stream), 0);
                });
            }
        });
        assert_eq!(gpu.violations(), [""; 0]);
        let live = gpu.simulator.live();
        assert_eq!((live.reservations, live.allocations, live.mappings, live.streams), (0, 0, 0, 0));
    }
}

#[test]
fn streams_and_events_bring_their_context() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, event) = (gpu.stream(NON_BLOCKING), gpu.event());
        assert_eq!(gpu.set_current(CUcontext::NULL), 0);
        assert_eq!(gpu.host(stream, || {}), 0);
        assert_eq!(gpu.record(event, stream), 0);
        assert_eq!(gpu.wait_event(stream, event), 0);
        assert_eq!(gpu.event_synchronize(event), 0);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(gpu.query(stream), 0);
        assert_eq!([gpu.event_query(event), gpu.event_destroy(event), gpu.destroy(stream)], [0, 0, 0]);
    }
}

#[test]
fn contexts_of_streams_are_told() {
    let gpu = Gpu::strict();
    let context = gpu.enter(0);
    let stream = gpu.stream(NON_BLOCKING);
    assert_eq!(gpu.set_current(CUcontext::NULL), 0);
    let of = |stream| {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is a local.
        let code = unsafe { gpu.raw().cuStreamGetCtx(stream, &raw mut context) };
        ok(code, context)
    };
    assert_eq!(of(stream), Ok(context), "without a current context");
    assert_eq!(of(CUstream::NULL), Err(201));
    assert_eq!(gpu.set_current(context), 0);
    assert_eq!(of(CUstream::PER_THREAD), Ok(context));
}

#[test]
fn a_host_function_may_wait_for_what_does_not_wait_for_it() {
    for gpu in Gpu::both() {
        let gpu = Arc::new(gpu.with_context());
        let [stream, busy, after] = [(); 3].map(|()| gpu.stream(NON_BLOCKING));
        let event = gpu.event();
        let gate = gpu.hold(busy);
        let entered = gpu.hold(stream);
        let (sender, answer) = std::sync::mpsc::channel();
        let inside = gpu.clone();
        assert_eq!(
            gpu.host(stream, move || sender.send([after, busy].map(|other| inside.synchronize(other))).unwrap()),
            0
        );
        // Behind the host function, by an event.
        assert_eq!([gpu.record(event, stream), gpu.wait_event(after, event)], [0, 0]);
        // Later work of another stream, which nothing holds but its own gate.
        assert_eq!(gpu.host(busy, || {}), 0);
        entered.open();
        assert!(answer.recv_timeout(std::time::Duration::from_millis(50)).is_err(), "it waits for the busy stream");
        gate.open();
        assert_eq!(answer.recv().unwrap(), [800, 0], "what comes after it would hang");
        assert_eq!(gpu.synchronize(after), 0);
    }
}

#[test]
fn host_functions_do_not_wait_for_each_other() {
    let gpu = Arc::new(Gpu::strict().with_context());
    let (one, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
    let (sender, answers) = std::sync::mpsc::channel();
    let meet = Arc::new(std::sync::Barrier::new(2));
    for (stream, peer) in [(one, other), (other, one)] {
        let (inside, sender, meet) = (gpu.clone(), sender.clone(), meet.clone());
        let work = move || {
            meet.wait();
            sender.send(inside.synchronize(peer)).unwrap();
        };
        assert_eq!(gpu.host(stream, work), 0);
    }
    let mut answers = [answers.recv().unwrap(), answers.recv().unwrap()];
    answers.sort_unstable();
    assert_eq!(answers, [0, 800], "one of them would hang");
}
