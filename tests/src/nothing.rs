//! [`Nothing`]: a driver whose calls do nothing, for what the layers themselves cost.
//!
//! # Safety
//! It hands out addresses that nobody ever reads or writes through, and files that are the caller's to close.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::hint::black_box;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm::CUresult;
use cuvmm::driver::RawDriver;
use cuvmm::driver::sys::*;

use crate::memory::G;

/// A driver that says yes.
///
/// What it exports are real files, duplicates of one that is `/dev/null`: to make one and to close it is the system's share
/// of what an export costs on it, one call of the system each.
#[derive(Default)]
pub struct Nothing {
    next: AtomicU64,
    is_hint_granted: bool,
    /// What is exported; nothing can be where it is not there.
    exported: Option<OwnedFd>,
}

impl Nothing {
    /// One that grants every hint.
    pub fn granting() -> Self {
        Self { is_hint_granted: true, ..Self::default() }
    }

    /// One that grants every hint, and exports and imports.
    pub fn sharing() -> Self {
        let null = File::open("/dev/null").expect("a file to export");
        Self { exported: Some(null.into()), ..Self::granting() }
    }

    /// One that grants none.
    pub fn elsewhere() -> Self {
        Self::default()
    }
}

// SAFETY: each output is written, and an address is given once; what it names is never used.
unsafe impl RawDriver for Nothing {
    unsafe fn cuInit(&self, _: u32) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuDriverGetVersion(&self, version: *mut i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { version.write(13000) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGetCount(&self, count: *mut i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { count.write(1) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGet(&self, device: *mut CUdevice, ordinal: i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { device.write(CUdevice(ordinal)) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGetUuid(&self, uuid: *mut CUuuid, _: CUdevice) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { uuid.write(CUuuid { bytes: [7; 16] }) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGetAttribute(&self, value: *mut i32, _: CUdevice_attribute, _: CUdevice) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { value.write(1) };
        CUresult::SUCCESS
    }

    unsafe fn cuCtxGetCurrent(&self, context: *mut CUcontext) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { context.write(CUcontext::NULL) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemGetAllocationGranularity(
        &self,
        granularity: *mut usize,
        _: *const CUmemAllocationProp,
        _: CUmemAllocationGranularity_flags,
    ) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { granularity.write(G) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemAddressReserve(
        &self,
        address: *mut CUdeviceptr,
        size: usize,
        _: usize,
        hint: CUdeviceptr,
        _: u64,
    ) -> CUresult {
        let elsewhere = || CUdeviceptr(self.next.fetch_add(1 << 40, Ordering::Relaxed) + (1 << 40));
        black_box(size);
        // SAFETY: the caller's output.
        unsafe { address.write(if self.is_hint_granted && hint.0 != 0 { hint } else { elsewhere() }) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemAddressFree(&self, _: CUdeviceptr, _: usize) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuMemCreate(
        &self,
        handle: *mut CUmemGenericAllocationHandle,
        _: usize,
        _: *const CUmemAllocationProp,
        _: u64,
    ) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { handle.write(CUmemGenericAllocationHandle(1)) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemRelease(&self, _: CUmemGenericAllocationHandle) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuMemMap(&self, _: CUdeviceptr, _: usize, _: usize, _: CUmemGenericAllocationHandle, _: u64) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuMemUnmap(&self, _: CUdeviceptr, _: usize) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuMemSetAccess(&self, _: CUdeviceptr, _: usize, _: *const CUmemAccessDesc, _: usize) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuMemExportToShareableHandle(
        &self,
        shareable: *mut c_void,
        _: CUmemGenericAllocationHandle,
        _: CUmemAllocationHandleType,
        _: u64,
    ) -> CUresult {
        let Some(file) = self.exported.as_ref().and_then(|file| file.try_clone().ok()) else {
            return CUresult::NOT_SUPPORTED;
        };
        // SAFETY: the caller's output, which for a file is a number.
        unsafe { shareable.cast::<i32>().write(file.into_raw_fd()) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemImportFromShareableHandle(
        &self,
        handle: *mut CUmemGenericAllocationHandle,
        _: *mut c_void,
        _: CUmemAllocationHandleType,
    ) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { handle.write(CUmemGenericAllocationHandle(1)) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemGetAllocationPropertiesFromHandle(
        &self,
        properties: *mut CUmemAllocationProp,
        _: CUmemGenericAllocationHandle,
    ) -> CUresult {
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        // SAFETY: the caller's output.
        unsafe { properties.write(CUmemAllocationProp::pinned(CUmemLocation::device(0), kind)) };
        CUresult::SUCCESS
    }
}
