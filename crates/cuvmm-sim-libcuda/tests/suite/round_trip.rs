//! The whole round trip of virtual memory over the library: made, mapped, filled, copied, shared, grown, given back.
//!
//! # Safety
//! Everything is made by the test that uses it; host memory is slices that outlive the blocking calls.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;

use cuvmm_driver::sys::*;
use cuvmm_driver::{Driver, Error};

use crate::stand_in;

/// The size of each allocation.
pub(crate) const UNIT: usize = 2 << 20;

/// A driver with the first device's context current.
pub(crate) fn start() -> Driver {
    let driver = stand_in::load().unwrap();
    let context = driver.device(0).unwrap().primary_ctx_retain().unwrap();
    // SAFETY: the context is retained until the process ends.
    unsafe { driver.ctx_set_current(context) }.unwrap();
    driver
}

/// Shareable memory of the first device.
pub(crate) fn make(driver: &Driver) -> CUmemGenericAllocationHandle {
    let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
    driver.mem_create(UNIT, &CUmemAllocationProp::pinned(CUmemLocation::device(0), kind)).unwrap()
}

/// Gives a handle back, which may be none.
pub(crate) fn release(driver: &Driver, handle: CUmemGenericAllocationHandle) -> Result<(), Error> {
    // SAFETY: the simulator looks the value up, and harms nothing where it is none of its own.
    unsafe { driver.mem_release(handle) }
}

/// A descriptor of memory that another process can import.
pub(crate) fn export(driver: &Driver, handle: CUmemGenericAllocationHandle) -> OwnedFd {
    // SAFETY: the handle is the caller's own.
    unsafe { driver.mem_export_posix_fd(handle) }.unwrap()
}

/// Maps memory at an address of a reservation, for the first device.
pub(crate) fn map(driver: &Driver, address: CUdeviceptr, handle: CUmemGenericAllocationHandle) {
    let access = CUmemAccessDesc { location: CUmemLocation::device(0), flags: CUmemAccess_flags::READWRITE };
    // SAFETY: handle and address are the caller's own.
    unsafe {
        driver.mem_map(address, UNIT, handle).unwrap();
        driver.mem_set_access(address, UNIT, &[access]).unwrap();
    }
}

pub(crate) fn write(driver: &Driver, address: CUdeviceptr, bytes: &[u8]) {
    // SAFETY: the source is a slice.
    let code = unsafe { driver.raw().cuMemcpyHtoD(address, bytes.as_ptr().cast(), bytes.len()) };
    assert_eq!(code, CUresult::SUCCESS);
}

pub(crate) fn read(driver: &Driver, address: CUdeviceptr) -> Vec<u8> {
    let mut bytes = vec![0; UNIT];
    // SAFETY: the destination has that many bytes.
    let code = unsafe { driver.raw().cuMemcpyDtoH(bytes.as_mut_ptr().cast(), address, UNIT) };
    assert_eq!(code, CUresult::SUCCESS);
    bytes
}

pub(crate) fn pattern(seed: u8) -> Vec<u8> {
    (0..UNIT).map(|index| (index % 249) as u8 ^ seed).collect()
}

#[test]
fn memory_is_made_mapped_grown_and_given_back() {
    let driver = start();
    let range = driver.mem_address_reserve(2 * UNIT, 0, CUdeviceptr(0)).unwrap();
    let behind = CUdeviceptr(range.0 + UNIT as u64);
    let (first, second) = (make(&driver), make(&driver));
    map(&driver, range, first);
    write(&driver, range, &pattern(1));
    map(&driver, behind, second);
    // SAFETY: both ends are mapped and granted.
    let code = unsafe { driver.raw().cuMemcpyDtoD(behind, range, UNIT) };
    assert_eq!(code, CUresult::SUCCESS);
    // SAFETY: the memory is mapped and granted.
    let code = unsafe { driver.raw().cuMemsetD8(range, 7, UNIT) };
    assert_eq!(code, CUresult::SUCCESS);
    assert!(read(&driver, behind) == pattern(1));
    assert!(read(&driver, range) == [7; UNIT]);
    // SAFETY: nothing runs on them, and each is given back once.
    unsafe {
        driver.mem_unmap(range, 2 * UNIT).unwrap();
        driver.mem_release(first).unwrap();
        driver.mem_release(second).unwrap();
        driver.mem_address_free(range, 2 * UNIT).unwrap();
    }
}
