//! Copies between a buffer and the host, and fills: what users and tests need to see bytes.
//!
//! Each runs on the stream given, or on one of the resource's own that waits for no other, and is over when it
//! returns. Memory of the host is copied and filled by the host where no stream is given. Lengths are exact, 0 bytes
//! are fine. The driver is asked once for all bytes of a device's memory, and once a mapping for the host's.
//!
//! # Safety
//! Ranges are checked to lie within the buffer, whose memory is mapped while it is borrowed. Host memory is borrowed
//! until the work on it has ended: until a wait for it has succeeded, or failed because the context is broken and runs
//! nothing any more. A wait that fails in another way is made again, past a capture that began in between.
#![allow(unsafe_code)]

use cuvmm_driver::Driver;
use cuvmm_driver::sys::{CUdeviceptr, CUmemAccessDesc, CUmemLocationType, CUstream};
use cuvmm_handles::Mapping;

use crate::buffer::VirtualMemoryBuffer;
use crate::capture::{Session, is_capture_code};
use crate::error::Error;
use crate::host::Words;
use crate::kind::Access;
use crate::stream::StreamRef;

/// How a copy or a fill is done, of which everything is checked that can be without a call.
enum Way<'a> {
    /// There is nothing to do.
    Nothing,
    /// By the host, and now.
    Host(Words<'a>),
    /// By the driver, on a stream.
    Driver,
}

impl VirtualMemoryBuffer {
    /// Copies `source` to the bytes from `offset` on. Not ordered after work on other streams. Memory of the host is
    /// written by the host, without any driver call, and needs no device that may touch it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::NotAccessible`] where the device may not write, [`Error::HostCallback`]; what the
    /// driver answers. For memory of the host [`Error::OutOfBounds`] and [`Error::Forked`] alone.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn copy_from_host(&self, offset: usize, source: &[u8]) -> Result<(), Error> {
        self.transfer_from(None, offset, source)
    }

    /// As [`copy_from_host`](Self::copy_from_host), behind the work queued on `stream`, and by the driver in any case. It
    /// returns when that is done, and so after what was queued before.
    ///
    /// A default stream's token stands for the legacy default stream of the device's primary context. The stream may be of
    /// another device that has access, a [peer](crate::Options::peer).
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], values of two drivers, [`Error::NotAccessible`] where no device that the stream could be of
    /// may write; [`Error::StreamCapturing`], [`Error::HostCallback`]; what the driver answers, which for a stream of a
    /// device without the access is 1 (`CUDA_ERROR_INVALID_VALUE`).
    pub fn copy_from_host_on(&self, stream: &StreamRef, offset: usize, source: &[u8]) -> Result<(), Error> {
        self.transfer_from(Some(stream), offset, source)
    }

    /// Copies the bytes from `offset` on to `destination`. Not ordered after work on other streams. Memory of the host is
    /// read by the host, without any driver call, and needs no device that may touch it.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host), where the device may not read.
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn copy_to_host(&self, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        self.transfer_to(None, offset, destination)
    }

    /// As [`copy_to_host`](Self::copy_to_host), behind the work queued on `stream`, and by the driver in any case. It returns
    /// when that is done.
    ///
    /// # Errors
    /// As [`copy_from_host_on`](Self::copy_from_host_on), where no device that the stream could be of may read.
    pub fn copy_to_host_on(&self, stream: &StreamRef, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        self.transfer_to(Some(stream), offset, destination)
    }

    /// Sets `bytes` bytes from `offset` on to `value`. Not ordered after work on other streams. Memory of the host is
    /// written by the host, as [`copy_from_host`](Self::copy_from_host) does.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host).
    #[doc(alias = "cuMemsetD8Async")]
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<(), Error> {
        self.transfer_fill(self.size(), None, offset, bytes, value)
    }

    /// As [`fill`](Self::fill), behind the work queued on `stream`, and by the driver in any case. It returns when that is
    /// done.
    ///
    /// # Errors
    /// As [`copy_from_host_on`](Self::copy_from_host_on).
    pub fn fill_on(&self, stream: &StreamRef, offset: usize, bytes: usize, value: u8) -> Result<(), Error> {
        self.transfer_fill(self.size(), Some(stream), offset, bytes, value)
    }

    /// Sets the memory that lies `offset` bytes and more from the address to zero, also what is behind the size. Where
    /// that fails the buffer is gone, as if it had not been made.
    pub(crate) fn zeroed_from(self, offset: usize) -> Result<Self, Error> {
        let end = self.range().end();
        match self.transfer_fill(end, None, offset, end - offset, 0) {
            Ok(()) => Ok(self),
            Err(error) => {
                self.discard();
                Err(error)
            }
        }
    }

    fn transfer_from(&self, stream: Option<&StreamRef>, offset: usize, source: &[u8]) -> Result<(), Error> {
        match self.way(self.size(), stream, Access::ReadWrite, offset, source.len())? {
            Way::Nothing => {}
            Way::Host(words) => words.write(source),
            Way::Driver => self.queue(stream, offset, source.len(), |driver, address, piece, stream| {
                let source = &source[piece];
                // SAFETY: the range was checked, and `source` is borrowed until the stream was waited for.
                unsafe { driver.memcpy_htod_async(address, source.as_ptr().cast(), source.len(), stream) }
            })?,
        }
        Ok(())
    }

    fn transfer_to(&self, stream: Option<&StreamRef>, offset: usize, destination: &mut [u8]) -> Result<(), Error> {
        let bytes = destination.len();
        match self.way(self.size(), stream, Access::Read, offset, bytes)? {
            Way::Nothing => {}
            Way::Host(words) => words.read(destination),
            Way::Driver => {
                // Taken once: while a piece is under way nothing refers to the whole.
                let first = destination.as_mut_ptr();
                self.queue(stream, offset, bytes, |driver, address, piece, stream| {
                    let to = first.wrapping_add(piece.start).cast();
                    // SAFETY: the range was checked, each piece lies within it, and `destination` is borrowed until the
                    // stream was waited for.
                    unsafe { driver.memcpy_dtoh_async(to, address, piece.len(), stream) }
                })?;
            }
        }
        Ok(())
    }

    /// Fills within the first `size` bytes, which are mapped.
    fn transfer_fill(
        &self,
        size: usize,
        stream: Option<&StreamRef>,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), Error> {
        match self.way(size, stream, Access::ReadWrite, offset, bytes)? {
            Way::Nothing => {}
            Way::Host(words) => words.fill(value),
            Way::Driver => self.queue(stream, offset, bytes, |driver, address, piece, stream| {
                // SAFETY: the range was checked.
                unsafe { driver.memset_d8_async(address, value, piece.len(), stream) }
            })?,
        }
        Ok(())
    }

    /// How `bytes` bytes from `offset` on, within the first `size`, which are mapped, are copied or filled.
    fn way(
        &self,
        size: usize,
        stream: Option<&StreamRef>,
        needed: Access,
        offset: usize,
        bytes: usize,
    ) -> Result<Way<'_>, Error> {
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= size) else {
            return Err(Error::OutOfBounds { offset, bytes, size });
        };
        if let Some(stream) = stream {
            self.driver().require_same(stream.driver())?;
        }
        if bytes == 0 {
            return Ok(Way::Nothing);
        }
        if stream.is_none()
            && let Some(words) = self.words(offset, end)?
        {
            return Ok(Way::Host(words));
        }
        self.require_granted(stream, needed, offset, end)?;
        Ok(Way::Driver)
    }

    /// Refuses what a driver would refuse: bytes that were not granted to the device whose stream it is. A stream that was
    /// named can be of any device, the own one or a peer; the driver knows which.
    fn require_granted(
        &self,
        stream: Option<&StreamRef>,
        needed: Access,
        start: usize,
        end: usize,
    ) -> Result<(), Error> {
        let own = self.resource().device().location();
        let is_named = stream.is_some_and(|stream| !stream.is_default());
        let may = |desc: &CUmemAccessDesc| {
            let is_its = desc.location == own || is_named && desc.location.location_type == CUmemLocationType::DEVICE;
            is_its && desc.flags >= needed.as_driver()
        };
        let is_granted = self.range().is_granted(start, end, |access| access.iter().any(may));
        if is_granted { Ok(()) } else { Err(Error::NotAccessible { needed }) }
    }

    /// Where between `start` and `end` what a driver copies or fills in one call has to end. In the host's memory that is
    /// at each mapping: drivers refuse to set more than one, and crash where the host was granted one and not the next
    /// (measured).
    fn borders(&self, start: usize, end: usize) -> Vec<usize> {
        if !self.resource().location().is_host() {
            return Vec::new();
        }
        let base = self.address().0;
        let ends = |mapping: &Mapping| (mapping.address().0 - base) as usize + mapping.size();
        let mappings = self.range().mappings();
        mappings.into_iter().map(ends).filter(|border| (start + 1..end).contains(border)).collect()
    }

    /// Queues work on `bytes` bytes from `offset` on, which are mapped, on the stream or on one of the resource's own, and
    /// waits for it. `work` is given each piece of them in turn, as the driver is.
    fn queue(
        &self,
        stream: Option<&StreamRef>,
        offset: usize,
        bytes: usize,
        mut work: impl FnMut(&Driver, CUdeviceptr, Piece, CUstream) -> Result<(), cuvmm_driver::Error>,
    ) -> Result<(), Error> {
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
        let end = offset + bytes;
        let mut start = offset;
        let mut queued = Ok(());
        for border in self.borders(start, end).into_iter().chain([end]) {
            let address = CUdeviceptr(self.address().0 + start as u64);
            queued = queued.and_then(|()| work(driver, address, start - offset..border - offset, stream.as_raw()));
            start = border;
        }
        // Waited for also where queuing failed: what a failed call did is not known.
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

/// Which of the bytes that are copied or filled.
type Piece = std::ops::Range<usize>;
