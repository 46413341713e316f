//! [`Reservation`]: a range of addresses, and [`Room`]: a part of it that is taken.
//!
//! # Safety
//! The range is one reservation of the driver field until the one free; nothing is mapped in it by then, since
//! every mapping's room holds a share of it.
#![allow(unsafe_code)]

use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_driver::{Driver, StrandedKind};

use crate::error::Error;
use crate::size::{GranularSize, Granularity};
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};
use crate::taken::Taken;
use crate::usage::{Usage, strand};

/// A range of addresses that is nobody else's, freed when this is dropped. It costs no memory and belongs to no
/// device.
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
/// let size = Reservation::GRANULARITY.round_up(64 << 30)?;
/// let range = Reservation::reserve(&driver, size, 1 << 30)?;
/// assert_eq!(range.address().0 % (1 << 30), 0);
/// range.close()?;
/// assert_eq!(simulator.live().reservations, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it is undone when dropped"]
pub struct Reservation {
    driver: Driver,
    /// Invariant: with `size`, one reservation of the driver that this value alone gives back.
    address: CUdeviceptr,
    size: usize,
    /// What is taken, by offsets.
    taken: Mutex<Taken>,
    usage: Option<Arc<Usage>>,
    freed: bool,
}

impl Reservation {
    /// What reservations come in multiples of, whatever the granularity of the memory: 2 MiB.
    pub const GRANULARITY: Granularity = match Granularity::new(2 << 20) {
        Some(granularity) => granularity,
        None => unreachable!(),
    };

    /// Reserves `size` bytes anywhere, at a multiple of `alignment` (0: of 2 MiB) (`cuMemAddressReserve`).
    ///
    /// # Errors
    /// [`Error::NotGranular`] for a size that is no positive multiple of 2 MiB, [`Error::Alignment`],
    /// [`Forked`](cuvmm_driver::Error::Forked); what the driver answers: 2 when so much address space can't be had.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn reserve(driver: &Driver, size: GranularSize, alignment: usize) -> Result<Self, Error> {
        Self::hinted(driver, size, alignment, CUdeviceptr(0))
    }

    /// Reserves `size` bytes with `address` as the hint: a wish, so look where it [is](Self::address).
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve); some drivers refuse a hint that can't be granted.
    pub fn hinted(driver: &Driver, size: GranularSize, alignment: usize, hint: CUdeviceptr) -> Result<Self, Error> {
        let size = Self::check(size)?;
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(Error::Alignment { alignment });
        }
        let failed = |error| Error::of_call(error, |error| Error::Reserve { bytes: size, alignment, hint, error });
        let address = driver.mem_address_reserve(size, alignment, hint).map_err(failed)?;
        Ok(Self::own(driver, address, size))
    }

    /// A size that reservations have, in bytes.
    fn check(size: GranularSize) -> Result<usize, Error> {
        let (bytes, granularity) = (size.bytes(), Self::GRANULARITY);
        if bytes == 0 {
            return Err(Error::NotGranular { bytes, granularity: granularity.bytes() });
        }
        granularity.exact(bytes).map(GranularSize::bytes)
    }

    fn own(driver: &Driver, address: CUdeviceptr, size: usize) -> Self {
        Self { driver: driver.clone(), address, size, taken: Mutex::default(), usage: None, freed: false }
    }

    /// Reserves `size` bytes at exactly `address`.
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
    /// let size = Reservation::GRANULARITY.round_up(2 << 20)?;
    /// let range = Reservation::reserve(&driver, size, 0)?;
    /// let taken = Reservation::at(&driver, size, range.address());
    /// assert!(matches!(taken, Err(Error::AddressUnavailable { .. })));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::AddressUnavailable`] where the driver gave other addresses, which are free again by then; as
    /// [`reserve`](Self::reserve).
    pub fn at(driver: &Driver, size: GranularSize, address: CUdeviceptr) -> Result<Self, Error> {
        Self::hinted(driver, size, 0, address)?.require_at(address)
    }

    /// Takes over a range that was reserved elsewhere, to be freed as one of ours. Makes no call.
    ///
    /// Nothing is taken in it: what is mapped there already is taken over with a room each, by
    /// [`Mapping::from_raw`](crate::Mapping::from_raw).
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// let address = driver.mem_address_reserve(64 << 20, 0, CUdeviceptr(0))?; // as a rule by another library
    /// let size = Reservation::GRANULARITY.exact(64 << 20)?;
    /// // SAFETY: it is that reservation, in which nothing is mapped, and nobody else has it.
    /// let range = unsafe { Reservation::from_raw(&driver, address, size) }?;
    /// range.close()?;
    /// assert_eq!(simulator.live().reservations, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// * `address` and `size` are those of exactly one reservation of `driver`, made in this process and not freed.
    /// * It is the caller's to give away: from now on nobody frees it but this value, and nobody maps in it, or unmaps
    ///   what was mapped through this value.
    /// * What is mapped in it already is taken over before anything else is done with the value, or its owner unmaps it
    ///   before the value goes. No mapping reaches across its ends, as drivers allow.
    ///
    /// # Errors
    /// [`Error::NotGranular`] for a size that no reservation has; the range is then still the caller's.
    pub unsafe fn from_raw(driver: &Driver, address: CUdeviceptr, size: GranularSize) -> Result<Self, Error> {
        Ok(Self::own(driver, address, Self::check(size)?))
    }

    /// It itself where it begins at exactly `address`, and else freed, as [`at`](Self::at) does.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let driver = Simulator::new(Machine::h200()).driver()?;
    /// let usage = Arc::<Usage>::default();
    /// let size = Reservation::GRANULARITY.round_up(2 << 20)?;
    /// let range = Reservation::reserve(&driver, size, 0)?;
    /// let again = Reservation::hinted(&driver, size, 0, range.address())?;
    /// assert!(again.counted(&usage).require_at(range.address()).is_err());
    /// assert_eq!(usage.reserved().now, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::AddressUnavailable`].
    pub fn require_at(self, address: CUdeviceptr) -> Result<Self, Error> {
        if self.address == address {
            Ok(self)
        } else {
            Err(Error::AddressUnavailable { wanted: address, got: self.address })
        }
    }

    /// Counts it in `usage` until it is freed, and every mapping in it until that is unmapped: no longer where it was
    /// counted before.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let driver = Simulator::new(Machine::h200()).driver()?;
    /// let usage = Arc::<Usage>::default();
    /// let range = Reservation::reserve(&driver, Reservation::GRANULARITY.round_up(1 << 30)?, 0)?.counted(&usage);
    /// assert_eq!(usage.reserved().now, 1 << 30);
    /// range.close()?;
    /// assert_eq!(usage.reserved(), Level { now: 0, peak: 1 << 30 });
    /// # Ok(())
    /// # }
    /// ```
    pub fn counted(mut self, usage: &Arc<Usage>) -> Self {
        // Nothing is mapped in it: each mapping holds a share, and this is the only one.
        if let Some(former) = self.usage.replace(Arc::clone(usage)) {
            former.reserved.subtract(self.size);
        }
        usage.reserved.add(self.size);
        self
    }

    /// The driver that it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Where it begins.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// How long it is, in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Takes a part of the range, so that nobody else maps there. Makes no call.
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
    /// let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.exact(4 << 20)?, 0)?);
    /// let room = range.take(0, 2 << 20)?;
    /// assert!(matches!(range.take(1 << 20, 2 << 20), Err(Error::AlreadyMapped { .. })));
    /// assert!(matches!(range.take(2 << 20, 4 << 20), Err(Error::OutOfBounds { .. })));
    /// drop(room);
    /// assert!(range.take(1 << 20, 2 << 20).is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotGranular`] for no bytes, [`Error::OutOfBounds`], [`Error::AlreadyMapped`],
    /// [`Forked`](cuvmm_driver::Error::Forked).
    // No `Arc` but the standard library's can be a receiver: in a model, sync.rs has this method.
    #[cfg(not(cuvmm_shuttle))]
    pub fn take(self: &Arc<Self>, offset: usize, size: usize) -> Result<Room, Error> {
        Room::take(self, offset, size)
    }

    /// Frees the range, as dropping it does, and says how that went. After a failure it is stranded.
    ///
    /// It takes the value itself, and each mapping in it holds a share: so it can't be closed under a mapping. A share
    /// that is the last one is the value:
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # fn example(range: Reservation, memory: Arc<Allocation>) -> Result<(), Error> {
    /// let range = Arc::new(range);
    /// let mapping = Mapping::map(&range, 0, memory, Arc::new([]))?;
    /// mapping.close()?;
    /// Arc::into_inner(range).map_or(Ok(()), Reservation::close)
    /// # }
    /// ```
    ///
    /// # Errors
    /// What `cuMemAddressFree` answers.
    pub fn close(mut self) -> Result<(), Error> {
        self.free()
    }

    fn free(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.freed, true) || self.driver.is_forked() {
            return Ok(());
        }
        // SAFETY: the pair is ours by the field's invariant, `freed` makes this the only free, and no mapping is
        // left: each one's room holds a share, and a room whose unmap failed keeps its share for ever.
        if let Err(error) = unsafe { self.driver.mem_address_free(self.address, self.size) } {
            strand(&self.driver, self.usage(), StrandedKind::Reservation, &error, "addresses were not freed");
            return Err(error.into());
        }
        if let Some(usage) = self.usage() {
            usage.reserved.subtract(self.size);
        }
        Ok(())
    }

    /// Where it and its mappings are counted.
    pub(crate) fn usage(&self) -> Option<&Usage> {
        self.usage.as_deref()
    }

    /// The lock is never held across a call; a panic under it can't leave the list half changed. In a forked child it may be
    /// held by a thread that is not there, so nobody takes it.
    fn taken(&self) -> Result<MutexGuard<'_, Taken>, Error> {
        self.driver.require_own_process()?;
        Ok(self.taken.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A failure was counted and reported by `free`.
        let _ = self.free();
    }
}

/// A part of a reservation that is taken: where one mapping goes. It holds a share of the reservation, and is
/// free for others when dropped.
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
/// let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.exact(8 << 20)?, 0)?);
/// let room = range.take(2 << 20, 4 << 20)?;
/// assert_eq!((room.offset(), room.size(), room.end()), (2 << 20, 4 << 20, 6 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it is undone when dropped"]
pub struct Room {
    reservation: Arc<Reservation>,
    address: CUdeviceptr,
    offset: usize,
    size: usize,
    stuck: bool,
}

impl Room {
    pub(crate) fn take(reservation: &Arc<Reservation>, offset: usize, size: usize) -> Result<Self, Error> {
        if size == 0 {
            return Err(Error::NotGranular { bytes: 0, granularity: Reservation::GRANULARITY.bytes() });
        }
        let end = offset.checked_add(size).filter(|end| *end <= reservation.size);
        let (Some(end), Some(address)) = (end, reservation.address.checked_add(offset)) else {
            return Err(Error::OutOfBounds { offset, size, reserved: reservation.size });
        };
        let is_taken = reservation.taken()?.take(offset, end);
        if !is_taken {
            return Err(Error::AlreadyMapped { offset, size });
        }
        Ok(Self { reservation: Arc::clone(reservation), address, offset, size, stuck: false })
    }

    /// Two rooms in its place: of its first `size` bytes, and of the rest. At no moment are they anybody else's.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let driver = Simulator::new(Machine::h200()).driver()?;
    /// let range = Arc::new(Reservation::reserve(&driver, Reservation::GRANULARITY.exact(8 << 20)?, 0)?);
    /// let (first, rest) = range.take(2 << 20, 6 << 20)?.split(2 << 20)?;
    /// assert_eq!((first.offset(), rest.offset(), rest.end()), (2 << 20, 4 << 20, 8 << 20));
    /// drop(first);
    /// assert!(range.take(0, 4 << 20).is_ok() && range.take(0, 6 << 20).is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] unless both have bytes; the room is then free. [`Forked`](cuvmm_driver::Error::Forked).
    pub fn split(mut self, size: usize) -> Result<(Self, Self), Error> {
        let out_of_bounds = Error::OutOfBounds { offset: 0, size, reserved: self.size };
        let rest = self.size.checked_sub(size).filter(|rest| *rest > 0 && size > 0);
        let (Some(rest), Some(address)) = (rest, self.address.checked_add(size)) else { return Err(out_of_bounds) };
        let offset = self.offset + size;
        self.reservation.driver.require_own_process()?;
        // What is taken stays as it is.
        self.size = size;
        let reservation = Arc::clone(&self.reservation);
        Ok((self, Self { reservation, address, offset, size: rest, stuck: false }))
    }

    /// The reservation that it is part of.
    pub fn reservation(&self) -> &Arc<Reservation> {
        &self.reservation
    }

    /// Where it begins.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Where it begins in the reservation, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// How long it is, in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Where it ends in the reservation, in bytes. It was taken within the reservation, so the sum doesn't overflow.
    pub fn end(&self) -> usize {
        self.offset + self.size
    }

    /// How many bytes of the reservation lie behind it, taken or not.
    pub fn behind(&self) -> usize {
        self.reservation.size - self.end()
    }

    /// Whether it stays taken for ever, and with it the reservation: something is mapped there that can't be unmapped.
    pub(crate) fn set_stuck(&mut self, stuck: bool) {
        self.stuck = stuck;
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.stuck {
            std::mem::forget(Arc::clone(&self.reservation));
        } else if let Ok(mut taken) = self.reservation.taken() {
            taken.give_back(self.offset, self.end());
        }
    }
}
