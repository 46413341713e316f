//! Ordinary memory, copies and fills, and what is known of an address.
//!
//! # Safety
//! Outputs are ours and read after success only; that ranges are valid until queued work on them is done is the
//! callers' promise.
#![allow(unsafe_code)]

use std::ffi::c_void;

use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// What nobody uses at the moment; other processes count too.
    pub free: usize,
    /// All of it.
    pub total: usize,
}

impl Driver {
    /// `cuMemGetInfo`: the memory of the current context's device.
    ///
    /// # Errors
    /// 201 without a current context; the failure of earlier work.
    #[doc(alias = "cuMemGetInfo")]
    pub fn mem_get_info(&self) -> Result<MemoryInfo, Error> {
        let mut info = MemoryInfo::default();
        // SAFETY: both outputs are ours.
        let code = unsafe { self.calls()?.cuMemGetInfo(&raw mut info.free, &raw mut info.total) };
        self.check(Call::cuMemGetInfo, code)?;
        Ok(info)
    }

    /// `cuMemAlloc`: ordinary memory of the current context.
    ///
    /// # Errors
    /// 1 for no bytes, 2 when there is not so much memory, 201 without a current context, 900 while something
    /// captures and the thread's mode forbids it, which breaks the capture.
    #[doc(alias = "cuMemAlloc")]
    pub fn mem_alloc(&self, size: usize) -> Result<CUdeviceptr, Error> {
        let mut address = CUdeviceptr::default();
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuMemAlloc(&raw mut address, size) };
        self.check(Call::cuMemAlloc, code)?;
        Ok(address)
    }

    /// `cuMemFree`: gives ordinary memory back.
    ///
    /// # Safety
    /// `address` is what [`mem_alloc`](Self::mem_alloc) of this driver gave, and nobody uses the memory any more.
    ///
    /// # Errors
    /// 1 for any other address.
    #[doc(alias = "cuMemFree")]
    pub unsafe fn mem_free(&self, address: CUdeviceptr) -> Result<(), Error> {
        // SAFETY: the caller owns the memory.
        let code = unsafe { self.calls()?.cuMemFree(address) };
        self.check(Call::cuMemFree, code)
    }

    /// `cuMemcpyHtoDAsync`: queues a copy from the host. Pageable memory may be read before this returns.
    ///
    /// # Safety
    /// Both ranges are valid, the first for the host to read and the second for the stream's device to write,
    /// until the copy is done; `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// 1 for a range without access; the failure of earlier work.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub unsafe fn memcpy_htod_async(
        &self,
        destination: CUdeviceptr,
        source: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for ranges and stream.
        let code = unsafe { self.calls()?.cuMemcpyHtoDAsync(destination, source, bytes, stream) };
        self.check(Call::cuMemcpyHtoDAsync, code)
    }

    /// `cuMemcpyDtoHAsync`: queues a copy to the host. Pageable memory may be written before this returns.
    ///
    /// # Safety
    /// Both ranges are valid, the first for the stream's device to read and the second for writing, until the
    /// copy is done; `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Self::memcpy_htod_async).
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub unsafe fn memcpy_dtoh_async(
        &self,
        destination: *mut c_void,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for ranges and stream.
        let code = unsafe { self.calls()?.cuMemcpyDtoHAsync(destination, source, bytes, stream) };
        self.check(Call::cuMemcpyDtoHAsync, code)
    }

    /// `cuMemcpyDtoDAsync`: queues a copy within device memory.
    ///
    /// # Safety
    /// Both ranges are valid for the stream's device until the copy is done, and don't overlap; `stream` is alive
    /// and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Self::memcpy_htod_async).
    #[doc(alias = "cuMemcpyDtoDAsync")]
    pub unsafe fn memcpy_dtod_async(
        &self,
        destination: CUdeviceptr,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for ranges and stream.
        let code = unsafe { self.calls()?.cuMemcpyDtoDAsync(destination, source, bytes, stream) };
        self.check(Call::cuMemcpyDtoDAsync, code)
    }

    /// `cuMemsetD8Async`: queues setting `count` bytes to `value`.
    ///
    /// # Safety
    /// The range is valid for the stream's device to write until that is done; `stream` is alive and of this
    /// driver, or a default-stream token.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Self::memcpy_htod_async).
    #[doc(alias = "cuMemsetD8Async")]
    pub unsafe fn memset_d8_async(
        &self,
        destination: CUdeviceptr,
        value: u8,
        count: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for range and stream.
        let code = unsafe { self.calls()?.cuMemsetD8Async(destination, value, count, stream) };
        self.check(Call::cuMemsetD8Async, code)
    }

    /// `cuMemsetD32Async`: queues setting `count` words of four bytes to `value`.
    ///
    /// # Safety
    /// As [`memset_d8_async`](Self::memset_d8_async), for four times `count` bytes.
    ///
    /// # Errors
    /// 1 for an address that is no multiple of four, and as [`memcpy_htod_async`](Self::memcpy_htod_async).
    #[doc(alias = "cuMemsetD32Async")]
    pub unsafe fn memset_d32_async(
        &self,
        destination: CUdeviceptr,
        value: u32,
        count: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for range and stream.
        let code = unsafe { self.calls()?.cuMemsetD32Async(destination, value, count, stream) };
        self.check(Call::cuMemsetD32Async, code)
    }

    /// `cuMemGetAddressRange`: beginning and length of the memory around `address`: for virtual memory the one
    /// mapping. Safe: it only asks.
    ///
    /// # Errors
    /// 500 where there is no memory, 201 without a current context.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn mem_get_address_range(&self, address: CUdeviceptr) -> Result<(CUdeviceptr, usize), Error> {
        let mut base = CUdeviceptr::default();
        let mut size = 0;
        // SAFETY: both outputs are ours; the address is looked up, not read through.
        let code = unsafe { self.calls()?.cuMemGetAddressRange(&raw mut base, &raw mut size, address) };
        self.check(Call::cuMemGetAddressRange, code)?;
        Ok((base, size))
    }

    /// `cuPointerGetAttribute`: a fact about `address`, as a number. Safe: it only asks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an attribute that [`CUpointer_attribute`] doesn't name, since its answer may
    /// be wider than a number; 1 where there is no memory, or where the driver is older than the attribute; 201
    /// without a current context.
    #[doc(alias = "cuPointerGetAttribute")]
    pub fn pointer_get_attribute(&self, attribute: CUpointer_attribute, address: CUdeviceptr) -> Result<u64, Error> {
        let call = Call::cuPointerGetAttribute;
        if !attribute.fits_a_number() {
            return Err(Error::InvalidArgument { call, reason: "the width of this attribute's answer is not known" });
        }
        let mut value = 0_u64;
        // SAFETY: every attribute let through writes at most eight bytes, which the output has; the address is
        // looked up, not read through.
        let code = unsafe { self.calls()?.cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
        self.check(call, code)?;
        // The driver wrote 1, 4 or 8 of the bytes; CUDA's hosts are little-endian, so those are the low ones.
        Ok(value)
    }
}
