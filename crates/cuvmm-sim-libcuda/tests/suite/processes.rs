//! Two processes, each with the library loaded, share memory.

use std::io::stdin;
use std::os::fd::AsFd;
use std::process::Stdio;

use cuvmm_driver::sys::CUdeviceptr;

use crate::round_trip::{UNIT, export, make, map, pattern, read, start, write};
use crate::stand_in::{play, role};

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
