//! What a driver takes of its process: threads and open files. There is one test here, so that the counts are exact.

#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, reason = "tests")]

#[path = "support/threads.rs"]
mod threads;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuvmm_driver::Driver;
use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, Simulator, kernels};
use threads::threads;

const CHUNK: usize = 64 << 10;
const STREAMS: usize = 64;

fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn start() -> (Simulator, Driver) {
    let simulator = Simulator::new(Machine::small());
    let driver = simulator.driver().unwrap();
    (simulator, driver)
}

/// Makes the context of device 0 current.
fn enter(driver: &Driver) {
    let mut context = CUcontext::NULL;
    // SAFETY: the output is a local.
    assert_eq!(unsafe { driver.raw().cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0)) }.0, 0);
    // SAFETY: numbers alone.
    assert_eq!(unsafe { driver.raw().cuCtxSetCurrent(context) }.0, 0);
}

/// Waits until there are so many threads again. A thread that was joined is counted for a moment still.
fn await_threads(count: usize) {
    let until = Instant::now() + Duration::from_secs(20);
    while threads() != count {
        assert!(Instant::now() < until, "{} threads are left, not {count}", threads());
        std::thread::yield_now();
    }
}

#[test]
fn threads_and_files_are_as_many_as_must_be() {
    let before = threads();
    a_stream_has_a_thread_while_the_driver_lives(before);
    a_thread_that_ended_leaves_no_stream_behind(before);
    a_dropped_driver_ends_what_spins_and_what_is_queued_behind_it(before);
    only_what_can_be_exported_has_a_file();
}

fn a_stream_has_a_thread_while_the_driver_lives(before: usize) {
    extern "C" fn nothing(_data: *mut c_void) {}
    let (simulator, driver) = start();
    let raw = driver.raw();
    enter(&driver);
    for made in 1..=STREAMS {
        let mut stream = CUstream::NULL;
        // SAFETY: the output is a local.
        assert_eq!(unsafe { raw.cuStreamCreate(&raw mut stream, CUstream_flags::NON_BLOCKING) }.0, 0);
        assert_eq!(threads(), before + made - 1, "none before there is work");
        // SAFETY: the function takes anything.
        assert_eq!(unsafe { raw.cuLaunchHostFunc(stream, Some(nothing), std::ptr::null_mut()) }.0, 0);
        assert_eq!(threads(), before + made);
    }
    drop((driver, simulator));
    await_threads(before);
}

fn a_thread_that_ended_leaves_no_stream_behind(before: usize) {
    extern "C" fn wait(_data: *mut c_void) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (_simulator, driver) = start();
    for _ in 0..STREAMS {
        let work = || {
            enter(&driver);
            // SAFETY: the function takes anything.
            let code = unsafe { driver.raw().cuLaunchHostFunc(CUstream::PER_THREAD, Some(wait), std::ptr::null_mut()) };
            assert_eq!(code.0, 0);
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    }
    await_threads(before);
}

fn a_dropped_driver_ends_what_spins_and_what_is_queued_behind_it(before: usize) {
    extern "C" fn never(_data: *mut c_void) {
        RAN.store(true, Ordering::Relaxed);
    }
    static RAN: AtomicBool = AtomicBool::new(false);
    /// Longer than the test waits.
    const LONG: u64 = 60_000_000_000;
    let (simulator, driver) = start();
    enter(&driver);
    let (mut address, mut nanoseconds) = (0_u64, LONG);
    // SAFETY: the text is a module's, the parameters are the function's, and the host function takes anything.
    unsafe {
        let module = driver.module_load_data(kernels::PTX).unwrap();
        let spin = driver.module_get_function(module, kernels::SPIN).unwrap();
        let mut parameters = [(&raw mut address).cast(), (&raw mut nanoseconds).cast()];
        driver.launch_kernel(spin, [1; 3], [1; 3], 0, CUstream::LEGACY, &mut parameters).unwrap();
        assert_eq!(driver.raw().cuLaunchHostFunc(CUstream::LEGACY, Some(never), std::ptr::null_mut()).0, 0);
    }
    assert_eq!(threads(), before + 1);
    drop((driver, simulator));
    await_threads(before);
    assert!(!RAN.load(Ordering::Relaxed));
}

fn only_what_can_be_exported_has_a_file() {
    let (simulator, driver) = start();
    let before = files();
    let of = |kind| CUmemAllocationProp::pinned(CUmemLocation::device(0), kind);
    let create = |kind| driver.mem_create(CHUNK, &of(kind)).unwrap();
    let handles: Vec<_> = (0..10_000).map(|_| create(CUmemAllocationHandleType::NONE)).collect();
    assert_eq!(files(), before, "ten thousand chunks need none");
    let exportable = create(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
    assert_eq!(files(), before + 1);
    let bytes = handles.len() * CHUNK;
    let range = driver.mem_address_reserve(bytes, 0, CUdeviceptr(0)).unwrap();
    let access = CUmemAccessDesc { location: CUmemLocation::device(0), flags: CUmemAccess_flags::READWRITE };
    for (index, &handle) in handles.iter().enumerate() {
        let address = CUdeviceptr(range.0 + (index * CHUNK) as u64);
        // SAFETY: the handle is alive, and the place reserved and empty.
        unsafe { driver.mem_map(address, CHUNK, handle) }.unwrap();
    }
    for handle in handles.into_iter().chain([exportable]) {
        // SAFETY: the reference is ours, and given back once.
        unsafe { driver.mem_release(handle) }.unwrap();
    }
    // SAFETY: all of it is mapped, and nothing runs.
    unsafe { driver.mem_set_access(range, bytes, &[access]) }.unwrap();
    assert_eq!(files(), before);
    // SAFETY: all of it is mapped, and nothing runs.
    unsafe { driver.mem_unmap(range, bytes) }.unwrap();
    // SAFETY: it is reserved, and empty.
    unsafe { driver.mem_address_free(range, bytes) }.unwrap();
    assert!(simulator.live().is_empty());
}
