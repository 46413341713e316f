//! Letting go where it is hard: in a host function of the driver's, while the thread unwinds, and where owners of
//! streams do as they like.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm_driver::Call;
use cuvmm_driver::sys::CUstream_flags;
use cuvmm_resource::{Error, Options, Outcome, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_sim::Machine;
use support::work::{Foreign, Held, in_host_function};
use support::{Bench, G};

/// Drops it in a host function of the driver's, and gives the calls that were refused there: those are the only undefined
/// thing that is done, and all that the function does. What it leaves is another thread's.
fn drop_in_host_function(bench: &Bench, what: impl Send + 'static) -> Vec<Call> {
    let runner = StreamRef::create(&bench.device()).unwrap();
    in_host_function(&runner, move || drop(what));
    bench.simulator.violations().into_iter().map(|violation| violation.call).collect()
}

/// A buffer, whatever it has, is one refused call there, and goes soon after.
#[test]
fn a_buffer_dropped_in_a_host_function_makes_one_call_and_goes_soon() {
    let stream = |bench: &Bench| StreamRef::create(&bench.device()).unwrap();
    let capacity = |bench: &Bench| bench.plain().allocate_with_capacity(0, 64 * G).unwrap();
    type Make = Box<dyn Fn(&Bench) -> VirtualMemoryBuffer>;
    let makes: [(&str, Make); 5] = [
        ("capacity", Box::new(capacity)),
        ("capacity that an alias shares", Box::new(move |bench| capacity(bench).grow(0).unwrap())),
        (
            "capacity and a release stream",
            Box::new(move |bench| {
                let buffer = capacity(bench);
                buffer.set_release(Release::Stream(stream(bench))).unwrap();
                buffer
            }),
        ),
        (
            "memory, a release stream, and the resource's own",
            Box::new(move |bench| {
                let buffer = bench.plain().allocate(G).unwrap();
                buffer.fill(0, G, 1).unwrap();
                buffer.set_release(Release::Stream(stream(bench))).unwrap();
                buffer
            }),
        ),
        (
            "memory and a fence",
            Box::new(move |bench| {
                let buffer = bench.resource(Options::new().release(Release::Caller)).allocate(G).unwrap();
                buffer.fence(&stream(bench)).unwrap();
                buffer
            }),
        ),
    ];
    for (what, make) in makes {
        let bench = Bench::small();
        let buffer = make(&bench);
        assert_eq!(drop_in_host_function(&bench, buffer), [Call::cuCtxGetCurrent], "{what}");
        bench.simulator.clear_violations();
        bench.assert_clean_soon();
    }
}

/// What has no memory and no addresses has nothing to protect; its stream goes soon after.
#[test]
fn streams_dropped_in_a_host_function_go_soon() {
    type Make = fn(&Bench) -> Box<dyn Send>;
    let makes: [(&str, Make); 4] = [
        ("a stream", |bench| Box::new(StreamRef::create(&bench.device()).unwrap())),
        ("a release stream of options", |bench| {
            let stream = StreamRef::create(&bench.device()).unwrap();
            Box::new(bench.resource(Options::new().release(Release::Stream(stream))))
        }),
        ("a resource's own stream", |bench| {
            let resource = bench.plain();
            resource.allocate(G).unwrap().fill(0, G, 1).unwrap();
            Box::new(resource)
        }),
        ("a release stream of an empty buffer", |bench| {
            let buffer = bench.plain().allocate(0).unwrap();
            buffer.set_release(Release::Stream(StreamRef::create(&bench.device()).unwrap())).unwrap();
            Box::new(buffer)
        }),
    ];
    for (what, make) in makes {
        let bench = Bench::small();
        let value = make(&bench);
        assert_eq!(bench.left(), [0, 0, 0, 0, 1, 1], "{what}");
        let calls = drop_in_host_function(&bench, value);
        assert!(!calls.is_empty() && calls.iter().all(|call| *call == Call::cuCtxGetCurrent), "{what}: {calls:?}");
        bench.simulator.clear_violations();
        bench.assert_clean_soon();
    }
}

/// What is refused there leaves the buffer as it was, and no share of its memory behind.
#[test]
fn cutting_in_a_host_function_is_refused_and_keeps_nothing_alive() {
    for size in [0, G] {
        let bench = Bench::small();
        let buffer = bench.plain().allocate(G).unwrap().grow_into(4 * G).unwrap();
        let runner = StreamRef::create(&bench.device()).unwrap();
        let (sender, receiver) = channel();
        in_host_function(&runner, move || {
            let (error, buffer) = buffer.truncate_into(size).unwrap_err().into_parts();
            sender.send((error, buffer)).unwrap();
        });
        let (error, buffer) = receiver.recv().unwrap();
        assert_eq!((error, buffer.size(), buffer.chunks().len()), (Error::HostCallback, 4 * G, 2));
        assert_eq!(bench.simulator.violations().len(), 1, "it asked where it was");
        bench.simulator.clear_violations();
        drop(runner);
        buffer.close().unwrap();
        bench.assert_clean();
    }
}

#[test]
fn values_that_hold_nothing_of_the_drivers_go_in_a_host_function_as_anywhere() {
    let bench = Bench::small();
    let buffer = bench.plain().allocate(0).unwrap();
    assert_eq!(drop_in_host_function(&bench, (bench.plain(), buffer)), []);
    bench.assert_clean();
}

/// Runs it, and demands that it panics with the test's own words.
#[track_caller]
fn require_panic(work: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(work)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&SURPRISE));
}

const SURPRISE: &str = "a surprise";

/// A panic that nobody is shown.
fn surprise() {
    resume_unwind(Box::new(SURPRISE));
}

/// Nobody knows whether the driver unmapped it: nothing else is ever mapped there.
#[test]
fn after_a_panic_in_an_unmap_an_alias_that_grows_moves() {
    for drops in [false, true] {
        for bench in Bench::presets() {
            let resource = bench.resource(Options::new().release(Release::Caller));
            let first = resource.allocate_with_capacity(G, 64 * G).unwrap();
            let second = first.grow(2 * G).unwrap();
            assert_eq!(second.outcome(), Some(Outcome::InPlace));
            bench.meanwhile.before_next(Call::cuMemUnmap, surprise);
            require_panic(|| if drops { drop(second) } else { second.close().unwrap() });
            let third = first.grow(2 * G).unwrap();
            assert_eq!(third.outcome(), Some(Outcome::Moved));
            third.fill(0, 2 * G, 1).unwrap();
            assert_eq!(bench.bytes_of(&first), [1; G], "both are whole");
            third.close().unwrap();
            first.close().unwrap();
            drop(resource);
            // The addresses around what may be mapped, and nothing else.
            assert_eq!(bench.left(), [1, 1, 0, 0, 0, 0]);
            assert_eq!(bench.simulator.violations(), []);
        }
    }
}

/// A stream may wait for the very thread that drops: it gets on soon, however many buffers there are.
#[test]
fn of_many_buffers_whose_work_goes_on_and_on_the_first_is_waited_for() {
    let bench = Bench::small();
    let stream = StreamRef::create(&bench.device()).unwrap();
    let resource = bench.resource(Options::new().release(Release::Stream(stream.clone())));
    let buffers: Vec<_> = (0..20).map(|_| resource.allocate(G).unwrap()).collect();
    let held = Held::queue(stream.as_raw(), &buffers[0]);
    let start = Instant::now();
    drop(buffers);
    let took = start.elapsed();
    assert!((Duration::from_secs(2)..Duration::from_secs(5)).contains(&took), "{took:?}");
    assert_eq!((resource.pending(), bench.simulator.live().mappings), (20, 20));
    drop(held);
    resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
    drop((stream, resource));
    bench.assert_clean_soon();
}

/// Each call of a close panics in turn: what it was to end may be left, and all else is given back.
#[test]
fn a_panic_in_any_call_of_a_close_leaves_no_more_than_that_call_was_to_end() {
    let make = |bench: &Bench| {
        let resource = bench.resource(Options::new().release(Release::Caller));
        let buffer = resource.allocate_with_capacity(G, 64 * G).unwrap().grow_into(2 * G).unwrap();
        buffer.set_release(Release::Stream(StreamRef::create(&bench.device()).unwrap())).unwrap();
        buffer.fence(&StreamRef::create(&bench.device()).unwrap()).unwrap();
        bench.simulator.clear_calls();
        buffer
    };
    let bench = Bench::small();
    make(&bench).close().unwrap();
    let mut calls = bench.simulator.calls();
    calls.sort_unstable();
    calls.dedup();
    assert!(calls.len() >= 12, "{calls:?}");
    for call in calls {
        let bench = Bench::small();
        let buffer = make(&bench);
        bench.meanwhile.before_next(call, surprise);
        // On a thread of its own, whose context and capture mode may stay changed.
        let closed = std::thread::spawn(move || require_panic(|| buffer.close().unwrap())).join();
        assert!(closed.is_ok(), "{call}");
        assert_eq!(bench.simulator.violations(), [], "{call}");
        let most = match call {
            Call::cuMemUnmap => [1, 1, 0, 0, 0, 0],
            Call::cuMemRelease => [0, 0, 1, 0, 0, 0],
            Call::cuMemAddressFree => [0, 1, 0, 0, 0, 0],
            Call::cuEventDestroy => [0, 0, 0, 1, 0, 0],
            Call::cuStreamDestroy => [0, 0, 0, 0, 1, 0],
            Call::cuDevicePrimaryCtxRelease => [0, 0, 0, 0, 0, 1],
            _ => [0; 6],
        };
        let left = bench.left();
        assert!(left.iter().zip(most).all(|(left, most)| *left <= most), "{call}: {left:?}");
    }
}

#[test]
fn a_panic_in_a_long_buffer_unwinds_on_a_small_stack() {
    const CHUNKS: usize = 20_000;
    let bench = Bench::new(Machine::small().device_memory(8 << 30));
    let resource = bench.resource(Options::new().release(Release::Caller));
    for drops in [false, true] {
        let mut buffer = resource.allocate_with_capacity(G, CHUNKS * G).unwrap();
        for units in 2..=CHUNKS {
            buffer = buffer.grow_into(units * G).unwrap();
        }
        assert_eq!(buffer.chunks().len(), CHUNKS);
        bench.meanwhile.before_next(Call::cuMemUnmap, surprise);
        let work = move || require_panic(|| if drops { drop(buffer) } else { buffer.close().unwrap() });
        std::thread::Builder::new().stack_size(256 << 10).spawn(work).unwrap().join().unwrap();
    }
    assert_eq!(bench.left(), [2, 2, 0, 0, 0, 0], "where it happened");
    assert_eq!(bench.simulator.violations(), []);
}

/// Runs it on a thread of its own, and demands that it is over in a minute, on however busy a machine: that there is no
/// deadlock.
#[track_caller]
fn require_no_deadlock(work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let ended = catch_unwind(AssertUnwindSafe(work));
        let _ = sender.send(ended.is_ok());
    });
    assert_eq!(receiver.recv_timeout(Duration::from_secs(60)), Ok(true), "it hangs, or it panicked");
}

/// A stream whose owner does that when it is dropped.
fn owned(bench: &Bench, last: impl FnOnce() + Send + 'static) -> StreamRef {
    let owner = Foreign::new(bench, CUstream_flags::NON_BLOCKING);
    *owner.last.lock().unwrap() = Some(Box::new(last));
    StreamRef::from_owner(owner).unwrap()
}

/// Every way in which a buffer lets go of a stream: with it goes the owner.
type LettingGo = fn(VirtualMemoryBuffer, StreamRef, &Bench);
const WAYS: [(&str, LettingGo); 7] = [
    ("a close, of the release stream", |buffer, stream, _| {
        buffer.set_release(Release::Stream(stream)).unwrap();
        buffer.close().unwrap();
    }),
    ("a drop, of the release stream", |buffer, stream, _| {
        buffer.set_release(Release::Stream(stream)).unwrap();
    }),
    ("a close, of a fence between others", |buffer, stream, bench| {
        let [before, after] = [(); 2].map(|()| StreamRef::create(&bench.device()).unwrap());
        buffer.fence(&before).unwrap();
        buffer.fence(&stream).unwrap();
        buffer.fence(&after).unwrap();
        drop((before, stream, after));
        buffer.close().unwrap();
    }),
    ("a drop, of a fence", |buffer, stream, _| {
        buffer.fence(&stream).unwrap();
        drop(stream);
    }),
    ("another release stream", |buffer, stream, _| {
        buffer.set_release(Release::Stream(stream)).unwrap();
        buffer.set_release(Release::Caller).unwrap();
        buffer.close().unwrap();
    }),
    ("fences of which many are over", |buffer, stream, bench| {
        buffer.fence(&stream).unwrap();
        stream.synchronize().unwrap();
        drop(stream);
        for _ in 0..20 {
            let other = StreamRef::create(&bench.device()).unwrap();
            buffer.fence(&other).unwrap();
        }
        buffer.close().unwrap();
    }),
    ("a grow in its place", |buffer, stream, _| {
        buffer.set_release(Release::Stream(stream)).unwrap();
        buffer.grow_into(2 * G).unwrap().close().unwrap();
    }),
];

#[test]
fn owners_that_panic_leak_nothing() {
    for (what, let_go) in WAYS {
        let bench = Arc::new(Bench::small());
        let held = bench.clone();
        require_no_deadlock(move || {
            let resource = held.resource(Options::new().release(Release::Caller));
            let buffer = resource.allocate_with_capacity(G, 64 * G).unwrap();
            buffer.fill(0, G, 1).unwrap();
            let stream = owned(&held, surprise);
            require_panic(|| let_go(buffer, stream, &held));
        });
        // The owner's own: the panic came before it gave them back. What a drop had not let go of by then goes soon.
        bench.wait_until(|bench| bench.left() == [0, 0, 0, 0, 1, 1]);
        assert_eq!(bench.simulator.violations(), [], "{what}");
        assert_eq!(bench.driver.stranded().total(), 0, "{what}");
    }
}

/// The drop ends there, and the memory would go with the buffer: it is left to another thread, which waits for the rest.
#[test]
fn an_owner_that_panics_in_a_drop_pulls_no_memory_away_from_work() {
    for bench in Bench::presets() {
        let resource = bench.resource(Options::new().release(Release::Caller));
        let buffer = resource.allocate(G).unwrap();
        buffer.fence(&owned(&bench, surprise)).unwrap();
        let stream = StreamRef::create(&bench.device()).unwrap();
        let held = Held::queue(stream.as_raw(), &buffer);
        buffer.fence(&stream).unwrap();
        require_panic(|| drop(buffer));
        assert_eq!((resource.pending(), bench.simulator.live().mappings), (1, 1));
        drop(held);
        stream.synchronize().unwrap();
        resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
        drop((stream, resource));
        assert_eq!(bench.left(), [0, 0, 0, 0, 1, 1], "the owner's own");
        assert_eq!((bench.simulator.violations(), bench.driver.stranded().total()), (vec![], 0));
    }
}

#[test]
fn owners_that_drop_other_buffers_end_in_no_deadlock_and_leak_nothing() {
    for (_, let_go) in WAYS {
        let bench = Arc::new(Bench::small());
        let held = bench.clone();
        require_no_deadlock(move || {
            let resource = held.resource(Options::new().release(Release::Caller));
            let buffer = resource.allocate_with_capacity(G, 64 * G).unwrap();
            // An alias of it, and another of the same resource, whose own streams go with owners that do the same.
            let alias = buffer.grow(G).unwrap();
            let innermost = resource.allocate(G).unwrap();
            innermost.fill(0, G, 1).unwrap();
            let inner = owned(&held, move || drop(innermost));
            alias.fence(&inner).unwrap();
            let other = resource.allocate_with_capacity(0, 64 * G).unwrap();
            other.set_release(Release::Stream(inner)).unwrap();
            let stream = owned(&held, move || drop((alias, other)));
            let_go(buffer, stream, &held);
        });
        bench.assert_clean();
    }
}

/// What an owner does to the very buffer that lets go of it is done under no lock.
#[test]
fn owners_that_use_the_buffer_end_in_no_deadlock() {
    let bench = Arc::new(Bench::small());
    let held = bench.clone();
    require_no_deadlock(move || {
        let buffer = Arc::new(held.plain().allocate(G).unwrap());
        let dropped = Arc::new(Mutex::new(0));
        let make = || {
            let (used, count, device) = (Arc::downgrade(&buffer), dropped.clone(), held.device());
            owned(&held, move || {
                let Some(used) = used.upgrade() else { return };
                let stream = StreamRef::create(&device).unwrap();
                used.fence(&stream).unwrap();
                used.set_release(Release::DefaultStream).unwrap();
                used.fill_on(&stream, 0, G, 1).unwrap();
                *count.lock().unwrap() += 1;
            })
        };
        buffer.set_release(Release::Stream(make())).unwrap();
        buffer.set_release(Release::Caller).unwrap();
        assert_eq!(*dropped.lock().unwrap(), 1);
        for _ in 0..40 {
            let stream = make();
            buffer.fence(&stream).unwrap();
            stream.synchronize().unwrap();
        }
        assert!(*dropped.lock().unwrap() > 1, "the fences that were over went");
        Arc::into_inner(buffer).unwrap().close().unwrap();
    });
    bench.assert_clean();
}
