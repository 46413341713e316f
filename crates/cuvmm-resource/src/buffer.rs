//! [`VirtualMemoryBuffer`]: contiguous memory that can grow, and its end.

use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm_driver::Driver;
use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_handles::{Mapping, PrimaryContext, Reservation};

use crate::error::Error;
use crate::range::Range;
use crate::release::{Order, Release};
use crate::resource::VirtualMemoryResource;
use crate::stream::StreamRef;
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a buffer that was grown or cut from another came by its addresses.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let buffer = resource.allocate_with_capacity(2 << 20, 1 << 30)?;
/// let grown = buffer.grow(4 << 20)?;
/// assert_eq!(grown.outcome(), Some(Outcome::InPlace));
/// assert_eq!(grown.grow(3 << 20)?.outcome(), Some(Outcome::Covered));
/// // The addresses behind the first are taken by now.
/// assert_eq!(buffer.grow(4 << 20)?.outcome(), Some(Outcome::Moved));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The memory was there: no driver call was made.
    Covered,
    /// Memory was added behind the old; the address is the same.
    InPlace,
    /// All of the memory is mapped at another address. Nothing was copied.
    Moved,
}

/// Contiguous memory, at addresses that kernels use, which [grows](Self::grow) without a copy.
///
/// Work on the addresses is started by unsafe code, which sees to it that the work ends, or is ordered before the
/// [release stream](Self::set_release) or a [fence](Self::fence), before the last buffer over them closes. A graph that
/// [has the memory](Self::retain_in_graph) keeps it for its runs by itself.
///
/// What the memory holds can change at any time, by a GPU or another process that maps it, and is undefined until
/// it is written: bytes are copied in and out. They are referred to only where somebody vouches that they stay, in memory
/// of the host ([`as_slice`](Self::as_slice)).
///
/// A buffer can be dropped by anyone, anywhere. Its drop waits as closing it does, for up to two seconds. Where its work goes
/// on for longer, or can't be waited for (the stream is capturing, or the drop happens in a host function of the driver's),
/// a thread of this library's lets go of the memory later, once the work is over. [Deferred](crate::OnDrop::Defer), a drop
/// leaves everything to that thread.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let buffer = resource.allocate(2 << 20)?;
/// buffer.fill(0, buffer.size(), 7)?;
/// let mut bytes = [0; 3];
/// buffer.copy_to_host(buffer.size() - 3, &mut bytes)?;
/// assert_eq!(bytes, [7; 3]);
/// buffer.close()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a buffer that is dropped lets go of its memory; growing one leaves it as it is"]
pub struct VirtualMemoryBuffer {
    pub(crate) resource: VirtualMemoryResource,
    pub(crate) range: Range,
    pub(crate) size: usize,
    /// The addresses of a buffer with capacity while it has no memory; a mapping holds its own.
    pub(crate) reserved: Option<Arc<Reservation>>,
    outcome: Option<Outcome>,
    pub(crate) order: Mutex<Order>,
    id: u64,
    generation: u64,
}

/// A number for a buffer, never the same twice in a process.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl VirtualMemoryBuffer {
    pub(crate) fn new(
        resource: &VirtualMemoryResource,
        range: Range,
        size: usize,
        reserved: Option<Arc<Reservation>>,
    ) -> Self {
        let number = next_number();
        let order = Mutex::new(Order::new(resource.options().release.clone()));
        let resource = resource.clone();
        resource.counts().add_buffer();
        Self { resource, range, size, reserved, outcome: None, order, id: number, generation: number }
    }

    /// A buffer of this one's family, with its release stream. One without memory keeps the addresses where this
    /// begins.
    pub(crate) fn resized(&self, range: Range, size: usize, outcome: Outcome) -> Self {
        self.resource.counts().add_buffer();
        Self {
            resource: self.resource.clone(),
            reserved: if range.is_empty() { self.first_reservation() } else { None },
            range,
            size,
            outcome: Some(outcome),
            order: Mutex::new(Order::new(self.released_after())),
            id: self.id,
            generation: next_number(),
        }
    }

    /// The reservation that it begins in: at its head, as every buffer does.
    fn first_reservation(&self) -> Option<Arc<Reservation>> {
        let first = self.range.first().map(|mapping| Arc::clone(mapping.room().reservation()));
        first.or_else(|| self.reserved.clone())
    }

    /// With this release instead of the resource's, of the same driver.
    pub(crate) fn with_release(mut self, release: Release) -> Self {
        self.order.get_mut().unwrap_or_else(PoisonError::into_inner).release = release;
        self
    }

    /// Lets go of a buffer that nobody was told of, so that no work can be on it but a fill of ours. Where there is
    /// nothing to wait for, nothing is asked either: what it shares goes without a call, also in a host function.
    pub(crate) fn discard(mut self) {
        let order = self.order.get_mut().unwrap_or_else(PoisonError::into_inner);
        order.release = Release::Caller;
        if order.has_no_fence() {
            // What fails here the handles count and report.
            let _ = self.let_go();
        }
    }

    /// Where it begins: an address for kernels. 0 for an empty buffer without capacity.
    pub fn address(&self) -> CUdeviceptr {
        match &self.reserved {
            Some(reserved) if self.range.is_empty() => reserved.address(),
            _ => self.range.base(),
        }
    }

    /// How long it is, in bytes: a multiple of the granularity, but for imports of a shorter prefix.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// To how many bytes it can grow within addresses that are reserved already, if no alias grows there first.
    pub fn capacity(&self) -> usize {
        self.range.end() + self.room_behind().map_or(0, |(_, _, behind)| behind)
    }

    /// The room behind its memory: the reservation that it ends in, where in it, and how many bytes.
    pub(crate) fn room_behind(&self) -> Option<(&Arc<Reservation>, usize, usize)> {
        match self.range.last().map(Mapping::room) {
            Some(room) => Some((room.reservation(), room.end(), room.behind())),
            None => self.reserved.as_ref().map(|reserved| (reserved, 0, reserved.size())),
        }
    }

    /// The resource that it was made by.
    pub fn resource(&self) -> &VirtualMemoryResource {
        &self.resource
    }

    /// How it came by its addresses, where it was grown or cut from another.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// A number that it shares with those that it was grown or cut from or into, and with no other buffer of this process.
    ///
    /// It means nothing elsewhere, and does not travel: an imported buffer has one of its own. What names a buffer in other
    /// processes is the `BufferId` of cuvmm-ipc (`buffer_id`).
    pub fn id(&self) -> u64 {
        self.id
    }

    /// A number of its own among those of its [id](Self::id): higher than that of the one that it was made from. An
    /// imported buffer's is not its exporter's.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The mappings that cover its size, in address order.
    pub fn mappings(&self) -> Vec<&Mapping> {
        let mut mappings = self.range.mappings();
        let base = self.address().0;
        mappings.truncate(mappings.partition_point(|mapping| mapping.address().0 - base < self.size as u64));
        mappings
    }

    pub(crate) fn range(&self) -> &Range {
        &self.range
    }

    pub(crate) fn driver(&self) -> &Driver {
        self.resource.device().driver()
    }

    /// Held for a moment. Refused in a forked child: a thread that is not there may have held it when that was made.
    pub(crate) fn order(&self) -> Result<MutexGuard<'_, Order>, Error> {
        self.resource.require_own_process()?;
        Ok(self.order.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What it waits for when it closes or drops, besides its fences. In a forked child it waits for nothing.
    pub fn released_after(&self) -> Release {
        self.order().map_or(Release::Caller, |order| order.release.clone())
    }

    /// Sets what it waits for when it closes or drops, besides its fences. Buffers grown from it inherit it.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let stream = StreamRef::create(&device)?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// buffer.set_release(Release::Stream(stream.clone()))?;
    /// // Kernels are launched on `stream.as_raw()` here.
    /// buffer.close()?; // waits for them
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DifferentDrivers`](cuvmm_driver::Error::DifferentDrivers) for a stream of another driver; [`Error::Forked`].
    pub fn set_release(&self, release: Release) -> Result<(), Error> {
        release.require_driver(self.driver())?;
        let old = std::mem::replace(&mut self.order()?.release, release);
        // Without the lock: with a stream goes its owner, whose drop is anybody's code.
        drop(old);
        Ok(())
    }

    /// Makes it wait, when it closes or drops, for the work queued on `stream` so far as well: for whoever queues
    /// work on a stream that is not its release stream.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// let other = StreamRef::create(&device)?;
    /// // Kernels are launched on `other.as_raw()` here.
    /// buffer.fence(&other)?;
    /// drop(other); // the fence keeps it
    /// buffer.close()?; // waits for the kernels, and for the release stream
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], [`Error::HostCallback`], [`Error::Forked`], values of two drivers; what the driver
    /// answers. The work is then not waited for.
    pub fn fence(&self, stream: &StreamRef) -> Result<(), Error> {
        self.driver().require_same(stream.driver())?;
        if self.is_empty() {
            return Ok(());
        }
        self.resource.require_own_process()?;
        if self.driver().is_in_host_function()? {
            return Err(Error::HostCallback);
        }
        Order::fence(&self.order, &self.resolve(stream)?)
    }

    /// Makes it wait for all of `stream`, whose work could not be waited for at once.
    pub(crate) fn fence_stream(&self, stream: &StreamRef) {
        let covered = self.order().map(|mut order| order.fence_stream(stream));
        // Without the lock, as above.
        drop(covered);
    }

    /// The stream that was given; for a default stream's token the legacy default stream of the device's primary
    /// context, and a share of that.
    pub(crate) fn resolve(&self, stream: &StreamRef) -> Result<StreamRef, Error> {
        if !stream.is_default() {
            return Ok(stream.clone());
        }
        Ok(StreamRef::legacy_of(PrimaryContext::retain(self.resource.device())?))
    }
}

impl std::fmt::Debug for VirtualMemoryBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualMemoryBuffer")
            .field("address", &self.address())
            .field("size", &self.size)
            .field("outcome", &self.outcome)
            .finish_non_exhaustive()
    }
}
