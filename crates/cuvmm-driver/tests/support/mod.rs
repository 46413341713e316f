//! A driver for tests that need to see the table and the decorator alone: two devices, and memory that is nothing
//! but handles and files. What it doesn't have answers that it is not supported.
//!
//! # Safety
//! Every method writes to the outputs that it is given and reads nothing else.
#![allow(unsafe_code)]
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, Failure, Hook, Invocation, RawDriver};

/// What the driver was asked to give back.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    next: AtomicU64,
    live: Mutex<Vec<u64>>,
}

impl Fake {
    /// How many references were made and not given back.
    pub(crate) fn live(&self) -> usize {
        self.handles().len()
    }

    fn handles(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.live.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn make(&self) -> CUmemGenericAllocationHandle {
        let handle = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.handles().push(handle);
        CUmemGenericAllocationHandle(handle)
    }
}

/// Writes an output that the caller gave.
fn put<T>(output: *mut T, value: T) -> CUresult {
    // SAFETY: the caller of each method passes an output that is valid for writing.
    unsafe { output.write(value) };
    CUresult::SUCCESS
}

fn put_text(output: *mut c_char, length: i32, text: &CStr) -> CUresult {
    let bytes = text.to_bytes_with_nul();
    assert!(bytes.len() <= usize::try_from(length).unwrap_or(0), "room for {text:?}");
    // SAFETY: the output has room for `length` bytes, which the text does not exceed.
    unsafe { output.copy_from(bytes.as_ptr().cast(), bytes.len()) };
    CUresult::SUCCESS
}

/// The identity of a device of this driver.
pub(crate) fn uuid(device: i32) -> CUuuid {
    let mut uuid = CUuuid { bytes: *b"0123456789abcdef" };
    uuid.bytes[15] = u8::try_from(device).unwrap_or(u8::MAX);
    uuid
}

// SAFETY: outputs are written on success, and handles are never the same.
unsafe impl RawDriver for Fake {
    unsafe fn cuInit(&self, _: u32) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuDriverGetVersion(&self, version: *mut i32) -> CUresult {
        put(version, 12040)
    }

    unsafe fn cuGetErrorName(&self, error: CUresult, name: *mut *const c_char) -> CUresult {
        match error {
            CUresult::OUT_OF_MEMORY => put(name, c"CUDA_ERROR_OUT_OF_MEMORY".as_ptr()),
            _ => CUresult::INVALID_VALUE,
        }
    }

    unsafe fn cuGetErrorString(&self, error: CUresult, text: *mut *const c_char) -> CUresult {
        match error {
            CUresult::OUT_OF_MEMORY => put(text, c"out of memory".as_ptr()),
            _ => CUresult::INVALID_VALUE,
        }
    }

    unsafe fn cuDeviceGetCount(&self, count: *mut i32) -> CUresult {
        put(count, 2)
    }

    unsafe fn cuDeviceGet(&self, device: *mut CUdevice, ordinal: i32) -> CUresult {
        put(device, CUdevice(ordinal + 10))
    }

    unsafe fn cuDeviceGetName(&self, name: *mut c_char, length: i32, _: CUdevice) -> CUresult {
        put_text(name, length, c"Fake device")
    }

    unsafe fn cuDeviceGetPCIBusId(&self, id: *mut c_char, length: i32, _: CUdevice) -> CUresult {
        put_text(id, length, c"0000:3B:00.0")
    }

    unsafe fn cuDeviceGetUuid(&self, output: *mut CUuuid, device: CUdevice) -> CUresult {
        put(output, uuid(device.0 - 10))
    }

    unsafe fn cuDeviceTotalMem(&self, bytes: *mut usize, _: CUdevice) -> CUresult {
        put(bytes, 1 << 30)
    }

    unsafe fn cuDeviceGetAttribute(
        &self,
        value: *mut i32,
        attribute: CUdevice_attribute,
        device: CUdevice,
    ) -> CUresult {
        match attribute {
            CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => put(value, 1),
            CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => put(value, 0),
            CUdevice_attribute::COMPUTE_CAPABILITY_MAJOR => put(value, 9),
            CUdevice_attribute::COMPUTE_CAPABILITY_MINOR => put(value, 0),
            CUdevice_attribute::HOST_NUMA_ID => put(value, device.0 - 11),
            _ => CUresult::INVALID_VALUE,
        }
    }

    unsafe fn cuDeviceCanAccessPeer(&self, can: *mut i32, device: CUdevice, peer: CUdevice) -> CUresult {
        put(can, i32::from(device != peer))
    }

    unsafe fn cuDeviceGetP2PAttribute(
        &self,
        value: *mut i32,
        attribute: CUdevice_P2PAttribute,
        source: CUdevice,
        destination: CUdevice,
    ) -> CUresult {
        if source == destination {
            return CUresult::INVALID_DEVICE;
        }
        put(value, i32::try_from(attribute.0).unwrap_or(0))
    }

    unsafe fn cuStreamQuery(&self, stream: CUstream) -> CUresult {
        if stream.is_null() { CUresult::SUCCESS } else { CUresult::NOT_READY }
    }

    unsafe fn cuEventQuery(&self, event: CUevent) -> CUresult {
        if event.is_null() { CUresult::SUCCESS } else { CUresult::NOT_READY }
    }

    unsafe fn cuThreadExchangeStreamCaptureMode(&self, mode: *mut CUstreamCaptureMode) -> CUresult {
        put(mode, CUstreamCaptureMode::GLOBAL)
    }

    unsafe fn cuPointerGetAttribute(&self, data: *mut c_void, _: CUpointer_attribute, _: CUdeviceptr) -> CUresult {
        put(data.cast::<u8>(), 1)
    }

    unsafe fn cuMemGetAccess(&self, flags: *mut u64, _: *const CUmemLocation, _: CUdeviceptr) -> CUresult {
        put(flags, 3)
    }

    unsafe fn cuMemAddressReserve(
        &self,
        address: *mut CUdeviceptr,
        _: usize,
        _: usize,
        hint: CUdeviceptr,
        _: u64,
    ) -> CUresult {
        put(address, hint)
    }

    unsafe fn cuMemGetAllocationGranularity(
        &self,
        granularity: *mut usize,
        _: *const CUmemAllocationProp,
        _: CUmemAllocationGranularity_flags,
    ) -> CUresult {
        put(granularity, 2 << 20)
    }

    unsafe fn cuMemCreate(
        &self,
        handle: *mut CUmemGenericAllocationHandle,
        _: usize,
        _: *const CUmemAllocationProp,
        _: u64,
    ) -> CUresult {
        put(handle, self.make())
    }

    unsafe fn cuMemRelease(&self, handle: CUmemGenericAllocationHandle) -> CUresult {
        let mut live = self.handles();
        match live.iter().position(|known| *known == handle.0) {
            Some(index) => {
                live.swap_remove(index);
                CUresult::SUCCESS
            }
            None => CUresult::INVALID_VALUE,
        }
    }

    unsafe fn cuMemExportToShareableHandle(
        &self,
        shareable: *mut c_void,
        _: CUmemGenericAllocationHandle,
        handle_type: CUmemAllocationHandleType,
        _: u64,
    ) -> CUresult {
        match (handle_type, File::open("/dev/null")) {
            (CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR, Ok(file)) => put(shareable.cast(), file.into_raw_fd()),
            (CUmemAllocationHandleType::FABRIC, _) => put(shareable.cast(), [7_u8; 64]),
            _ => CUresult::INVALID_VALUE,
        }
    }

    unsafe fn cuMemImportFromShareableHandle(
        &self,
        handle: *mut CUmemGenericAllocationHandle,
        _: *mut c_void,
        _: CUmemAllocationHandleType,
    ) -> CUresult {
        put(handle, self.make())
    }
}

/// Counts each call, and lets one of them fail.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    calls: Mutex<Vec<(Call, Vec<u64>)>>,
    after: AtomicUsize,
    fault: Mutex<Option<(Call, CUresult)>>,
}

impl Ledger {
    /// From now on `call` fails with `code`, before its effect.
    pub(crate) fn fail(&self, call: Call, code: CUresult) {
        *self.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((call, code));
    }

    /// From now on nothing fails.
    pub(crate) fn heal(&self) {
        *self.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
    }

    /// The calls since the last time, with their arguments.
    pub(crate) fn take(&self) -> Vec<(Call, Vec<u64>)> {
        std::mem::take(&mut *self.calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// The names of the calls since the last time.
    pub(crate) fn names(&self) -> Vec<Call> {
        self.take().into_iter().map(|(call, _)| call).collect()
    }

    /// How many calls reached the driver.
    pub(crate) fn made(&self) -> usize {
        self.after.load(Ordering::Relaxed)
    }
}

impl Hook for Ledger {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        let mut calls = self.calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        calls.push((invocation.call, invocation.arguments.to_vec()));
        let fault = *self.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        fault.filter(|(call, _)| *call == invocation.call).and_then(|(_, code)| Failure::new(code))
    }

    fn after(&self, _: &Invocation<'_>, _: CUresult) -> Option<Failure> {
        self.after.fetch_add(1, Ordering::Relaxed);
        None
    }
}
