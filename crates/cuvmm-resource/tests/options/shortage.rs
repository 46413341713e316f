//! When something is exhausted: what may free some is asked, and each shortage is told by its own name.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUstream_flags;
use cuvmm_driver::{CUresult, Call, MemoryInfo};
use cuvmm_resource::{
    Error, Location, Options, OutOfMemory, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_sim::When;

use crate::support::work::{Foreign, begin_capture, end_capture};
use crate::support::{Bench, G};

const MIB: usize = 1 << 20;

/// A hook that counts how often it is asked, and does `relief`.
fn counted(
    relief: impl Fn(&OutOfMemory) -> bool + Send + Sync + 'static,
) -> (Arc<AtomicUsize>, impl Fn(&OutOfMemory) -> bool + Send + Sync + 'static) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let hook = move |shortage: &OutOfMemory| {
        count.fetch_add(1, Ordering::Relaxed);
        relief(shortage)
    };
    (asked, hook)
}

#[test]
fn the_hook_is_asked_once_and_once_more_is_tried() {
    for bench in Bench::presets() {
        let cache = Mutex::new(Some(bench.plain().allocate(900 * MIB).unwrap()));
        let (asked, hook) = counted(move |shortage| {
            assert_eq!((shortage.requested, shortage.granularity), (600 * MIB, G));
            assert_eq!(shortage.error.code(), Some(CUresult::OUT_OF_MEMORY));
            cache.lock().unwrap().take().is_some()
        });
        let resource = bench.resource(Options::new().on_out_of_memory(hook));
        bench.simulator.clear_calls();
        let buffer = resource.allocate(600 * MIB).unwrap();
        assert_eq!((asked.load(Ordering::Relaxed), bench.count(Call::cuMemCreate)), (1, 2));
        // Nothing is left to free.
        let error = resource.allocate(600 * MIB).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        assert_eq!((asked.load(Ordering::Relaxed), bench.count(Call::cuMemCreate)), (2, 3), "no second try");
        drop((buffer, resource));
        bench.assert_clean();
    }
}

#[test]
fn a_hook_that_promises_in_vain_is_not_asked_again() {
    let bench = Bench::small();
    let (asked, hook) = counted(|_| true);
    let resource = bench.resource(Options::new().on_out_of_memory(hook));
    assert!(matches!(resource.allocate(2048 * MIB), Err(Error::OutOfMemory(_))));
    assert_eq!((asked.load(Ordering::Relaxed), bench.count(Call::cuMemCreate)), (1, 2));
    // Another allocation, another shortage.
    assert!(matches!(resource.allocate(2048 * MIB), Err(Error::OutOfMemory(_))));
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    bench.assert_clean();
}

#[test]
fn only_a_shortage_of_memory_is_the_hooks_business() {
    let bench = Bench::small();
    let (asked, hook) = counted(|_| true);
    let resource = bench.resource(Options::new().on_out_of_memory(hook).retry_out_of_memory(9, Duration::ZERO));
    for (call, code) in [
        (Call::cuMemAddressReserve, CUresult::OUT_OF_MEMORY),
        (Call::cuMemCreate, CUresult::UNKNOWN),
        (Call::cuMemCreate, CUresult::OPERATING_SYSTEM),
        (Call::cuMemMap, CUresult::OUT_OF_MEMORY),
        (Call::cuMemSetAccess, CUresult::OUT_OF_MEMORY),
    ] {
        bench.faults.fail(call, 1, code, When::Before);
        let error = resource.allocate(1).unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(call), Some(code)));
        bench.assert_clean();
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[test]
fn each_piece_that_is_short_is_asked_for() {
    let bench = Bench::small();
    let (asked, hook) = counted(|shortage| shortage.requested == G);
    let resource = bench.resource(Options::new().max_chunk(G).on_out_of_memory(hook));
    for nth in [2, 4] {
        bench.faults.fail(Call::cuMemCreate, nth, CUresult::OUT_OF_MEMORY, When::Before);
    }
    let buffer = resource.allocate(4 * G).unwrap();
    assert_eq!((asked.load(Ordering::Relaxed), buffer.chunks().len()), (2, 4));
    drop(buffer);
    bench.assert_clean();
}

#[test]
fn a_shortage_that_passes_is_waited_for_as_often_as_was_said() {
    let bench = Bench::small();
    let pause = Duration::from_millis(10);
    for (times, creates, is_had) in [(0, 1, false), (2, 3, false), (3, 4, true), (5, 4, true)] {
        let resource = bench.resource(Options::new().retry_out_of_memory(times, pause));
        for nth in 1..=3 {
            bench.faults.fail(Call::cuMemCreate, nth, CUresult::OUT_OF_MEMORY, When::Before);
        }
        bench.simulator.clear_calls();
        let tried = bench.faults.fired();
        let since = Instant::now();
        let made = resource.allocate(G);
        assert!(since.elapsed() >= pause * (creates - 1));
        let failed = bench.faults.fired() - tried;
        assert_eq!((made.is_ok(), failed + usize::from(is_had)), (is_had, creates as usize), "{times}");
        drop(made);
        bench.faults.clear();
        bench.assert_clean();
    }
    // The hook is asked first, and no more after.
    let (asked, hook) = counted(|_| true);
    let resource = bench.resource(Options::new().on_out_of_memory(hook).retry_out_of_memory(2, pause));
    for nth in 1..=3 {
        bench.faults.fail(Call::cuMemCreate, nth, CUresult::OUT_OF_MEMORY, When::Before);
    }
    drop(resource.allocate(G).unwrap());
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    bench.assert_clean();
}

/// A buffer, and a resource whose hook uses them both as anybody might.
#[test]
fn a_hook_may_use_everything_also_what_it_was_called_for() {
    let bench = Bench::small();
    let resource: Arc<OnceLock<VirtualMemoryResource>> = Arc::default();
    let buffer: Arc<OnceLock<VirtualMemoryBuffer>> = Arc::default();
    let (asked, hook) = {
        let (resource, buffer) = (Arc::clone(&resource), Arc::clone(&buffer));
        counted(move |_| {
            let (resource, buffer) = (resource.get().unwrap(), buffer.get().unwrap());
            buffer.set_release(Release::Caller).unwrap();
            buffer.fill(0, G, 1).unwrap();
            buffer.fence(&StreamRef::create(resource.device()).unwrap()).unwrap();
            drop(buffer.grow(G).unwrap());
            drop(buffer.truncate(0).unwrap());
            drop(buffer.grow(2 * G).unwrap());
            resource.allocate(G).unwrap().close().unwrap();
            // What is short in here calls no hook.
            let error = resource.allocate(2048 * MIB).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
            false
        })
    };
    resource.set(bench.resource(Options::new().on_out_of_memory(hook))).unwrap();
    let both = resource.get().unwrap();
    assert!(buffer.set(both.allocate(G).unwrap()).is_ok());
    let (ended, end) = mpsc::channel();
    for _ in 0..2 {
        let (ended, resource, buffer) = (ended.clone(), Arc::clone(&resource), Arc::clone(&buffer));
        std::thread::spawn(move || {
            for _ in 0..20 {
                let allocated = resource.get().unwrap().allocate(2048 * MIB).map(drop);
                assert!(matches!(allocated, Err(Error::OutOfMemory(_))));
                let grown = buffer.get().unwrap().grow(2048 * MIB).map(drop);
                assert!(matches!(grown, Err(Error::OutOfMemory(_))));
            }
            ended.send(()).unwrap();
        });
    }
    drop(ended);
    // On a busy machine, too: only a deadlock takes as long.
    for _ in 0..2 {
        end.recv_timeout(Duration::from_secs(60)).unwrap();
    }
    assert_eq!(asked.load(Ordering::Relaxed), 80);
}

#[test]
fn a_hook_that_panics_leaves_nothing_behind() {
    let bench = Bench::small();
    let (asked, hook) = counted(|_| resume_unwind(Box::new("mine")));
    let resource = bench.resource(Options::new().max_chunk(512 * MIB).on_out_of_memory(hook));
    let buffer = resource.allocate(G).unwrap();
    let before = bench.simulator.live();
    for count in 1..=3 {
        assert!(catch_unwind(AssertUnwindSafe(|| resource.allocate(2048 * MIB))).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| buffer.grow(2048 * MIB))).is_err());
        assert_eq!(asked.load(Ordering::Relaxed), 2 * count);
        assert_eq!(bench.simulator.live(), before);
    }
    // It may be grown still.
    let larger = buffer.grow_into(100 * MIB).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| larger.grow_into(2048 * MIB))).is_err());
    bench.assert_clean();
}

#[test]
fn one_code_is_four_errors_by_the_call_that_answered_it() {
    let bench = Bench::small();
    let resource = bench.plain();
    let buffer = resource.allocate_with_capacity(G, 64 * MIB).unwrap();
    let before = bench.simulator.live();
    let operations: [&dyn Fn() -> Result<VirtualMemoryBuffer, Error>; 3] =
        [&|| resource.allocate(3 * G), &|| resource.allocate_with_capacity(3 * G, 3 * G), &|| buffer.grow(128 * MIB)];
    for (index, operation) in operations.into_iter().enumerate() {
        let fail = |call| {
            // A grow that can't have the addresses behind it moves.
            for nth in 1..=if index == 2 && call == Call::cuMemAddressReserve { 2 } else { 1 } {
                bench.faults.fail(call, nth, CUresult::OUT_OF_MEMORY, When::Before);
            }
            let error = operation().map(drop).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(call), Some(CUresult::OUT_OF_MEMORY)));
            assert_eq!(bench.simulator.live(), before);
            error
        };
        let reserve = fail(Call::cuMemAddressReserve);
        assert!(matches!(reserve, Error::AddressSpaceExhausted { bytes, .. } if bytes >= 32 * MIB), "{reserve}");
        assert!(reserve.to_string().contains("addresses") && !reserve.to_string().contains("granularity"), "{reserve}");
        let create = fail(Call::cuMemCreate);
        assert!(matches!(&create, Error::OutOfMemory(shortage) if shortage.granularity == G), "{create}");
        let map = fail(Call::cuMemMap);
        assert!(matches!(map, Error::Handles(cuvmm_handles::Error::Map { .. })), "{map}");
        let grant = fail(Call::cuMemSetAccess);
        let own = Some(bench.device().location());
        // Tried alone, its one descriptor is granted: who was refused is known all the same.
        assert!(matches!(grant, Error::AccessRefused { location, .. } if location == own), "{grant}");
    }
    drop((buffer, resource));
    bench.assert_clean();
}

/// What an allocation of more than there is tells of the device's memory.
fn told(bench: &Bench, location: Location) -> Option<MemoryInfo> {
    let resource = bench.resource(Options::new().location(location));
    match resource.allocate(64 << 30) {
        Err(Error::OutOfMemory(shortage)) => shortage.memory,
        other => panic!("{other:?}"),
    }
}

#[test]
fn how_much_there_is_is_told_where_a_context_is_active_and_none_is_made_for_it() {
    for bench in Bench::presets() {
        let device = bench.device();
        assert_eq!(told(&bench, Location::Device), None);
        assert_eq!((bench.count(Call::cuDevicePrimaryCtxRetain), bench.count(Call::cuMemGetInfo)), (0, 0));

        let stream = StreamRef::create(&device).unwrap();
        let held = bench.plain().allocate(256 * MIB).unwrap();
        let memory = told(&bench, Location::Device).unwrap();
        assert_eq!(memory.total, 1 << 30);
        assert!(memory.free <= 768 * MIB && memory.free > 700 * MIB, "{memory:?}");
        assert_eq!(told(&bench, Location::Host), None, "that is the device's");
        assert!(bench.driver.ctx_get_current().unwrap().is_null());
        drop((stream, held));
        assert!(!device.primary_ctx_is_active().unwrap(), "it keeps none");
        assert_eq!(told(&bench, Location::Device), None);
        bench.assert_clean();
    }
}

#[test]
fn a_shortage_harms_no_capture() {
    for bench in Bench::presets() {
        let foreign = Foreign::new(&bench, CUstream_flags::NON_BLOCKING);
        let resource = bench.plain();
        begin_capture(&foreign);
        assert!(told(&bench, Location::Device).is_some());
        // On another thread, too, where the capture forbids as much.
        let short = std::thread::scope(|scope| scope.spawn(|| resource.allocate(64 << 30).map(drop)).join().unwrap());
        assert!(matches!(short, Err(Error::OutOfMemory(OutOfMemory { memory: Some(_), .. }))));
        assert!(end_capture(&foreign), "the capture was broken off");
    }
}
