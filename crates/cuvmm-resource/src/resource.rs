//! [`VirtualMemoryResource`]: makes buffers of one kind of memory.

use std::sync::atomic::{AtomicBool, Ordering};

use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_driver::{CUresult, Device};
use cuvmm_handles::{Allocation, GranularSize, Granularity, Reservation};

use crate::buffer::VirtualMemoryBuffer;
use crate::error::Error;
use crate::kind::{HandleKind, Location};
use crate::memory::{Memory, Want};
use crate::options::Options;
use crate::range::Range;
use crate::reaper;
use crate::release::{OnDrop, Order};
use crate::settle::Unsettled;
use crate::statistics::{Counts, Statistics};
use crate::stream::StreamRef;
use crate::sync::{Arc, Mutex, PoisonError};
use crate::watch::{TARGET, watch};

/// Makes buffers of one device's memory, or of the host's, all by the same [`Options`]. Cheap to clone; its buffers outlive it.
///
/// ```
/// use cuvmm_resource::{Options, VirtualMemoryResource};
/// use cuvmm_sim::{Machine, Simulator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let simulator = Simulator::new(Machine::default());
/// let resource = VirtualMemoryResource::new(&simulator.driver()?.device(0)?, Options::new())?;
/// let buffer = resource.allocate(3_000_000)?;
/// assert_eq!(buffer.size(), 4 << 20); // rounded up to the granularity
/// buffer.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct VirtualMemoryResource {
    inner: Arc<Inner>,
}

/// What the addresses of buffers that may grow are reserved in multiples of, at least: 32 MiB.
///
/// Drivers take addresses from arenas of that size. They serve a smaller request from whichever arena has space, and
/// ignore its hint (measured on an H200, driver 580, once a context is active), so that only whole arenas can be had
/// behind a buffer. Addresses cost nothing, and what a chunk leaves of them is room for the next.
const ADDRESS_UNIT: Granularity = match Granularity::new(32 << 20) {
    Some(granularity) => granularity,
    None => unreachable!(),
};

struct Inner {
    options: Options,
    memory: Memory,
    /// What copies and fills run on where no stream is given; made when first needed.
    stream: Mutex<Option<StreamRef>>,
    /// Whether a buffer went where no call was to be made: what goes with it makes none either.
    makes_no_call: AtomicBool,
}

impl VirtualMemoryResource {
    /// Makes a resource of `device`'s memory, or of the host's, which that device reaches. All queries of the driver
    /// happen here. What attributes alone do not tell for sure is tried out where the options ask for it: handle kinds
    /// (once a device), memory of the host, RDMA and compression.
    ///
    /// # Errors
    /// Before any call: [`Error::Alignment`], [`Error::AddressHint`], [`Error::HandleKindOfHost`],
    /// [`Error::GrowthPolicy`], [`Error::Recycling`], [`Error::Driver`] for a release stream or a peer of another driver. What
    /// can't be had: [`Error::Unsupported`], [`Error::HandleKindRefused`], [`Error::PeerUnreachable`], [`Error::NumaNode`],
    /// [`Error::NumaNodeRefused`], [`Error::MaxChunk`], [`Error::RecyclingBudget`]; for a trial [`Error::OutOfMemory`],
    /// [`Error::AddressSpaceExhausted`], [`Error::AccessRefused`]; what else the driver answers.
    pub fn new(device: &Device, options: Options) -> Result<Self, Error> {
        options.check(device)?;
        let memory = Memory::find(device, &options)?;
        let makes_no_call = AtomicBool::new(options.on_drop == OnDrop::Defer);
        Ok(Self { inner: Arc::new(Inner { options, memory, stream: Mutex::default(), makes_no_call }) })
    }

    /// The device that it was made for.
    pub fn device(&self) -> &Device {
        &self.memory().device
    }

    /// The ordinal of the device that its memory is on; none for memory of the host.
    pub fn device_id(&self) -> Option<i32> {
        (!self.location().is_host()).then(|| self.device().ordinal())
    }

    /// Where its memory lies. [`Location::HostNumaCurrent`] reads as the node that it was when this was made.
    pub fn location(&self) -> Location {
        self.memory().location
    }

    /// The options that it was made with.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    /// What the sizes of its chunks are multiples of.
    pub fn granularity(&self) -> Granularity {
        self.memory().granularity
    }

    /// What the sizes of chunks that come from elsewhere are multiples of: the least that works, whichever granularity
    /// its own have.
    pub fn minimum_granularity(&self) -> Granularity {
        self.memory().least
    }

    /// Whether a GPU may touch its buffers.
    pub fn is_device_accessible(&self) -> bool {
        self.memory().is_device_accessible()
    }

    /// Whether the host may touch its buffers, at their own address.
    pub fn is_host_accessible(&self) -> bool {
        self.location().is_host()
    }

    /// Whether its buffers can be shared with other processes.
    pub fn is_ipc_enabled(&self) -> bool {
        self.handle_kind() != HandleKind::None
    }

    /// Whether its memory moves between host and devices by itself: never.
    pub fn is_managed(&self) -> bool {
        false
    }

    /// How its memory can be shared: the kind that was asked for, or the one to fall back on.
    pub fn handle_kind(&self) -> HandleKind {
        self.memory().handle_kind
    }

    /// Why that is not the kind that was asked for first; none where it is.
    pub fn handle_refused(&self) -> Option<&Error> {
        self.memory().handle_refused.as_ref()
    }

    /// Whether network cards reach its memory.
    pub fn has_rdma(&self) -> bool {
        self.memory().properties.alloc_flags.gpu_direct_rdma_capable != 0
    }

    /// Whether its memory is compressible.
    pub fn has_compression(&self) -> bool {
        self.memory().properties.alloc_flags.compression_type != 0
    }

    /// Whether it keeps memory of its buffers for the next ones, as it was [asked to](Options::recycling).
    pub fn is_recycling(&self) -> bool {
        self.memory().kept.is_some()
    }

    /// What it has had of the driver so far, and what its buffers came to. Makes no call.
    pub fn statistics(&self) -> Statistics {
        self.counts().statistics(&self.memory().usage)
    }

    /// Makes a buffer of `size` bytes, rounded up to the granularity. What they hold is undefined. 0 bytes make an
    /// empty buffer, and no driver call.
    ///
    /// # Errors
    /// [`Error::Handles`] for a size that overflows; [`Error::AddressSpaceExhausted`], [`Error::OutOfMemory`],
    /// [`Error::AccessRefused`], [`Error::HandleKindRefused`] where that changed since the resource was made;
    /// [`Error::Forked`]; what else the driver answers. Nothing is left behind.
    #[doc(alias = "cuMemCreate")]
    pub fn allocate(&self, size: usize) -> Result<VirtualMemoryBuffer, Error> {
        let span = || tracing::debug_span!(target: TARGET, "allocate", requested = size, zeroed = false);
        self.observed(span, || self.exact(size))
    }

    /// Makes a buffer of `size` bytes with the addresses behind it reserved, so that it grows to `capacity` bytes
    /// and keeps its address. Addresses cost no device memory. Where so many can't be had, it is fewer:
    /// [`VirtualMemoryBuffer::capacity`] says how many.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let cache = resource.allocate_with_capacity(0, 64 << 30)?;
    /// assert_eq!((cache.size(), cache.capacity()), (0, 64 << 30));
    /// let larger = cache.grow(2 << 20)?;
    /// assert_eq!(larger.address(), cache.address());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_with_capacity(&self, size: usize, capacity: usize) -> Result<VirtualMemoryBuffer, Error> {
        let span = || tracing::debug_span!(target: TARGET, "allocate", requested = size, capacity, zeroed = false);
        self.observed(span, || self.with_capacity(size, capacity))
    }

    /// As [`allocate`](Self::allocate), with every byte zero. It is done when this returns.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let mut bytes = [1; 8];
    /// resource.allocate_zeroed(2 << 20)?.copy_to_host(0, &mut bytes)?;
    /// assert_eq!(bytes, [0; 8]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); [`Error::NotWritable`] before any call where the resource's device may not
    /// write the memory; as [`fill`](VirtualMemoryBuffer::fill).
    pub fn allocate_zeroed(&self, size: usize) -> Result<VirtualMemoryBuffer, Error> {
        let span = || tracing::debug_span!(target: TARGET, "allocate", requested = size, zeroed = true);
        self.observed(span, || {
            self.memory().require_writable()?;
            self.exact(size)?.zeroed_from(0)
        })
    }

    /// As [`allocate_zeroed`](Self::allocate_zeroed) and [`allocate_with_capacity`](Self::allocate_with_capacity) in
    /// one.
    ///
    /// # Errors
    /// As those.
    pub fn allocate_zeroed_with_capacity(&self, size: usize, capacity: usize) -> Result<VirtualMemoryBuffer, Error> {
        let span = || tracing::debug_span!(target: TARGET, "allocate", requested = size, capacity, zeroed = true);
        self.observed(span, || {
            self.memory().require_writable()?;
            self.with_capacity(size, capacity)?.zeroed_from(0)
        })
    }

    /// Makes a buffer, in the span, and counts it. Nobody listens in a forked child: a subscriber has locks, too.
    fn observed(
        &self,
        span: impl FnOnce() -> tracing::Span,
        make: impl FnOnce() -> Result<VirtualMemoryBuffer, Error>,
    ) -> Result<VirtualMemoryBuffer, Error> {
        self.require_own_process()?;
        watch("allocate", span(), || make().inspect(|_| self.counts().add_allocation()))
    }

    fn exact(&self, size: usize) -> Result<VirtualMemoryBuffer, Error> {
        let size = self.granularity().round_up(size)?;
        if size.is_zero() {
            return Ok(VirtualMemoryBuffer::new(self, Range::default(), 0, None));
        }
        self.buffer_in(&Arc::new(self.reserve(size.bytes())?), size)
    }

    fn with_capacity(&self, size: usize, capacity: usize) -> Result<VirtualMemoryBuffer, Error> {
        let size = self.granularity().round_up(size)?;
        let reservation = self.reserve_with_headroom(size.bytes(), capacity.max(size.bytes()))?.map(Arc::new);
        match reservation {
            Some(reservation) if !size.is_zero() => self.buffer_in(&reservation, size),
            reservation => Ok(VirtualMemoryBuffer::new(self, Range::default(), 0, reservation)),
        }
    }

    /// Makes a buffer of `size` bytes of memory that comes from elsewhere: `next` gives the allocation of each chunk
    /// in turn, whose size is in `chunks`. They are mapped one behind the other, with this resource's access, in a
    /// range that is their sum.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp};
    /// use cuvmm_handles::Allocation;
    ///
    /// let properties = CUmemAllocationProp::pinned(device.location(), CUmemAllocationHandleType::NONE);
    /// let buffer = resource.map_chunks(&[2 << 20, 4 << 20], 5 << 20, |_, size| -> Result<_, Error> {
    ///     Ok(Allocation::create(device.driver(), size, &properties)?)
    /// })?;
    /// assert_eq!((buffer.size(), buffer.chunks().len()), (5 << 20, 2));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Handles`] for a chunk that is no multiple of the least granularity, [`Error::Chunks`] for one of no bytes
    /// and for a size that they do not cover, all before any call; what `next` and the driver answer;
    /// [`Error::ChunkMismatch`] for memory of a device where this resource's is the host's. Nothing is left behind.
    pub fn map_chunks<E: From<Error>>(
        &self,
        chunks: &[usize],
        size: usize,
        mut next: impl FnMut(usize, GranularSize) -> Result<Allocation, E>,
    ) -> Result<VirtualMemoryBuffer, E> {
        self.require_own_process()?;
        let (sizes, sum) = self.check_chunks(chunks, size)?;
        if sizes.is_empty() {
            self.counts().add_allocation();
            return Ok(VirtualMemoryBuffer::new(self, Range::default(), 0, None));
        }
        let least = self.memory().least.max(Reservation::GRANULARITY);
        let reservation = Arc::new(self.reserve_in(least, least, sum)?);
        let mut range = Range::default();
        for (index, chunk) in sizes.into_iter().enumerate() {
            let room = reservation.take(range.end(), chunk.bytes()).map_err(Error::from)?;
            let allocation = next(index, chunk)?.counted(&self.memory().usage);
            self.memory().require_hosts(&allocation)?;
            range = range.with(self.memory().map(room, Arc::new(allocation))?, None);
        }
        self.counts().add_allocation();
        Ok(VirtualMemoryBuffer::new(self, range, size, None))
    }

    /// Each chunk's size, checked, and their sum.
    fn check_chunks(&self, chunks: &[usize], size: usize) -> Result<(Vec<GranularSize>, usize), Error> {
        let granularity = self.memory().least;
        let mut sum = granularity.exact(0)?;
        let mut sizes = Vec::with_capacity(chunks.len());
        for bytes in chunks {
            let chunk = granularity.exact(*bytes)?;
            if chunk.is_zero() {
                return Err(Error::Chunks { size, sum: sum.bytes() });
            }
            sum = sum.checked_add(chunk)?;
            sizes.push(chunk);
        }
        let sum = sum.bytes();
        if size > sum || (size == 0) != (sum == 0) {
            return Err(Error::Chunks { size, sum });
        }
        Ok((sizes, sum))
    }

    /// What addresses are reserved in multiples of, and at multiples of.
    fn address_unit(&self) -> Granularity {
        self.granularity().max(ADDRESS_UNIT)
    }

    /// Reserves at least `bytes` of addresses at the resource's alignment, where its hint says if that can be had.
    fn reserve(&self, bytes: usize) -> Result<Reservation, Error> {
        self.reserve_in(self.address_unit(), self.granularity(), bytes)
    }

    /// As [`reserve`](Self::reserve), for chunks whose addresses are multiples of `granularity`.
    pub(crate) fn reserve_anywhere(&self, granularity: Granularity, bytes: usize) -> Result<Reservation, Error> {
        let size = self.address_unit().max(granularity).round_up(bytes)?;
        let reservation = Reservation::reserve(self.device().driver(), size, self.address_alignment(granularity))?;
        Ok(reservation.counted(&self.memory().usage))
    }

    fn reserve_in(&self, unit: Granularity, granularity: Granularity, bytes: usize) -> Result<Reservation, Error> {
        let (size, alignment) = (unit.round_up(bytes)?, self.address_alignment(granularity));
        let (driver, hint) = (self.device().driver(), self.options().address_hint);
        // Some drivers refuse a hint that they can't grant.
        if hint.0 != 0
            && let Ok(reservation) = Reservation::hinted(driver, size, alignment, hint)
        {
            return Ok(reservation.counted(&self.memory().usage));
        }
        Ok(Reservation::reserve(driver, size, alignment)?.counted(&self.memory().usage))
    }

    /// What is asked for as the alignment, where 0 already stands for the granularity of reservations.
    fn address_alignment(&self, granularity: Granularity) -> usize {
        let coarse = Some(granularity.bytes()).filter(|bytes| *bytes > Reservation::GRANULARITY.bytes());
        self.options().alignment.max(coarse.unwrap_or(0))
    }

    /// Reserves exactly the addresses from `address` on, at least `bytes` of them.
    pub(crate) fn reserve_at(&self, address: CUdeviceptr, bytes: usize) -> Result<Reservation, Error> {
        let size = self.address_unit().round_up(bytes)?;
        let reservation = Reservation::hinted(self.device().driver(), size, 0, address)?;
        // Counted first: addresses elsewhere may fail to be freed.
        Ok(reservation.counted(&self.memory().usage).require_at(address)?)
    }

    /// Reserves `wanted` bytes of addresses; where so many can't be had, half of what goes beyond `needed`, and so
    /// on. None where none are needed and none can be had.
    fn reserve_with_headroom(&self, needed: usize, wanted: usize) -> Result<Option<Reservation>, Error> {
        let unit = self.address_unit().bytes();
        // The most that can be rounded up: there are no more addresses than that.
        let mut headroom = wanted.min(usize::MAX - (unit - 1)).saturating_sub(needed);
        loop {
            if needed + headroom == 0 {
                return Ok(None);
            }
            match self.reserve(needed + headroom) {
                Err(error) if headroom > 0 && error.code() == Some(CUresult::OUT_OF_MEMORY) => {
                    headroom = if headroom > unit { headroom / 2 } else { 0 };
                }
                result => return result.map(Some),
            }
        }
    }

    /// A buffer at the head of a reservation.
    fn buffer_in(&self, reservation: &Arc<Reservation>, size: GranularSize) -> Result<VirtualMemoryBuffer, Error> {
        let room = reservation.take(0, size.bytes())?;
        let range = self.memory().extend(Range::default(), room, None, size.bytes(), Want::Need)?;
        Ok(VirtualMemoryBuffer::new(self, range, size.bytes(), None))
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// What every operation asks before its first call, lock or span.
    pub(crate) fn require_own_process(&self) -> Result<(), Error> {
        Ok(self.device().driver().require_own_process()?)
    }

    /// Waits for all that memory of this resource is to wait for. No default stream is meant by default where it is the
    /// host's.
    pub(crate) fn settle(&self, order: &mut Order, instead: Option<&StreamRef>) -> Result<(), Unsettled> {
        order.settle(self.device().driver(), self.by_default(), instead)
    }

    /// The device whose default stream is meant where none is named: none's where it is memory of the host.
    pub(crate) fn by_default(&self) -> Option<&Device> {
        Some(self.device()).filter(|_| !self.location().is_host())
    }

    /// Has what goes with its last share be ended by the reaper.
    pub(crate) fn end_without_call(&self) {
        self.inner.makes_no_call.store(true, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> &Arc<Counts> {
        &self.memory().counts
    }

    /// The resource's own stream, which waits for no other.
    pub(crate) fn own_stream(&self) -> Result<StreamRef, Error> {
        self.require_own_process()?;
        let lock = || self.inner.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().clone();
        if let Some(known) = known {
            return Ok(known);
        }
        // Made without the lock, which no call is made under. Of several made at once, one is kept.
        let made = StreamRef::create(self.device())?;
        let kept = lock().get_or_insert_with(|| made.clone()).clone();
        Ok(kept)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.memory.device.driver().is_forked() {
            return;
        }
        if let Some(kept) = &self.memory.kept {
            kept.close();
        }
        if *self.makes_no_call.get_mut() {
            let own = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            let release = std::mem::take(&mut self.options.release).into_stream();
            own.into_iter().chain(release).for_each(reaper::hand_over_stream);
        }
    }
}

impl PartialEq for VirtualMemoryResource {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for VirtualMemoryResource {}

impl std::fmt::Debug for VirtualMemoryResource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualMemoryResource")
            .field("device", &self.device().ordinal())
            .field("options", self.options())
            .field("granularity", &self.granularity().bytes())
            .finish_non_exhaustive()
    }
}
