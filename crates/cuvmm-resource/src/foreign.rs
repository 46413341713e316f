//! Memory that was mapped elsewhere: a range taken over as a buffer, or given back at once, or an alias of what others
//! keep.
//!
//! What is there is asked of the driver, mapping by mapping, and all of it before anything is taken over. Only references
//! to the memory are taken meanwhile, and a failure gives them back: so until a range is taken over it is the caller's.
//!
//! # Safety
//! What is taken over or retained is the caller's to give away or to share, as the callers of the public operations
//! promise. A range is taken over whole: its one reservation, and a mapping for each that the driver told of.
#![allow(unsafe_code)]

use cuvmm_driver::CudaVersion;
use cuvmm_driver::sys::{CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUpointer_attribute};
use cuvmm_handles::{Allocation, GranularSize, Mapping, Reservation};

use crate::buffer::VirtualMemoryBuffer;
use crate::error::{DeallocateError, Error};
use crate::range::Range;
use crate::release::{Order, Release};
use crate::resource::VirtualMemoryResource;
use crate::settle::Unsettled;
use crate::sync::Arc;

/// Since when drivers tell where a mapping begins and ends.
const TELLS_OF_MAPPINGS: CudaVersion = CudaVersion(11070);

impl VirtualMemoryResource {
    /// Whether memory of the virtual memory calls is mapped at `address`, whoever mapped it: not so for addresses that
    /// are free or merely reserved, nor for ordinary memory. It only asks, and needs no context.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// let address = buffer.address();
    /// assert!(resource.is_vmm(address)?);
    /// buffer.close()?;
    /// assert!(!resource.is_vmm(address)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`cuvmm_handles::is_vmm`].
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn is_vmm(&self, address: CUdeviceptr) -> Result<bool, Error> {
        Ok(cuvmm_handles::is_vmm(self.device().driver(), address)?)
    }

    /// A buffer of a range that was made elsewhere: one whole reservation, with what is mapped in it one behind the other
    /// from its start. It is a buffer like any other of this resource, with the mapped bytes as its size and the
    /// reservation as its capacity; each chunk keeps the access that it has. It can't be exported. Closing or dropping it
    /// waits for `release`, unmaps each mapping, and frees the reservation.
    ///
    /// Whoever made the memory releases their own handle of it, before or after: as long as they do not, it stays.
    ///
    /// ```
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let driver = device.driver();
    /// # let location = device.location();
    /// # let address = driver.mem_address_reserve(64 << 20, 0, CUdeviceptr(0))?;
    /// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    /// # let handle = driver.mem_create(2 << 20, &properties)?;
    /// # // SAFETY: both were made just now.
    /// # unsafe { driver.mem_map(address, 2 << 20, handle) }?;
    /// # // SAFETY: it is given back once.
    /// # unsafe { driver.mem_release(handle) }?;
    /// # let access = [CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }];
    /// # // SAFETY: it was mapped just now.
    /// # unsafe { driver.mem_set_access(address, 2 << 20, &access) }?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// // Another library reserved 64 MiB at `address`, mapped 2 MiB of memory there, and gave it all away.
    /// // SAFETY: it is that reservation, nobody else has it any more, and no work is on it.
    /// let buffer = unsafe { resource.from_raw(address, 64 << 20, Release::Caller) }?;
    /// assert_eq!((buffer.size(), buffer.capacity()), (2 << 20, 64 << 20));
    /// let buffer = buffer.grow_into(8 << 20)?;
    /// assert_eq!((buffer.address(), buffer.outcome()), (address, Some(Outcome::InPlace)));
    /// buffer.close()?;
    /// assert!(simulator.live().is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// * `address` and `size` are those of one reservation, made in this process with this resource's driver, which is
    ///   the caller's to give away: while this runs, and from then on where it succeeds, nobody frees it, or maps, unmaps
    ///   or changes access in it, but the buffer and what is grown from it.
    /// * Behind the first address where nothing is mapped, nothing is mapped between the multiples of the
    ///   [least granularity](Self::minimum_granularity): those are asked for, one call each, which takes its time where the
    ///   reservation is huge.
    /// * Work that was started on the addresses is ordered before `release`, or over before the buffer goes; later work
    ///   is as on any buffer.
    /// * Nobody relies on what the memory holds, through whichever address of it: no reference of Rust's points there
    ///   where it is memory of the host, and nobody's values there would be unsound if they changed. Safe code writes to
    ///   it through the buffer, at any time.
    ///
    /// # Errors
    /// The range is then the caller's as before, whole. [`Error::NotVmm`], [`Error::NotOneReservation`],
    /// [`Error::MappingAcross`], [`Error::MappedBehindHole`], [`Error::OtherLocation`]; [`Error::Handles`] for sizes that
    /// are no multiples of the granularity; [`Error::Unsupported`] before CUDA 11.7; [`Error::HostCallback`];
    /// [`Error::Driver`] for a release stream of another driver; what the driver answers.
    pub unsafe fn from_raw(
        &self,
        address: CUdeviceptr,
        size: usize,
        release: Release,
    ) -> Result<VirtualMemoryBuffer, Error> {
        release.require_driver(self.device().driver())?;
        // SAFETY: the caller's promise.
        let found = unsafe { self.find(address, size) }?;
        // SAFETY: the caller's promise; it was found just now.
        let buffer = unsafe { self.take_over(found) }?;
        self.counts().add_allocation();
        Ok(buffer.with_release(release))
    }

    /// Does at once to a range that was made elsewhere what [taking it over](Self::from_raw) and closing the buffer does:
    /// waits for `release`, unmaps each mapping, and frees the reservation.
    ///
    /// ```
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let driver = device.driver();
    /// # let address = driver.mem_address_reserve(2 << 20, 0, CUdeviceptr(0))?;
    /// # let properties = CUmemAllocationProp::pinned(device.location(), CUmemAllocationHandleType::NONE);
    /// # let handle = driver.mem_create(2 << 20, &properties)?;
    /// # // SAFETY: both were made just now.
    /// # unsafe { driver.mem_map(address, 2 << 20, handle) }?;
    /// # // SAFETY: it is given back once.
    /// # unsafe { driver.mem_release(handle) }?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let stream = StreamRef::create(&device)?;
    /// // Another library reserved 2 MiB at `address`, mapped memory there, and queued its last work on `stream`.
    /// // SAFETY: it is that reservation, which nobody else has or uses any more.
    /// unsafe { resource.deallocate(address, 2 << 20, Release::Stream(stream)) }?;
    /// assert!(!resource.is_vmm(address)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw), and work that was started on the addresses is ordered before `release`, or over.
    /// Where [`DeallocateError::is_deallocated`] says no, the range is the caller's as before, whole.
    ///
    /// # Errors
    /// [`DeallocateError`]: what [`from_raw`](Self::from_raw) fails with, and what
    /// [`close`](VirtualMemoryBuffer::close) does.
    #[doc(alias("cuMemUnmap", "cuMemAddressFree"))]
    pub unsafe fn deallocate(
        &self,
        address: CUdeviceptr,
        size: usize,
        release: Release,
    ) -> Result<(), DeallocateError> {
        let kept = |error| DeallocateError { error, deallocated: false };
        release.require_driver(self.device().driver()).map_err(kept)?;
        // SAFETY: the caller's promise.
        let found = unsafe { self.find(address, size) }.map_err(kept)?;
        let settled = match self.settle(&mut Order::new(release), None) {
            Err(Unsettled::Refused(error)) => return Err(kept(error)),
            Err(Unsettled::Failed(error)) => Err(error),
            Ok(()) => Ok(()),
        };
        // SAFETY: the caller's promise; it was found just now.
        let mut buffer = unsafe { self.take_over(found) }.map_err(kept)?;
        settled.and(buffer.let_go()).map_err(|error| DeallocateError { error, deallocated: true })
    }

    /// A buffer of memory that others mapped, at an address of its own: an alias, with this resource's access. `address`
    /// and `size` are those of whole mappings, one behind the other. The memory then stays until this buffer goes, too,
    /// whatever becomes of the others' mappings. It can't be exported.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// # let theirs = resource.allocate(2 << 20)?;
    /// # let (address, size) = (theirs.address(), theirs.size());
    /// // Another library has memory at `address`, and lets others write to it.
    /// // SAFETY: it is mapped while this runs, and whoever uses it knows that it may change.
    /// let alias = unsafe { resource.wrap(address, size) }?;
    /// alias.fill(0, size, 7)?;
    /// # let mut bytes = [0; 1];
    /// # theirs.copy_to_host(0, &mut bytes)?;
    /// # assert_eq!((bytes, alias.address() != address), ([7], true));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// * What is mapped at the addresses is the caller's to share, and stays mapped while this runs.
    /// * Nobody relies on what the memory holds, through whichever address of it: no reference of Rust's points there
    ///   where it is memory of the host, and nobody's values there would be unsound if they changed. Safe code reads and
    ///   writes it through the buffer, at any time and on any thread, while others use it.
    /// * Where a buffer of another [`Driver`](cuvmm_driver::Driver) of the same library has it, whose resource
    ///   [recycles](crate::Recycling), that stays until this one is gone: its resource does not know of this one. What is of the
    ///   same driver is not recycled while this one has it.
    ///
    /// What is sound without more: others may unmap theirs and release their handles whenever they like. What is not to
    /// be had at all: an order between writes here and reads there. That takes what two streams take, and a kernel that
    /// uses both addresses needs `fence.proxy.alias` between.
    ///
    /// # Errors
    /// [`Error::NotVmm`] for the first address at which nothing is mapped, [`Error::MappingAcross`] for a mapping that the
    /// addresses do not hold whole, [`Error::OtherLocation`]; as [`map_chunks`](Self::map_chunks), and as
    /// [`from_raw`](Self::from_raw). Nothing is left behind.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub unsafe fn wrap(&self, address: CUdeviceptr, size: usize) -> Result<VirtualMemoryBuffer, Error> {
        self.require_lookups()?;
        let extents = self.extents(address, size)?;
        let sizes: Vec<usize> = extents.iter().map(|extent| extent.size.bytes()).collect();
        let mapped = sizes.iter().sum();
        if mapped < size {
            return Err(Error::NotVmm { address: at(address, mapped)? });
        }
        self.map_chunks(&sizes, size, |chunk, _| {
            // SAFETY: the caller may share it.
            unsafe { self.retain(extents[chunk]) }
        })
    }

    /// Finds out what a range is that begins at `address`, and takes references to its memory.
    ///
    /// # Safety
    /// What is mapped there is the caller's to share.
    unsafe fn find(&self, address: CUdeviceptr, size: usize) -> Result<Found, Error> {
        let reserved = Reservation::GRANULARITY.exact(size)?;
        self.require_lookups()?;
        if !self.is_vmm(address)? {
            return Err(Error::NotVmm { address });
        }
        let found_address = CUdeviceptr(self.told(CUpointer_attribute::RANGE_START_ADDR, address)?);
        let found_size = self.told(CUpointer_attribute::RANGE_SIZE, address)?;
        if found_address != address || found_size != size as u64 {
            return Err(Error::NotOneReservation { address, size, found_address, found_size });
        }
        let extents = self.extents(address, size)?;
        // Nothing lies between the addresses that are asked, by the caller's promise: finer memory of another kind could.
        let mapped: usize = extents.iter().map(|extent| extent.size.bytes()).sum();
        for offset in (mapped..size).step_by(self.memory().least.bytes()) {
            let address = at(address, offset)?;
            if self.is_vmm(address)? {
                return Err(Error::MappedBehindHole { address });
            }
        }
        let mut chunks = Vec::with_capacity(extents.len());
        for extent in extents {
            // SAFETY: the caller may share it.
            let allocation = unsafe { self.retain(extent) }?;
            chunks.push((allocation, self.access_at(extent.address)?));
        }
        Ok(Found { address, size: reserved, chunks })
    }

    /// Refuses to look anything up where drivers tell nothing.
    fn require_lookups(&self) -> Result<(), Error> {
        let driver = self.device().driver();
        if driver.version() < TELLS_OF_MAPPINGS {
            let what = "telling where a mapping ends, which came with CUDA 11.7";
            return Err(Error::Unsupported { what, ordinal: self.device().ordinal() });
        }
        if driver.is_in_host_function()? { Err(Error::HostCallback) } else { Ok(()) }
    }

    /// The mappings one behind the other from `address` on, to the end of `size` bytes or where nothing is mapped.
    fn extents(&self, address: CUdeviceptr, size: usize) -> Result<Vec<Extent>, Error> {
        let mut extents = Vec::new();
        let mut end = 0;
        while end < size {
            let address = at(address, end)?;
            if !self.is_vmm(address)? {
                break;
            }
            let begin = self.told(CUpointer_attribute::MAPPING_BASE_ADDR, address)?;
            let bytes = self.told(CUpointer_attribute::MAPPING_SIZE, address)?;
            let whole = usize::try_from(bytes).ok().filter(|bytes| (1..=size - end).contains(bytes));
            let Some(bytes) = whole.filter(|_| begin == address.0) else {
                return Err(Error::MappingAcross { address: CUdeviceptr(begin), size: bytes });
            };
            extents.push(Extent { address, size: self.memory().least.exact(bytes)? });
            end += bytes;
        }
        Ok(extents)
    }

    /// What the driver tells of an address where something is mapped.
    fn told(&self, attribute: CUpointer_attribute, address: CUdeviceptr) -> Result<u64, Error> {
        Ok(self.device().driver().pointer_get_attribute(attribute, address)?)
    }

    /// A reference to the memory of a mapping, which lies where this resource's does.
    ///
    /// # Safety
    /// The mapping is the caller's to share.
    unsafe fn retain(&self, extent: Extent) -> Result<Allocation, Error> {
        // SAFETY: the caller may share it, and a driver maps nothing but the whole of an allocation: its size is that.
        let allocation = unsafe { Allocation::retain(self.device().driver(), extent.address, extent.size) }?;
        let allocation = allocation.counted(&self.memory().usage);
        let location = allocation.properties()?.location;
        if !self.memory().lies_at(location) {
            return Err(Error::OtherLocation { address: extent.address, location });
        }
        Ok(allocation)
    }

    /// Whom a mapping is granted to: of the devices that this process sees, and for memory of the host the host.
    fn access_at(&self, address: CUdeviceptr) -> Result<Arc<[CUmemAccessDesc]>, Error> {
        let driver = self.device().driver();
        let places = driver.devices().into_iter().map(|device| (device.location(), device.location()));
        // Asked by a node's name: asked as HOST, drivers tell of the first device's access too (measured).
        let host = self.location().is_host().then(|| (self.memory().properties.location, CUmemLocation::host_numa(0)));
        let mut access = Vec::new();
        for (location, asked) in places.chain(host) {
            let flags = driver.mem_get_access(asked, address)?;
            if flags != CUmemAccess_flags::NONE {
                access.push(CUmemAccessDesc { location, flags });
            }
        }
        Ok(access.into())
    }

    /// Makes a range that was found a buffer. Makes no call.
    ///
    /// # Safety
    /// The range is the caller's to give away, as [`from_raw`](Self::from_raw) says, and nothing of it has changed since
    /// it was found.
    unsafe fn take_over(&self, found: Found) -> Result<VirtualMemoryBuffer, Error> {
        // Nothing here can fail: the range is of a size that reservations have, and the chunks lie one behind the other
        // in it, each of a multiple of the granularity.
        // SAFETY: it is one whole reservation by the driver's word, and the caller's to give away; all that is mapped in
        // it is taken over below, and reaches across no end.
        let reservation = unsafe { Reservation::from_raw(self.device().driver(), found.address, found.size) }?;
        let reservation = Arc::new(reservation.counted(&self.memory().usage));
        let mut range = Range::default();
        for (allocation, access) in found.chunks {
            let room = reservation.take(range.end(), allocation.size())?;
            // SAFETY: the driver told of one mapping at these addresses, of the memory that was retained there, and of
            // this access; it is the caller's to give away, and so is what they promise of work.
            range = range.with(unsafe { Mapping::from_raw(room, Arc::new(allocation), access) }?, None);
        }
        let size = range.end();
        Ok(VirtualMemoryBuffer::new(self, range, size, None))
    }
}

/// A mapping that the driver told of.
#[derive(Clone, Copy)]
struct Extent {
    address: CUdeviceptr,
    size: GranularSize,
}

/// A whole reservation, with what is mapped in it from its start, and whom that is granted to.
struct Found {
    address: CUdeviceptr,
    size: GranularSize,
    chunks: Vec<(Allocation, Arc<[CUmemAccessDesc]>)>,
}

/// An address within a range. None lies beyond the last that there is.
fn at(address: CUdeviceptr, offset: usize) -> Result<CUdeviceptr, Error> {
    address.checked_add(offset).ok_or(Error::NotVmm { address })
}
