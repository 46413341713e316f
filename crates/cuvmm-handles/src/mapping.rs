//! [`Mapping`]: physical memory at addresses.
//!
//! # Safety
//! A mapping is made in a room that nobody else maps in, of a live allocation, both of one driver, and is unmapped
//! before it lets go of either.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;

use cuvmm_driver::sys::{CUdeviceptr, CUmemAccessDesc, CUmemLocation, CUmemLocationType};
use cuvmm_driver::{Call, Device, Driver, StrandedKind};

use crate::allocation::Allocation;
use crate::context::Current;
use crate::error::Error;
use crate::reservation::{Reservation, Room};
use crate::sync::Arc;
use crate::usage::{Usage, strand};

/// The whole of an allocation mapped in a part of a reservation, with its access. It owns a share of both, and is
/// unmapped when dropped.
///
/// Unmapping neither waits for work nor is ordered after any: whoever starts work on the addresses sees to it that
/// the work ends before the mapping does.
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::*;
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let driver = simulator.driver()?;
/// # let location = driver.device(0)?.location();
/// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
/// # let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
/// # let memory = Arc::new(Allocation::create(&driver, size, &properties)?);
/// # let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.round_up(4 << 20)?, 0)?);
/// let access = [CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }];
/// let mapping = Mapping::map(&range, 2 << 20, memory, access.into())?;
/// assert_eq!(mapping.address().0, range.address().0 + (2 << 20));
/// drop(range);
/// mapping.close()?; // unmapped; the memory released and the addresses freed, as it held the last share of both
/// assert!(simulator.live().is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it is undone when dropped"]
pub struct Mapping {
    // Dropped in this order: the memory, then the room and so the addresses.
    allocation: Arc<Allocation>,
    room: Room,
    access: Arc<[CUmemAccessDesc]>,
    unmapped: bool,
}

impl Mapping {
    /// Maps `allocation` at `offset` of `reservation` and grants `access` (`cuMemMap`, `cuMemSetAccess`; the
    /// latter only where there is access to grant).
    ///
    /// # Errors
    /// [`DifferentDrivers`](cuvmm_driver::Error::DifferentDrivers), [`Error::OutOfBounds`],
    /// [`Error::AlreadyMapped`]; what the driver answers. Nothing is left behind.
    #[doc(alias = "cuMemMap")]
    pub fn map(
        reservation: &Arc<Reservation>,
        offset: usize,
        allocation: Arc<Allocation>,
        access: Arc<[CUmemAccessDesc]>,
    ) -> Result<Self, Error> {
        reservation.driver().require_same(allocation.driver())?;
        Self::map_in(reservation.take(offset, allocation.size())?, allocation, access)
    }

    /// Maps `allocation` in a room that was taken before, as [`map`](Self::map) otherwise.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    /// # let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
    /// # let memory = Arc::new(Allocation::create(&driver, size, &properties)?);
    /// # let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.round_up(4 << 20)?, 0)?);
    /// let room = range.take(0, 4 << 20)?;
    /// let access = [CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }];
    /// let refused = Mapping::map_in(room, memory.clone(), access.into());
    /// assert!(refused.is_err(), "the room is longer than the memory");
    /// let mapping = Mapping::map_in(range.take(0, memory.size())?, memory, access.into())?;
    /// assert!(simulator.is_mapped(mapping.address()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`map`](Self::map); [`Error::OutOfBounds`] unless the room is as long as the allocation.
    pub fn map_in(room: Room, allocation: Arc<Allocation>, access: Arc<[CUmemAccessDesc]>) -> Result<Self, Error> {
        Self::check(&room, &allocation)?;
        let (address, bytes) = (room.address(), room.size());
        // SAFETY: the handle is alive, the room lies within one reservation, and nobody else maps in it.
        unsafe { allocation.driver().mem_map(address, bytes, allocation.handle()) }
            .map_err(|error| Error::of_call(error, |error| Error::Map { address, bytes, error }))?;
        let mapping = Self::own(room, allocation, access);
        if mapping.access.is_empty() {
            return Ok(mapping);
        }
        // SAFETY: no work runs on it yet.
        if let Err(error) = unsafe { mapping.grant(&mapping.access) } {
            // SAFETY: nor does any before it goes, right after.
            let location = unsafe { mapping.refused() };
            return Err(Error::Grant { address: mapping.address(), bytes: mapping.size(), location, error });
        }
        Ok(mapping)
    }

    /// # Safety
    /// Work that runs on it does without what is taken away.
    unsafe fn grant(&self, access: &[CUmemAccessDesc]) -> Result<(), cuvmm_driver::Error> {
        // SAFETY: the range is this mapping's own, and the caller knows of work on it.
        unsafe { self.driver().mem_set_access(self.address(), self.size(), access) }
    }

    /// The location that can't be granted its access, found by trying each alone: the driver doesn't say.
    ///
    /// # Safety
    /// No work runs on it.
    unsafe fn refused(&self) -> Option<CUmemLocation> {
        let one = match &*self.access {
            [only] => Some(only),
            several => several.iter().find(|one| {
                // SAFETY: no work runs on it.
                unsafe { self.grant(std::slice::from_ref(one)) }.is_err()
            }),
        };
        one.map(|one| one.location)
    }

    /// Takes over a mapping that was made elsewhere, to be unmapped as one of ours. `access` is what it has. Makes no
    /// call.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    /// # let size = Reservation::GRANULARITY.exact(2 << 20)?;
    /// # let address = driver.mem_address_reserve(2 << 20, 0, CUdeviceptr(0))?;
    /// # let handle = driver.mem_create(2 << 20, &properties)?;
    /// # // SAFETY: both were made just now.
    /// # unsafe { driver.mem_map(address, 2 << 20, handle) }?;
    /// # // SAFETY: it is given back once.
    /// # unsafe { driver.mem_release(handle) }?;
    /// // Another library reserved `address`, mapped memory there without access, and let go of both.
    /// // SAFETY: it is one reservation, with that one mapping, which is taken over next.
    /// let range = Arc::new(unsafe { Reservation::from_raw(&driver, address, size) }?);
    /// // SAFETY: the mapping was given away, and is as long as its memory.
    /// let memory = unsafe { Allocation::retain(&driver, address, size) }?;
    /// // SAFETY: it is a mapping of that memory, which nobody else has, and nobody was granted access.
    /// let mapping = unsafe { Mapping::from_raw(range.take(0, 2 << 20)?, Arc::new(memory), Arc::new([])) }?;
    /// drop(range);
    /// mapping.close()?;
    /// assert!(simulator.live().is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// * At exactly the addresses of `room` there is one mapping, of the memory that `allocation` refers to, the whole of
    ///   it.
    /// * It is the caller's to give away: from now on nobody unmaps it, or changes its access, but through this value.
    /// * Each location that `access` names is granted there what it says.
    /// * As for a mapping of ours, whoever started work on the addresses sees to it that the work ends before this does.
    ///
    /// # Errors
    /// As [`map_in`](Self::map_in), but for those of the driver; the mapping is then still the caller's, and the room is
    /// given back.
    pub unsafe fn from_raw(
        room: Room,
        allocation: Arc<Allocation>,
        access: Arc<[CUmemAccessDesc]>,
    ) -> Result<Self, Error> {
        Self::check(&room, &allocation)?;
        Ok(Self::own(room, allocation, access))
    }

    /// Refuses memory that can't be what is mapped in a room.
    fn check(room: &Room, allocation: &Allocation) -> Result<(), Error> {
        room.reservation().driver().require_same(allocation.driver())?;
        if room.size() != allocation.size() {
            return Err(Error::OutOfBounds { offset: 0, size: allocation.size(), reserved: room.size() });
        }
        allocation.granularity().exact(room.offset())?;
        Ok(())
    }

    fn own(room: Room, allocation: Arc<Allocation>, access: Arc<[CUmemAccessDesc]>) -> Self {
        let mapping = Self { room, allocation, access, unmapped: false };
        if let Some(usage) = mapping.usage() {
            usage.mapped.add(mapping.size());
        }
        mapping
    }

    /// Where it is counted.
    fn usage(&self) -> Option<&Usage> {
        self.room.reservation().usage()
    }

    /// The driver that it belongs to.
    pub fn driver(&self) -> &Driver {
        self.room.reservation().driver()
    }

    /// Where it begins.
    pub fn address(&self) -> CUdeviceptr {
        self.room.address()
    }

    /// How long it is, in bytes: the whole of its allocation.
    pub fn size(&self) -> usize {
        self.room.size()
    }

    /// Where in which reservation it is.
    pub fn room(&self) -> &Room {
        &self.room
    }

    /// The memory that is mapped.
    pub fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

    /// The access that it was granted.
    pub fn access(&self) -> &Arc<[CUmemAccessDesc]> {
        &self.access
    }

    /// A dma-buf that names the memory to other drivers, and pins it while it is open
    /// (`cuMemGetHandleForAddressRange`). It is of this mapping: after another one, take another.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    /// # let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
    /// # let memory = Arc::new(Allocation::create(&driver, size, &properties)?);
    /// # let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.round_up(2 << 20)?, 0)?);
    /// let access = [CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }];
    /// let mapping = Mapping::map(&range, 0, memory, access.into())?;
    /// let descriptor = mapping.export_dma_buf()?; // for a network card's driver, as a rule
    /// drop(descriptor);
    /// mapping.close()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The driver wants a current context for this: that is the primary one of the memory's device for as long as it
    /// takes, whatever the thread has, and is made where nobody else holds it.
    ///
    /// # Errors
    /// [`Unsupported`](cuvmm_driver::Error::Unsupported) before CUDA 11.7; 801 where the device has no dma-bufs; 1 for
    /// memory whose size is no multiple of the host's pages.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    pub fn export_dma_buf(&self) -> Result<OwnedFd, Error> {
        let driver = self.driver();
        let exports = driver.raw().provides(Call::cuMemGetHandleForAddressRange);
        let device = if exports { self.device_for_a_context()? } else { None };
        let _current = device.as_ref().map(Current::push).transpose()?;
        self.allocation.expose();
        // SAFETY: the range is this mapping's own, which is mapped while it is borrowed.
        let descriptor = unsafe { driver.mem_get_dma_buf(self.address(), self.size()) }?;
        if let Some(usage) = self.usage() {
            usage.add_exported();
        }
        Ok(descriptor)
    }

    /// The device of the memory, or for the host's any: none where that is hidden from this process.
    fn device_for_a_context(&self) -> Result<Option<Device>, Error> {
        let location = self.allocation.properties()?.location;
        let is_device = location.location_type == CUmemLocationType::DEVICE;
        Ok(self.driver().device(if is_device { location.id } else { 0 }).ok())
    }

    /// Unmaps, and lets go of its shares, as dropping it does, and says how that went. It goes on past a failed
    /// call; what that call would have undone, and what needed it, is stranded.
    ///
    /// # Errors
    /// The first that `cuMemUnmap`, `cuMemRelease` and `cuMemAddressFree` answer, the latter two where this held
    /// the last share.
    pub fn close(self) -> Result<(), Error> {
        let (unmapped, allocation, reservation) = self.take_apart();
        let released = Arc::into_inner(allocation).map_or(Ok(()), Allocation::close);
        let freed = Arc::into_inner(reservation).map_or(Ok(()), Reservation::close);
        unmapped.and(released).and(freed)
    }

    /// Unmaps, lets go of the addresses, and gives its share of the memory back: that can be mapped again.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    /// # let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
    /// # let memory = Arc::new(Allocation::create(&driver, size, &properties)?);
    /// # let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.round_up(4 << 20)?, 0)?);
    /// # let access: Arc<[CUmemAccessDesc]> = [CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }].into();
    /// let mapping = Mapping::map(&range, 0, memory, access.clone())?;
    /// let memory = mapping.unmap()?;
    /// Mapping::map(&range, 2 << 20, memory, access)?.close()?;
    /// # drop(range);
    /// # assert!(simulator.live().is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The first that `cuMemUnmap` and, where this held the last share of the addresses, `cuMemAddressFree` answer. The
    /// share of the memory is then let go of, as [`close`](Self::close) does.
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(self) -> Result<Arc<Allocation>, Error> {
        let (unmapped, allocation, reservation) = self.take_apart();
        if let Err(error) = unmapped {
            drop(allocation);
            // A failure is counted and reported.
            drop(reservation);
            return Err(error);
        }
        Arc::into_inner(reservation).map_or(Ok(()), Reservation::close)?;
        Ok(allocation)
    }

    /// Unmaps, and gives the shares back.
    fn take_apart(mut self) -> (Result<(), Error>, Arc<Allocation>, Arc<Reservation>) {
        let unmapped = self.undo();
        let shares = (Arc::clone(&self.allocation), Arc::clone(self.room.reservation()));
        drop(self);
        (unmapped, shares.0, shares.1)
    }

    fn undo(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.unmapped, true) || self.driver().is_forked() {
            return Ok(());
        }
        // Until the driver has said yes, whatever happens.
        self.room.set_stuck(true);
        // SAFETY: the range is this mapping's, `unmapped` makes this the only unmap, and whoever started work on
        // it promised that the work has ended.
        if let Err(error) = unsafe { self.driver().mem_unmap(self.address(), self.size()) } {
            strand(self.driver(), self.usage(), StrandedKind::Mapping, &error, "memory was not unmapped");
            return Err(error.into());
        }
        self.room.set_stuck(false);
        if let Some(usage) = self.usage() {
            usage.mapped.subtract(self.size());
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A failure was counted and reported there.
        let _ = self.undo();
        // Also where that unwound, as it may where a driver's call is somebody's code.
        if self.room.is_stuck() {
            self.allocation.expose();
        }
    }
}
