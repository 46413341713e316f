//! What the layers themselves cost: allocate, grow and close on a driver whose calls do nothing.
//!
//! # Safety
//! The driver hands out addresses that nobody ever reads or writes through.
#![allow(unsafe_code)]
#![allow(missing_docs, reason = "the functions are criterion's")]
#![allow(clippy::unwrap_used, reason = "a benchmark stops at what it did not expect")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{Criterion, criterion_group, criterion_main};
use cuvmm::driver::RawDriver;
use cuvmm::driver::sys::*;
use cuvmm::{CUresult, Driver, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};

const G: usize = 2 << 20;

/// A driver that says yes.
#[derive(Default)]
struct Nothing {
    next: AtomicU64,
    /// Whether a hint is granted.
    grants: bool,
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
        unsafe { address.write(if self.grants && hint.0 != 0 { hint } else { elsewhere() }) };
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
}

fn resource(grants: bool) -> VirtualMemoryResource {
    let driver = Driver::new(Nothing { grants, ..Nothing::default() }).unwrap();
    VirtualMemoryResource::new(&driver.device(0).unwrap(), Options::new().release(Release::Caller)).unwrap()
}

/// A buffer of that many chunks.
fn chain(resource: &VirtualMemoryResource, chunks: usize) -> VirtualMemoryBuffer {
    let mut buffer = resource.allocate_with_capacity(G, chunks * G).unwrap();
    for chunk in 2..=chunks {
        buffer = buffer.grow_into(chunk * G).unwrap();
    }
    buffer
}

fn own_cost(criterion: &mut Criterion) {
    criterion.bench_function("own/allocate-close", |bencher| {
        let resource = resource(true);
        bencher.iter(|| resource.allocate(black_box(G)).unwrap().close().unwrap());
    });
    for chunks in [1, 100, 10_000] {
        for (name, grants, outcome) in
            [("own/grow-in-place-close", true, Outcome::InPlace), ("own/grow-move-close", false, Outcome::Moved)]
        {
            let resource = resource(grants);
            let buffer = chain(&resource, chunks);
            let size = buffer.capacity() + G;
            criterion.bench_function(&format!("{name}/{chunks}"), |bencher| {
                bencher.iter(|| {
                    let grown = buffer.grow(black_box(size)).unwrap();
                    assert_eq!(grown.outcome(), Some(outcome));
                    grown.close().unwrap();
                });
            });
        }
    }
}

criterion_group!(benches, own_cost);
criterion_main!(benches);
