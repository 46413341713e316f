//! Memory that is on its way back is waited for before there is too little of it.
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::Call;
use cuvmm_resource::{Error, OnDrop, Options, Release, StreamRef};
use cuvmm_sim::{Machine, Preset};
use support::work::Held;
use support::{Bench, G};

/// What the machine's device has.
const ALL: usize = 1 << 20;
/// More than half of it.
const MOST: usize = 10 * G;

#[test]
fn memory_that_a_dropped_buffer_gives_back_soon_is_waited_for() {
    for on_drop in [OnDrop::Defer, OnDrop::Wait] {
        for preset in [Preset::Strict, Preset::Measured] {
            let bench = Bench::new(Machine::small().device_memory(ALL).preset(preset));
            let asked = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&asked);
            let options = Options::new().on_drop(on_drop).on_out_of_memory(move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                false
            });
            let resource = bench.resource(options);
            let stream = StreamRef::create(&bench.device()).unwrap();
            for _ in 0..3 {
                let buffer = resource.allocate(MOST).unwrap();
                buffer.set_release(Release::Stream(stream.clone())).unwrap();
                let held = Held::queue(stream.as_raw(), &buffer).let_go_soon();
                buffer.close_deferred();
                let grown = resource.allocate(G).unwrap().grow(MOST).unwrap();
                held.join().unwrap();
                grown.close().unwrap();
            }
            assert_eq!(asked.load(Ordering::Relaxed), 0, "the hook is for what does not come back by itself");
            drop((resource, stream));
            bench.assert_clean_soon();
        }
    }
}

#[test]
fn memory_that_does_not_come_back_in_time_is_told_to_be_missing() {
    let bench = Bench::new(Machine::small().device_memory(ALL));
    let resource = bench.plain();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let buffer = resource.allocate(MOST).unwrap();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let held = Held::queue(stream.as_raw(), &buffer);
    buffer.close_deferred();
    let begin = Instant::now();
    let error = resource.allocate(MOST).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory(shortage) if shortage.pending == 1), "{error:?}");
    assert!(error.to_string().ends_with("; buffers that are gone still wait for work: 1"), "{error}");
    assert!((2..10).contains(&begin.elapsed().as_secs()));
    assert_eq!(resource.pending(), 1);
    held.let_go_soon().join().unwrap();
    resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
    resource.allocate(MOST).unwrap().close().unwrap();
}

/// Nor is what nobody waits for.
#[test]
fn where_nothing_is_on_its_way_back_nothing_is_tried_twice() {
    let bench = Bench::new(Machine::small().device_memory(ALL));
    let resource = bench.plain();
    let _held = resource.allocate(MOST).unwrap();
    bench.simulator.clear_calls();
    assert!(matches!(resource.allocate(MOST), Err(Error::OutOfMemory(_))));
    assert_eq!(bench.count(Call::cuMemCreate), 1);
}
