//! A driver in a forked child.
//!
//! # Safety
//! A child that is forked here asks the driver that it inherited, which makes no call and takes no lock there, and ends
//! by `_exit`: it needs nothing that another thread could have held. Its allocator is the C library's, which `fork`
//! leaves usable.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, Device, Driver, Error, Hooked, OfProcess, Probe, StrandedKind};
use support::{Fake, Ledger};

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn alarm(seconds: u32) -> u32;
    safe fn _exit(status: i32) -> !;
    unsafe fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
}

/// Runs `work` in a forked child, which is killed if it is not over in five seconds, and gives its exit code; none for
/// a child that was killed.
fn in_child(work: impl FnOnce() -> i32) -> Option<i32> {
    let child = fork();
    if child == 0 {
        alarm(5);
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

fn start() -> (Device, Arc<Ledger>) {
    let ledger = Arc::new(Ledger::default());
    let driver = Driver::new(Hooked::new(Fake::default(), Arc::clone(&ledger))).unwrap();
    (driver.device(0).unwrap(), ledger)
}

#[test]
fn a_forked_child_is_refused_without_a_call_and_told_what_needs_none() {
    let (device, ledger) = start();
    let driver = device.driver();
    driver.require_own_process().unwrap();
    assert!(!driver.is_forked());
    let uuid = device.uuid().unwrap();
    let other = driver.device(1).unwrap();
    ledger.take();
    let code = in_child(|| {
        let refused = [
            driver.require_own_process(),
            driver.is_in_host_function().map(drop),
            driver.mem_address_reserve(2 << 20, 0, CUdeviceptr(0)).map(drop),
            driver.mem_import_posix_fd(std::io::stderr().as_fd()).map(drop),
            driver.stream_create(CUstream_flags::NON_BLOCKING).map(drop),
            driver.device_by_uuid(support::uuid(1)).map(drop),
            device.name().map(drop),
            device.supports_virtual_memory().map(drop),
            device.can_access_peer(&other).map(drop),
            device.primary_ctx_is_active().map(drop),
            other.uuid().map(drop),
        ];
        if refused.iter().any(|result| *result != Err(Error::Forked)) {
            return 1;
        }
        // What is known without a call.
        if driver.device_count() != 2 || device.uuid() != Ok(uuid) || driver.may_drop("nothing") {
            return 2;
        }
        // Nothing is lost here: all of it is the parent's.
        driver.strand(StrandedKind::Other, &Error::Forked, "nothing");
        if driver.stranded().is_empty() && ledger.names().is_empty() { 0 } else { 3 }
    });
    assert_eq!(code, Some(0));
    assert!(other.uuid().is_ok(), "nothing has changed for the parent");
}

/// Other threads hold a probe's locks as often as not when the process is forked: the one of a kind while they probe it,
/// which they do over and over for want of memory, and the one of all kinds whenever they look one up.
#[test]
fn a_forked_child_waits_for_no_probe() {
    let (device, ledger) = start();
    let [short, known] = [CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR, CUmemAllocationHandleType::NONE];
    ledger.fail(Call::cuMemExportToShareableHandle, CUresult::OUT_OF_MEMORY);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert!(!device.probe(short).is_available());
                ledger.take();
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(device.probed(known).is_none());
                }
            });
        }
        let _over = Over(&is_over);
        for round in 0..200 {
            let code = in_child(|| {
                let refused = |probe| matches!(probe, Probe::Refused { error: Error::Forked, .. });
                let is_told = device.probed(short).is_none() && device.posix_fd_file().is_none();
                if is_told && refused(device.probe(short)) && refused(device.probe(known)) { 0 } else { 1 }
            });
            assert_eq!(code, Some(0), "round {round}: none is a child that hung");
        }
    });
    assert!(device.driver().stranded().is_empty());
}

/// Also where its parent held the value's lock, and whoever asks first makes it.
#[test]
fn a_forked_child_has_a_value_of_its_own() {
    static LIST: OfProcess<Mutex<Vec<u32>>> = OfProcess::new();
    assert!(LIST.get().is_none());
    let lists = thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| LIST.get_or_make(Mutex::default)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(lists.iter().all(|list| std::ptr::eq(*list, LIST.get().unwrap())));
    let mut list = lists[0].lock().unwrap();
    list.push(1);
    let code = in_child(|| {
        let is_made = LIST.get().is_some();
        let list = LIST.get_or_make(Mutex::default).lock().unwrap();
        if !is_made && list.is_empty() && LIST.get().is_some() { 0 } else { 1 }
    });
    assert_eq!(code, Some(0));
    assert_eq!((LIST.get().unwrap().try_lock().is_err(), list.len()), (true, 1), "the parent's is as it was");
}
