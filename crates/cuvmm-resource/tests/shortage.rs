//! Memory that is on its way back is waited for before there is too little of it.
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm_driver::Call;
use cuvmm_resource::{Error, OnDrop, Options, Recycling, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::{Machine, Preset};
use support::work::{Held, drain};
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

/// Who gives back what was kept.
#[derive(Clone, Copy, Debug)]
enum Releases {
    /// Another allocation that lacks memory.
    Allocation,
    /// Somebody who asks for it.
    Trim,
    /// A buffer that closes, of which there is more room for than for what was kept.
    Close,
    /// The reaper, when the resource is gone.
    Reaper,
}

#[test]
fn what_was_kept_and_is_just_being_released_is_waited_for() {
    for releases in [Releases::Allocation, Releases::Trim, Releases::Close, Releases::Reaper] {
        for of_another in [false, true] {
            if matches!((releases, of_another), (Releases::Reaper, false)) {
                // Nobody allocates of that any more.
                continue;
            }
            let bench = Bench::new(Machine::small().device_memory(ALL));
            let asked = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&asked);
            let options = Options::new().on_out_of_memory(move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                false
            });
            let keeping = bench.resource(options.clone().recycling(Recycling::up_to(MOST)));
            let lacking = if of_another { bench.resource(options) } else { keeping.clone() };
            let last = matches!(releases, Releases::Close).then(|| keeping.allocate(G).unwrap());
            keeping.allocate(MOST).unwrap().close().unwrap();
            let (allocated, result) = channel();
            let is_asked = Arc::clone(&asked);
            bench.meanwhile.before_next(Call::cuMemRelease, move || {
                std::thread::spawn(move || allocated.send(lacking.allocate(7 * G)).unwrap());
                // Who did not wait would ask by then.
                for _ in 0..50 {
                    if is_asked.load(Ordering::Relaxed) == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
            match releases {
                Releases::Allocation => drop(keeping.allocate(7 * G).unwrap()),
                Releases::Trim => assert_eq!(keeping.trim(0).unwrap(), MOST),
                Releases::Close => last.unwrap().close().unwrap(),
                Releases::Reaper => drop(keeping),
            }
            let allocated = result.recv().unwrap();
            assert!(allocated.is_ok(), "{releases:?}, {of_another}");
            assert_eq!(asked.load(Ordering::Relaxed), 0, "{releases:?}, {of_another}");
        }
    }
}

#[test]
fn what_the_hook_gives_up_is_waited_for_whatever_was_waited_for_before() {
    let bench = Bench::new(Machine::small().device_memory(ALL));
    let stream = StreamRef::create(&bench.device()).unwrap();
    let given_up = Arc::new(Mutex::new(None::<(VirtualMemoryBuffer, Held)>));
    let options = {
        let given_up = Arc::clone(&given_up);
        Options::new().on_drop(OnDrop::Defer).on_out_of_memory(move |_| {
            let Some((buffer, held)) = given_up.lock().unwrap().take() else { return false };
            drop(buffer);
            held.let_go_soon();
            true
        })
    };
    let resource = bench.resource(options);
    let on = |stream: &StreamRef, size| {
        let buffer = resource.allocate(size).unwrap();
        buffer.set_release(Release::Stream(stream.clone())).unwrap();
        let held = Held::queue(stream.as_raw(), &buffer);
        (buffer, held)
    };
    let other = StreamRef::create(&bench.device()).unwrap();
    let (pending, lasting) = on(&other, G);
    *given_up.lock().unwrap() = Some(on(&stream, MOST));
    drop(pending);
    let made = resource.allocate(MOST).unwrap();
    lasting.let_go_soon().join().unwrap();
    drop(made);
    drain(&resource);
    drop((resource, stream, other));
    bench.assert_clean_soon();
}
