//! Copies between a buffer and the host, and fills: what users and tests need to see bytes.
//!
//! Each runs on the stream given, or on one of the resource's own that waits for no other, and is over when it
//! returns. Lengths are exact, 0 bytes are fine, and nothing is allocated.
//!
//! # Safety
//! Ranges are checked to lie within the buffer, whose memory is mapped while it is borrowed. Host memory is borrowed
//! until the work on it has ended: until a wait for it has succeeded, or failed because the context is broken and runs
//! nothing any more. A wait that fails in another way is made again, past a capture that began in between.
#![allow(unsafe_code)]

use cuvmm_driver::Driver;
use cuvmm_driver::sys::{CUdeviceptr, CUstream};

use crate::buffer::VirtualMemoryBuffer;
use crate::capture::{Session, is_capture_code};
use crate::error::Error;
use crate::stream::StreamRef;

impl VirtualMemoryBuffer {
    /// Copies `source` to the bytes from `offset` on. Not ordered after work on other streams.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::HostCallback`]; what the driver answers.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn copy_from_host(&self, offset: usize, source: &[u8]) -> Result<(), Error> {
        self.transfer_from(None, offset, source)
    }

    /// As [`copy_from_host`](Self::copy_from_host), behind the work queued on `stream`. A default stream's token
    /// stands for the legacy default stream of the device's primary context.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host); [`Error::StreamCapturing`], values of two drivers.
    pub fn copy_from_host_on(&self, stream: &StreamRef, offset: usize, source: &[u8]) -> Result<(), Error> {
        self.transfer_from(Some(stream), offset, source)
    }

    /// Copies the bytes from `offset` on to `destination`. Not ordered after work on other streams.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host).
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn copy_to_host(&self, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        self.transfer_to(None, offset, destination)
    }

    /// As [`copy_to_host`](Self::copy_to_host), behind the work queued on `stream`.
    ///
    /// # Errors
    /// As [`copy_from_host_on`](Self::copy_from_host_on).
    pub fn copy_to_host_on(&self, stream: &StreamRef, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        self.transfer_to(Some(stream), offset, destination)
    }

    /// Sets `bytes` bytes from `offset` on to `value`. Not ordered after work on other streams.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host).
    #[doc(alias = "cuMemsetD8Async")]
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<(), Error> {
        self.transfer_fill(None, offset, bytes, value)
    }

    /// As [`fill`](Self::fill), behind the work queued on `stream`.
    ///
    /// # Errors
    /// As [`copy_from_host_on`](Self::copy_from_host_on).
    pub fn fill_on(&self, stream: &StreamRef, offset: usize, bytes: usize, value: u8) -> Result<(), Error> {
        self.transfer_fill(Some(stream), offset, bytes, value)
    }

    /// Sets the memory that lies `offset` bytes and more from the address to zero, also what is behind the size. Where
    /// that fails the buffer is gone, as if it had not been made.
    pub(crate) fn zeroed_from(self, offset: usize) -> Result<Self, Error> {
        let end = self.range().end();
        let zeroed = self.transfer_within(end, None, offset, end - offset, |driver, address, stream| {
            // SAFETY: the range was checked.
            unsafe { driver.memset_d8_async(address, 0, end - offset, stream) }
        });
        match zeroed {
            Ok(()) => Ok(self),
            Err(error) => {
                self.discard();
                Err(error)
            }
        }
    }

    fn transfer_from(&self, stream: Option<&StreamRef>, offset: usize, source: &[u8]) -> Result<(), Error> {
        self.transfer(stream, offset, source.len(), |driver, address, stream| {
            // SAFETY: the range was checked, and `source` is borrowed until the stream was waited for.
            unsafe { driver.memcpy_htod_async(address, source.as_ptr().cast(), source.len(), stream) }
        })
    }

    fn transfer_to(&self, stream: Option<&StreamRef>, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        let bytes = destination.len();
        self.transfer(stream, offset, bytes, |driver, address, stream| {
            // SAFETY: the range was checked, and `destination` is borrowed until the stream was waited for.
            unsafe { driver.memcpy_dtoh_async(destination.as_mut_ptr().cast(), address, bytes, stream) }
        })
    }

    fn transfer_fill(&self, stream: Option<&StreamRef>, offset: usize, bytes: usize, value: u8) -> Result<(), Error> {
        self.transfer(stream, offset, bytes, |driver, address, stream| {
            // SAFETY: the range was checked.
            unsafe { driver.memset_d8_async(address, value, bytes, stream) }
        })
    }

    /// Queues work on `bytes` bytes from `offset` on, within the size, and waits for it.
    fn transfer(
        &self,
        stream: Option<&StreamRef>,
        offset: usize,
        bytes: usize,
        queue: impl FnOnce(&Driver, CUdeviceptr, CUstream) -> Result<(), cuvmm_driver::Error>,
    ) -> Result<(), Error> {
        self.transfer_within(self.size(), stream, offset, bytes, queue)
    }

    /// As [`transfer`](Self::transfer), within the first `size` bytes, which are mapped.
    fn transfer_within(
        &self,
        size: usize,
        stream: Option<&StreamRef>,
        offset: usize,
        bytes: usize,
        queue: impl FnOnce(&Driver, CUdeviceptr, CUstream) -> Result<(), cuvmm_driver::Error>,
    ) -> Result<(), Error> {
        let out_of_bounds = Error::OutOfBounds { offset, bytes, size };
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(out_of_bounds);
        }
        if let Some(stream) = stream {
            self.driver().require_same(stream.driver())?;
        }
        if bytes == 0 {
            return Ok(());
        }
        let address = self.address().checked_add(offset).ok_or(out_of_bounds)?;
        let driver = self.driver();
        if driver.is_in_host_function()? {
            return Err(Error::HostCallback);
        }
        let stream = match stream {
            Some(stream) => self.resolve(stream)?,
            None => self.resource().own_stream()?,
        };
        let session = Session::require(stream.target())?;
        if session.is_capturing()? {
            return Err(Error::StreamCapturing);
        }
        // Waited for also where queuing failed: what a failed call did is not known.
        let queued = queue(driver, address, stream.target().stream());
        let finished = session.finish();
        if let Err(error) = &finished {
            // Nor is whether the work is over: the buffer waits for the stream before it lets go.
            self.fence_stream(&stream);
            if is_capture_code(error.code()) {
                return Err(Error::StreamCapturing);
            }
        }
        Ok(queued.and(finished)?)
    }
}
