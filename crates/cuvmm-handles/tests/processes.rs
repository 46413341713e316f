//! Handles in a forked child, and without a standard input.
//!
//! # Safety
//! A child that is forked here drops what it inherited, reads its own memory, and ends by `_exit`: it needs nothing
//! that another thread could have held. Its allocator is the C library's, which `fork` leaves usable.
#![allow(unsafe_code)]

mod support;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle};
use cuvmm_driver::{Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_handles::{Allocation, Error, Granularity, Mapping, PrimaryContext, Reservation, Usage, is_vmm};
use cuvmm_sim::{Faults, Machine, Simulator};
use support::{Bench, G, R};

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn alarm(seconds: u32) -> u32;
    safe fn _exit(status: i32) -> !;
    unsafe fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
}

/// Runs `work` in a forked child, which is killed if it is not over in ten seconds, and gives its exit code; none
/// for a child that was killed.
fn in_child(work: impl FnOnce() -> i32) -> Option<i32> {
    let child = fork();
    if child == 0 {
        alarm(10);
        _exit(work());
    }
    assert!(child > 0, "a child");
    let mut status = 0;
    // SAFETY: the output is ours.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    (status & 0x7f == 0).then_some(status >> 8 & 0xff)
}

/// Tells the other threads that it is over, also where the test fails: their scope waits for them.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Counts calls without a lock.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Hook for Count {
    fn before(&self, _: &Invocation<'_>) -> Option<Failure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        None
    }
}

/// In a forked child, dropping and closing make no call and touch no lock: here, while other threads hold the locks
/// of the same reservation and of the account of references as often as not.
#[test]
fn a_forked_child_lets_go_without_a_call_or_a_lock() {
    let (simulator, count) = (Simulator::new(Machine::small()), Count::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), count.clone())).unwrap();
    let bench = Bench { simulator, driver, faults: Faults::new() };
    let (range, one) = (bench.addresses(1), Granularity::new(G).unwrap().exact(G).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 1..=3 {
            let (range, retained, is_over) = (&range, bench.driver.retained(), &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    drop(range.take(thread * G, G));
                    drop(retained.add(CUmemGenericAllocationHandle(thread as u64)));
                }
            });
        }
        let _over = Over(&is_over);
        for round in 0..100 {
            let mappings = [(); 2].map(|()| bench.mapping());
            let shared = Mapping::map(&range, R - G, bench.memory(1), bench.access()).unwrap();
            let room = range.take(0, G).unwrap();
            let [own, other] = [(); 2].map(|()| Arc::into_inner(bench.addresses(1)).unwrap());
            let memory = Arc::into_inner(bench.memory(1)).unwrap();
            // SAFETY: the mapping is this test's, and as long as its allocation.
            let retain = || unsafe { Allocation::retain(&bench.driver, shared.address(), one) }.unwrap();
            let (retained, account) = ([(); 2].map(|()| retain()), bench.driver.retained().add(memory.handle()));
            let [released, primary] =
                [(); 2].map(|()| PrimaryContext::retain(&bench.driver.device(0).unwrap()).unwrap());
            let before = count.0.load(Ordering::Relaxed);
            // The child's copies are its own: here everything stays as it is.
            let mut all = Some((mappings, shared, room, own, other, memory, released, primary, retained, account));
            let code = in_child(|| {
                let Some((mappings, shared, room, own, other, memory, released, primary, retained, account)) =
                    all.take()
                else {
                    return 101;
                };
                let ([closed, dropped], [given_back, left]) = (mappings, retained);
                let released = released.release().is_ok() && given_back.close().is_ok();
                let closed = released && closed.close().is_ok() && own.close().is_ok() && memory.close().is_ok();
                drop((dropped, shared, room, other, primary, left, account));
                let calls = count.0.load(Ordering::Relaxed) - before;
                let stranded = bench.driver.stranded().total();
                if closed && calls == 0 && stranded == 0 { 42 } else { 1 }
            });
            assert_eq!(code, Some(42), "round {round}: none is a child that hung");
            assert!(all.is_some());
        }
    });
    drop(range);
    bench.assert_clean();
}

/// So does what is asked of it: the child is told where it is, while other threads hold the lock of the same reservation as
/// often as not.
#[test]
fn a_forked_child_is_refused_without_a_call_or_a_lock() {
    let (simulator, count) = (Simulator::new(Machine::small()), Count::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), count.clone())).unwrap();
    let bench = Bench { simulator, driver, faults: Faults::new() };
    let (range, memory) = (bench.addresses(1), bench.memory_for(1, CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR));
    let device = bench.driver.device(0).unwrap();
    let properties = bench.properties(CUmemAllocationHandleType::NONE);
    let mapping = Mapping::map(&range, R - G, Arc::clone(&memory), bench.access()).unwrap();
    let (one, several) = (memory.granularity().exact(G).unwrap(), Reservation::GRANULARITY.exact(R).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 2..=4 {
            let (range, is_over) = (&range, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    drop(range.take(2 * thread * G, 2 * G).unwrap().split(G));
                }
            });
        }
        let _over = Over(&is_over);
        let before = count.0.load(Ordering::Relaxed);
        for round in 0..200 {
            let mut rooms = Some([range.take(0, G).unwrap(), range.take(G, 2 * G).unwrap()]);
            let code = in_child(|| {
                let Some([room, wide]) = rooms.take() else { return 101 };
                if (room.behind(), wide.end()) != (R - G, 3 * G) {
                    return 1;
                }
                let driver = &bench.driver;
                let refused = [
                    range.take(3 * G, G).map(drop),
                    wide.split(G).map(drop),
                    Mapping::map(&range, 3 * G, Arc::clone(&memory), Arc::new([])).map(drop),
                    Mapping::map_in(room, Arc::clone(&memory), Arc::new([])).map(drop),
                    Reservation::reserve(driver, several, 0).map(drop),
                    Reservation::at(driver, several, range.address()).map(drop),
                    Allocation::create(driver, one, &properties).map(drop),
                    Granularity::minimum(driver, &properties).map(drop),
                    memory.export_posix_fd().map(drop),
                    memory.properties().map(drop),
                    mapping.export_dma_buf().map(drop),
                    is_vmm(driver, range.address()).map(drop),
                    PrimaryContext::retain(&device).map(drop).map_err(Error::from),
                ];
                let forked = Err(Error::Driver(cuvmm_driver::Error::Forked));
                if refused.iter().any(|result| *result != forked) {
                    return 2;
                }
                let is_quiet = count.0.load(Ordering::Relaxed) == before && driver.stranded().is_empty();
                if is_quiet { 42 } else { 3 }
            });
            assert_eq!(code, Some(42), "round {round}: none is a child that hung");
        }
    });
    mapping.close().unwrap();
    drop((range, memory));
    bench.assert_clean();
}

#[test]
fn what_a_child_drops_is_still_the_parents() {
    let bench = Bench::small();
    let usage = Arc::<Usage>::default();
    let range = Arc::into_inner(bench.addresses(1)).unwrap().counted(&usage);
    let mapping = Mapping::map(&Arc::new(range), 0, bench.memory(1), bench.access()).unwrap();
    let mut mapping = Some(mapping);
    let live = bench.simulator.live();
    let code = in_child(|| {
        let Some(Ok(())) = mapping.take().map(Mapping::close) else { return 1 };
        // It was not undone, so it is not taken back.
        if (usage.reserved().now, usage.mapped().now, usage.stranded()) == (R, G, 0) { 0 } else { 2 }
    });
    assert_eq!(code, Some(0));
    assert_eq!(bench.simulator.live(), live);
    mapping.take().unwrap().close().unwrap();
    assert_eq!((usage.reserved().now, usage.mapped().now), (0, 0));
    bench.assert_clean();
}

/// An exported descriptor is never number 0, which drivers take for a null pointer: not even where that is the next
/// that is free.
#[test]
fn no_descriptor_is_number_zero() {
    let bench = Bench::small();
    let code = in_child(|| {
        // A simulator of the child's own, since the inherited one is the parent's.
        let Ok(driver) = Simulator::new(Machine::small()).driver() else { return 1 };
        let Ok(device) = driver.device(0) else { return 2 };
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let properties = CUmemAllocationProp::pinned(device.location(), kind);
        let Some(size) = Granularity::new(G).and_then(|granularity| granularity.exact(G).ok()) else { return 3 };
        let Ok(memory) = Allocation::create(&driver, size, &properties) else { return 4 };
        // SAFETY: nothing of this process reads its standard input.
        drop(unsafe { OwnedFd::from_raw_fd(0) });
        let Ok(descriptor) = memory.export_posix_fd() else { return 5 };
        if descriptor.as_raw_fd() <= 2 {
            return 6;
        }
        if Allocation::import_posix_fd(&driver, descriptor.as_fd(), size).is_err() {
            return 7;
        }
        // Number 0 is free again.
        std::fs::File::open("/dev/null").map_or(8, |file| file.as_raw_fd())
    });
    assert_eq!(code, Some(0));
    bench.assert_clean();
}

/// A process that ends with live handles, after its driver has shut down, ends in silence.
#[test]
fn a_process_ends_quietly_with_handles_in_statics() {
    use std::cell::RefCell;
    use std::sync::{Mutex, OnceLock};

    const ROLE: &str = "CUVMM_HANDLES_END_WITH";
    static KEPT: OnceLock<Mutex<Vec<Mapping>>> = OnceLock::new();
    thread_local!(static OF_THREAD: RefCell<Vec<Mapping>> = const { RefCell::new(Vec::new()) });

    if let Some(role) = std::env::var_os(ROLE) {
        let bench = Bench::small();
        KEPT.get_or_init(Mutex::default).lock().unwrap().push(bench.mapping());
        OF_THREAD.with_borrow_mut(|kept| kept.push(bench.mapping()));
        if role == "shut down" {
            bench.simulator.shut_down();
        }
        return;
    }
    for role in ["alive", "shut down"] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["a_process_ends_quietly_with_handles_in_statics", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .output()
            .unwrap();
        assert!(output.status.success(), "{role}: {}", output.status);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{role}");
    }
}
