//! [`ForeignRange`]: a range of addresses and memory that another library made.
//!
//! # Safety
//! Each call is on what the range itself made, which is given back once: by whoever it was given away to, or by
//! [`ForeignRange::take_down`].
#![allow(unsafe_code)]

use cuvmm::Driver;
use cuvmm::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use crate::backend::Backend;
use crate::memory::G;

/// A reservation with mappings in it, made by the driver's own calls. Nothing is given back when it is dropped.
#[derive(Clone, Debug)]
pub struct ForeignRange {
    driver: Driver,
    location: CUmemLocation,
    /// Where it begins.
    pub address: CUdeviceptr,
    /// How many bytes are reserved.
    pub size: usize,
    mappings: Vec<Placed>,
}

/// Memory that is mapped.
#[derive(Clone, Copy, Debug)]
struct Placed {
    address: CUdeviceptr,
    bytes: usize,
    handle: Option<CUmemGenericAllocationHandle>,
}

impl ForeignRange {
    /// Reserves so many bytes.
    pub fn reserve(backend: &Backend, location: CUmemLocation, size: usize) -> Self {
        let driver = backend.driver.clone();
        let address = driver.mem_address_reserve(size, 0, CUdeviceptr(0)).expect("addresses");
        Self { driver, location, address, size, mappings: Vec::new() }
    }

    /// Reserves so many bytes, maps memory of so many granules each, one behind the other from the start, grants it
    /// to the device, and to the host where it is the host's, and releases the handles.
    pub fn make(backend: &Backend, location: CUmemLocation, granules: &[usize], size: usize) -> Self {
        let mut range = Self::reserve(backend, location, size);
        let mut offset = 0;
        for bytes in granules.iter().map(|granules| granules * G) {
            range.map(offset, bytes);
            offset += bytes;
        }
        for (index, _) in granules.iter().enumerate() {
            range.grant(index, &range.everybody(backend));
            range.release(index);
        }
        range
    }

    /// Read-write access for the first device, and for the host where the memory is the host's.
    pub fn everybody(&self, backend: &Backend) -> Vec<CUmemAccessDesc> {
        let is_host = self.location.location_type != CUmemLocationType::DEVICE;
        let places = [backend.device.location()].into_iter().chain(is_host.then_some(self.location));
        places.map(|location| CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }).collect()
    }

    /// Makes memory of so many bytes and maps it at that offset.
    pub fn map(&mut self, offset: usize, bytes: usize) {
        let properties = CUmemAllocationProp::pinned(self.location, CUmemAllocationHandleType::NONE);
        let handle = self.driver.mem_create(bytes, &properties).expect("memory");
        let address = self.address.checked_add(offset).expect("an address");
        // SAFETY: the memory was made just now, and nothing else is mapped there.
        unsafe { self.driver.mem_map(address, bytes, handle) }.expect("memory to map");
        self.mappings.push(Placed { address, bytes, handle: Some(handle) });
    }

    /// Grants access to the mapping of that number.
    pub fn grant(&self, index: usize, access: &[CUmemAccessDesc]) {
        let Placed { address, bytes, .. } = self.mappings[index];
        // SAFETY: it is the range's own mapping, and no work is on it.
        unsafe { self.driver.mem_set_access(address, bytes, access) }.expect("access to grant");
    }

    /// Releases the handle of the mapping of that number.
    pub fn release(&mut self, index: usize) {
        let handle = self.mappings[index].handle.take().expect("a handle");
        // SAFETY: it was taken, and so is given back once.
        unsafe { self.driver.mem_release(handle) }.expect("a handle to release");
    }

    /// How many bytes are mapped.
    pub fn mapped(&self) -> usize {
        self.mappings.iter().map(|placed| placed.bytes).sum()
    }

    /// Gives all of it back, which a driver accepts only of what is there as it was made.
    pub fn take_down(mut self) {
        for Placed { address, bytes, handle } in std::mem::take(&mut self.mappings) {
            // SAFETY: it is the range's own mapping, and no work is on it.
            unsafe { self.driver.mem_unmap(address, bytes) }.expect("memory that is still mapped");
            if let Some(handle) = handle {
                // SAFETY: it was taken, and so is given back once.
                unsafe { self.driver.mem_release(handle) }.expect("a handle to release");
            }
        }
        // SAFETY: nothing is mapped in it any more.
        unsafe { self.driver.mem_address_free(self.address, self.size) }.expect("addresses that are still reserved");
    }
}
