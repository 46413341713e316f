//! Processes with the library loaded: two that share memory, and one that is forked at a bad moment.
//!
//! # Safety
//! A forked child makes one call of the library, or asks for the driver again, and ends. Its parent waits for it by its
//! number.
#![allow(unsafe_code)]

use std::io::stdin;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_driver::{CUresult, Driver, Error, LoadError};

use crate::round_trip::{UNIT, export, make, map, pattern, read, start, write};
use crate::stand_in::{Folder, alone, open, play, role};

#[test]
fn memory_is_shared_with_another_process_that_loaded_the_library() {
    let driver = start();
    let address = driver.mem_address_reserve(UNIT, 0, CUdeviceptr(0)).unwrap();
    if role().is_some() {
        // Not as number 0, which an import reads as a null pointer.
        let descriptor = stdin().as_fd().try_clone_to_owned().unwrap();
        let memory = driver.mem_import_posix_fd(descriptor.as_fd()).unwrap();
        map(&driver, address, memory);
        assert!(read(&driver, address) == pattern(1));
        write(&driver, address, &pattern(2));
        return;
    }
    let memory = make(&driver);
    map(&driver, address, memory);
    write(&driver, address, &pattern(1));
    let descriptor = export(&driver, memory);
    let test = "processes::memory_is_shared_with_another_process_that_loaded_the_library";
    play(test, "importer", &[], Stdio::from(descriptor));
    assert!(read(&driver, address) == pattern(2));
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

#[test]
fn a_process_that_is_forked_during_the_first_calls_does_not_wait_for_them() {
    const THREADS: usize = 16;
    const NO_HANG: i32 = 1;
    let test = "processes::a_process_that_is_forked_during_the_first_calls_does_not_wait_for_them";
    // Each process makes its first call once.
    for _ in 0..8 {
        let play = alone(test, &[], || {
            let library = open();
            // SAFETY: that is the call's signature.
            let init = unsafe { library.get::<unsafe extern "C" fn(u32) -> CUresult>(b"cuInit\0") }.unwrap();
            let together = Barrier::new(THREADS + 1);
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        together.wait();
                        // SAFETY: it takes a number.
                        assert!(unsafe { init(0) }.is_success());
                    });
                }
                together.wait();
                // SAFETY: the child makes one call, takes nothing of the threads', and ends.
                let child = unsafe { fork() };
                if child == 0 {
                    // SAFETY: it takes a number.
                    let _ = unsafe { init(0) };
                    // SAFETY: nothing of the process is needed any more.
                    unsafe { _exit(0) };
                }
                let deadline = Instant::now() + Duration::from_secs(10);
                let mut status = 0;
                // SAFETY: the child is ours, and the status a local.
                while unsafe { waitpid(child, &raw mut status, NO_HANG) } == 0 {
                    assert!(Instant::now() < deadline, "it waits");
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(status, 0);
            });
        });
        if play.is_none() {
            return;
        }
    }
}

/// The system's driver is one for the whole process, and its children have no other.
#[test]
fn a_forked_child_of_a_process_that_loaded_the_driver_is_told_so() {
    let folder = Folder::new();
    let test = "processes::a_forked_child_of_a_process_that_loaded_the_driver_is_told_so";
    alone(test, &[("LD_LIBRARY_PATH", folder.path())], || {
        let driver = Driver::load().unwrap();
        assert_eq!(Driver::load().unwrap(), driver);
        // SAFETY: the child asks what it has inherited, takes no lock, and ends.
        let child = unsafe { fork() };
        if child == 0 {
            let is_told = matches!(Driver::load(), Err(LoadError::Init(Error::Forked)));
            // SAFETY: nothing of the process is needed any more.
            unsafe { _exit(i32::from(!is_told)) };
        }
        let mut status = -1;
        // SAFETY: the child is ours, and the status a local.
        assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(Driver::load().unwrap(), driver);
    });
}
