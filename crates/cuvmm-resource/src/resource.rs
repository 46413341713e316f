//! [`VirtualMemoryResource`]: makes buffers of one kind of memory.

use cuvmm_driver::sys::{CUdevice_attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationProp};
use cuvmm_driver::{CUresult, Device, Probe};
use cuvmm_handles::{Allocation, GranularSize, Granularity, Mapping, Reservation, Room};

use crate::buffer::VirtualMemoryBuffer;
use crate::error::Error;
use crate::options::{HandleKind, Options};
use crate::range::Range;
use crate::stream::StreamRef;
use crate::sync::{Arc, Mutex, PoisonError};

/// Makes buffers of one device's memory, all by the same [`Options`]. Cheap to clone; its buffers outlive it.
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
    device: Device,
    options: Options,
    properties: CUmemAllocationProp,
    granularity: Granularity,
    access: Arc<[CUmemAccessDesc]>,
    /// What copies and fills run on where no stream is given; made when first needed.
    stream: Mutex<Option<StreamRef>>,
}

impl VirtualMemoryResource {
    /// Makes a resource of `device`'s memory. All queries of the driver happen here. Whether memory can be exported is
    /// tried out, once a device, where the options ask for it.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Unsupported`], [`Error::Driver`] for a release stream of another driver;
    /// what the driver answers.
    pub fn new(device: &Device, options: Options) -> Result<Self, Error> {
        let alignment = options.align();
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(Error::Alignment { alignment });
        }
        options.released_after().require_driver(device.driver())?;
        require(device, CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management")?;
        if options.kind() == HandleKind::PosixFd {
            let attribute = CUdevice_attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
            require(device, attribute, "memory exported as POSIX file descriptors")?;
            require_probe(device, options.kind())?;
        }
        let properties = CUmemAllocationProp::pinned(device.location(), options.kind().as_driver());
        let granularity = Granularity::minimum(device.driver(), &properties)?;
        let own = CUmemAccessDesc { location: device.location(), flags: CUmemAccess_flags::READWRITE };
        Ok(Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                options,
                properties,
                granularity,
                access: Arc::from([own]),
                stream: Mutex::default(),
            }),
        })
    }

    /// The device that it was made for.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The options that it was made with.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    /// What the sizes of its chunks are multiples of.
    pub fn granularity(&self) -> Granularity {
        self.inner.granularity
    }

    /// Whether its buffers can be shared with other processes.
    pub fn is_ipc_enabled(&self) -> bool {
        self.options().kind() != HandleKind::None
    }

    /// Makes a buffer of `size` bytes, rounded up to the granularity. What they hold is undefined. 0 bytes make an
    /// empty buffer, and no driver call.
    ///
    /// # Errors
    /// [`Error::Handles`] for a size that overflows; what the driver answers: 2 from `cuMemCreate` where the device
    /// has not so much memory, from `cuMemAddressReserve` where there is not so much address space. Nothing is left
    /// behind.
    #[doc(alias = "cuMemCreate")]
    pub fn allocate(&self, size: usize) -> Result<VirtualMemoryBuffer, Error> {
        let size = self.granularity().round_up(size)?;
        if size.is_zero() {
            return Ok(VirtualMemoryBuffer::new(self, Range::default(), 0, None));
        }
        self.buffer_in(&Arc::new(self.reserve(size.bytes())?), size)
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
    /// [`Error::Handles`] for a chunk that is no multiple of the granularity, [`Error::Chunks`] for one of no bytes
    /// and for a size that they do not cover, all before any call; what `next` and the driver answer. Nothing is left
    /// behind.
    pub fn map_chunks<E: From<Error>>(
        &self,
        chunks: &[usize],
        size: usize,
        mut next: impl FnMut(usize, GranularSize) -> Result<Allocation, E>,
    ) -> Result<VirtualMemoryBuffer, E> {
        let (sizes, sum) = self.check_chunks(chunks, size)?;
        if sizes.is_empty() {
            return Ok(VirtualMemoryBuffer::new(self, Range::default(), 0, None));
        }
        let reservation = Arc::new(self.reserve_in(Reservation::GRANULARITY, sum)?);
        let mut range = Range::default();
        for (index, chunk) in sizes.into_iter().enumerate() {
            let room = reservation.take(range.end(), chunk.bytes()).map_err(Error::from)?;
            let allocation = Arc::new(next(index, chunk)?);
            range = range.with(self.map(room, allocation)?);
        }
        Ok(VirtualMemoryBuffer::new(self, range, size, None))
    }

    /// Each chunk's size, checked, and their sum.
    fn check_chunks(&self, chunks: &[usize], size: usize) -> Result<(Vec<GranularSize>, usize), Error> {
        let granularity = self.granularity();
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

    /// Reserves at least `bytes` of addresses, at the resource's alignment.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<Reservation, Error> {
        self.reserve_in(ADDRESS_UNIT, bytes)
    }

    /// Reserves `bytes` of addresses, rounded up to `unit`, at the resource's alignment.
    fn reserve_in(&self, unit: Granularity, bytes: usize) -> Result<Reservation, Error> {
        let size = self.granularity().max(unit).round_up(bytes)?;
        // 0 already stands for the granularity of reservations.
        let coarse = Some(self.granularity().bytes()).filter(|bytes| *bytes > Reservation::GRANULARITY.bytes());
        let alignment = self.options().align().max(coarse.unwrap_or(0));
        Ok(Reservation::reserve(self.device().driver(), size, alignment)?)
    }

    /// Reserves exactly the addresses from `address` on, at least `bytes` of them.
    pub(crate) fn reserve_at(&self, address: CUdeviceptr, bytes: usize) -> Result<Reservation, Error> {
        let size = self.granularity().max(ADDRESS_UNIT).round_up(bytes)?;
        Ok(Reservation::at(self.device().driver(), size, address)?)
    }

    /// Reserves `wanted` bytes of addresses; where so many can't be had, half of what goes beyond `needed`, and so
    /// on. None where none are needed and none can be had.
    fn reserve_with_headroom(&self, needed: usize, wanted: usize) -> Result<Option<Reservation>, Error> {
        let unit = self.granularity().max(ADDRESS_UNIT).bytes();
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

    /// A buffer of one chunk at the head of a reservation.
    fn buffer_in(&self, reservation: &Arc<Reservation>, size: GranularSize) -> Result<VirtualMemoryBuffer, Error> {
        let mapping = self.create_in(reservation.take(0, size.bytes())?)?;
        Ok(VirtualMemoryBuffer::new(self, Range::default().with(mapping), size.bytes(), None))
    }

    /// Makes memory of the room's size and maps it there.
    pub(crate) fn create_in(&self, room: Room) -> Result<Mapping, Error> {
        let Inner { device, properties, granularity, .. } = &*self.inner;
        let size = granularity.exact(room.size())?;
        let allocation = Allocation::create(device.driver(), size, properties)?;
        self.map(room, Arc::new(allocation))
    }

    fn map(&self, room: Room, allocation: Arc<Allocation>) -> Result<Mapping, Error> {
        Ok(Mapping::map_in(room, allocation, Arc::clone(&self.inner.access))?)
    }

    /// The resource's own stream, which waits for no other.
    pub(crate) fn own_stream(&self) -> Result<StreamRef, Error> {
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

/// Refuses a handle kind that can't be had, whatever the attributes say. What is short now, memory or open files, may
/// not be when it is needed.
fn require_probe(device: &Device, kind: HandleKind) -> Result<(), Error> {
    match device.probe(kind.as_driver()) {
        Probe::Refused { error, .. } if !error.is_shortage() => Err(error.into()),
        Probe::Refused { .. } | Probe::Available => Ok(()),
    }
}

/// Refuses a device that lacks an attribute.
fn require(device: &Device, attribute: CUdevice_attribute, what: &'static str) -> Result<(), Error> {
    match device.attribute(attribute)? {
        Some(1) => Ok(()),
        _ => Err(Error::Unsupported { what, ordinal: device.ordinal() }),
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
