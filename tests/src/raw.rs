//! The driver's calls alone, as somebody would make them who keeps account by hand.
//!
//! # Safety
//! What a call names was made just before by another of the same value, is used by nobody else, and goes once.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;

use cuvmm::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle,
};
use cuvmm::{Device, StreamRef};

/// Addresses, and the chunks that are mapped there one behind the other.
pub struct RawBuffer {
    device: Device,
    address: CUdeviceptr,
    reserved: usize,
    size: usize,
    chunks: Vec<(CUmemGenericAllocationHandle, usize)>,
}

impl RawBuffer {
    /// Reserves addresses.
    pub fn reserve(device: &Device, bytes: usize) -> Self {
        let address = device.driver().mem_address_reserve(bytes, 0, CUdeviceptr(0)).unwrap();
        Self { device: device.clone(), address, reserved: bytes, size: 0, chunks: Vec::new() }
    }

    /// Where it begins.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Where its addresses end.
    pub fn end(&self) -> CUdeviceptr {
        CUdeviceptr(self.address.0 + self.reserved as u64)
    }

    /// Creates memory and maps it behind what there is.
    pub fn add(&mut self, bytes: usize) {
        let properties = CUmemAllocationProp::pinned(self.device.location(), CUmemAllocationHandleType::NONE);
        let handle = self.device.driver().mem_create(bytes, &properties).unwrap();
        self.map(handle, bytes);
    }

    /// Maps memory behind what there is.
    pub fn map(&mut self, handle: CUmemGenericAllocationHandle, bytes: usize) {
        let (driver, location) = (self.device.driver(), self.device.location());
        let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE };
        let at = CUdeviceptr(self.address.0 + self.size as u64);
        assert!(self.size + bytes <= self.reserved);
        // SAFETY: the addresses are reserved, and nothing is mapped there; the handle is somebody's who is here.
        unsafe { driver.mem_map(at, bytes, handle) }.unwrap();
        // SAFETY: it was mapped just now.
        unsafe { driver.mem_set_access(at, bytes, &[access]) }.unwrap();
        self.chunks.push((handle, bytes));
        self.size += bytes;
    }

    /// Imports memory from a file and maps it behind what there is, when the driver has said where it is.
    pub fn import(&mut self, file: BorrowedFd<'_>, bytes: usize) {
        let driver = self.device.driver();
        let handle = driver.mem_import_posix_fd(file).unwrap();
        // SAFETY: the handle was made just now.
        let properties = unsafe { driver.mem_get_allocation_properties(handle) }.unwrap();
        assert_eq!(properties.location, self.device.location());
        self.map(handle, bytes);
    }

    /// Unmaps the last chunk, and releases its memory.
    pub fn cut(&mut self) {
        let handle = self.unmap_last();
        // SAFETY: it is ours.
        unsafe { self.device.driver().mem_release(handle) }.unwrap();
    }

    fn unmap_last(&mut self) -> CUmemGenericAllocationHandle {
        let (handle, bytes) = self.chunks.pop().unwrap();
        self.size -= bytes;
        // SAFETY: it is mapped there, and no work uses it.
        unsafe { self.device.driver().mem_unmap(CUdeviceptr(self.address.0 + self.size as u64), bytes) }.unwrap();
        handle
    }

    /// Maps all that there is at so many other addresses, too, after those behind its own could not be had.
    pub fn remap(&self, reserved: usize) -> Self {
        let (driver, behind) = (self.device.driver(), reserved - self.reserved);
        let elsewhere = driver.mem_address_reserve(behind, 0, self.end()).unwrap();
        assert_ne!(elsewhere, self.end());
        // SAFETY: it was reserved just now.
        unsafe { driver.mem_address_free(elsewhere, behind) }.unwrap();
        let mut remapped = Self::reserve(&self.device, reserved);
        for &(handle, bytes) in &self.chunks {
            remapped.map(handle, bytes);
        }
        remapped
    }

    /// Ends it, and leaves the first so many of its chunks to whoever has them, too.
    pub fn finish_beside(mut self, shared: usize) {
        while self.chunks.len() > shared {
            self.cut();
        }
        while !self.chunks.is_empty() {
            // Whoever has it releases it.
            let _ = self.unmap_last();
        }
        // SAFETY: nothing is mapped there any more.
        unsafe { self.device.driver().mem_address_free(self.address, self.reserved) }.unwrap();
    }

    /// Unmaps and releases everything.
    pub fn finish(self) {
        self.finish_beside(0);
    }
}

/// Waits for a stream.
pub fn synchronize(stream: &StreamRef) {
    // SAFETY: the stream is alive.
    unsafe { stream.driver().stream_synchronize(stream.as_raw()) }.unwrap();
}
