//! [`Options`]: what a resource's memory is to be.

use std::time::Duration;

use cuvmm_driver::Device;
use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_handles::Reservation;

use crate::error::Error;
use crate::growth::GrowthPolicy;
use crate::kind::{Access, GranularityKind, HandleKind, Location, Request};
use crate::recycling::Recycling;
use crate::release::{OnDrop, Release};
use crate::shortage::{OutOfMemory, Relief};

/// What a resource's memory is to be. They are checked when the resource is made, and never change after.
///
/// ```
/// use cuvmm_resource::{HandleKind, Options};
///
/// let options = Options::new().handle_kind(HandleKind::PosixFd).alignment(64 << 20);
/// assert_eq!((options.handle_kind, options.alignment), (HandleKind::PosixFd, 64 << 20));
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Where the memory lies.
    pub location: Location,
    /// How it can be handed to other processes.
    pub handle_kind: HandleKind,
    /// The kind to make do with where that one can't be had.
    pub handle_fallback: Option<HandleKind>,
    /// Which granularity sizes are rounded up to.
    pub granularity: GranularityKind,
    /// What the address of an allocation is a multiple of, in bytes; 0 for the granularity.
    pub alignment: usize,
    /// Where an allocation is wished to be; 0 for anywhere.
    pub address_hint: CUdeviceptr,
    /// What the resource's device may do with the memory.
    pub own_access: Access,
    /// What other devices may do with it. Of one that is named twice the last counts.
    pub peers: Vec<(Device, Access)>,
    /// GPUDirect RDMA.
    pub rdma: Request,
    /// Compressible memory.
    pub compression: Request,
    /// The most bytes of one chunk; none for any number.
    pub max_chunk: Option<usize>,
    /// How much a grow adds.
    pub growth: GrowthPolicy,
    /// Which memory of buffers that are gone is kept for the next ones; none for all to be released.
    pub recycling: Option<Recycling>,
    /// What buffers wait for.
    pub release: Release,
    /// Who waits for it when a buffer is dropped.
    pub on_drop: OnDrop,
    pub(crate) relief: Relief,
}

impl Options {
    /// Memory of the device, readable and writable by it, that can't be exported.
    pub fn new() -> Self {
        Self::default()
    }

    /// Where the memory lies; [`Location::Device`] unless this is called.
    #[must_use]
    pub fn location(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// How the memory can be handed to other processes; [`HandleKind::None`] unless this is called. Where the machine
    /// refuses that kind, so is the resource.
    #[must_use]
    pub fn handle_kind(self, handle_kind: HandleKind) -> Self {
        Self { handle_kind, handle_fallback: None, ..self }
    }

    /// As [`handle_kind`](Self::handle_kind), and where the machine refuses it `fallback` is taken instead.
    /// [`VirtualMemoryResource::handle_kind`](crate::VirtualMemoryResource::handle_kind) tells which it was, and
    /// [`handle_refused`](crate::VirtualMemoryResource::handle_refused) why.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::h200()).driver()?.device(0)?;
    /// let options = Options::new().handle_kind_or(HandleKind::PosixFdAndFabric, HandleKind::PosixFd);
    /// let resource = VirtualMemoryResource::new(&device, options)?;
    /// // There is no IMEX channel here.
    /// assert_eq!(resource.handle_kind(), HandleKind::PosixFd);
    /// assert!(resource.handle_refused().is_some());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn handle_kind_or(self, handle_kind: HandleKind, fallback: HandleKind) -> Self {
        Self { handle_kind, handle_fallback: Some(fallback), ..self }
    }

    /// Which granularity sizes are rounded up to; [`GranularityKind::Minimum`] unless this is called.
    #[must_use]
    pub fn granularity(self, granularity: GranularityKind) -> Self {
        Self { granularity, ..self }
    }

    /// What the address of an allocation is a multiple of, in bytes: a power of two. 0, the default, leaves it at
    /// the granularity. Where a buffer moves, its address is such a multiple again.
    #[must_use]
    pub fn alignment(self, alignment: usize) -> Self {
        Self { alignment, ..self }
    }

    /// Where an allocation is wished to be: a multiple of the alignment, and of 2 MiB. It is a wish. Where those
    /// addresses can't be had, for any reason, others are taken; [`address`](crate::VirtualMemoryBuffer::address) says
    /// which.
    #[must_use]
    pub fn address_hint(self, address_hint: CUdeviceptr) -> Self {
        Self { address_hint, ..self }
    }

    /// What the resource's device may do with the memory; [`Access::ReadWrite`] unless this is called. The host may
    /// always read and write memory of its own.
    #[must_use]
    pub fn own_access(self, own_access: Access) -> Self {
        Self { own_access, ..self }
    }

    /// What another device may do with the memory: nothing, unless this is called for it. A second call for the same
    /// device replaces the first.
    ///
    /// Peer access that a context was given (`cuCtxEnablePeerAccess`) does not reach virtual memory.
    #[must_use]
    pub fn peer(mut self, device: &Device, access: Access) -> Self {
        self.peers.retain(|(known, _)| known != device);
        self.peers.push((device.clone(), access));
        self
    }

    /// As [`peer`](Self::peer), for several devices. The resource's own among them counts for nothing: what that may
    /// do is [`own_access`](Self::own_access).
    #[must_use]
    pub fn peers<'a>(self, devices: impl IntoIterator<Item = &'a Device>, access: Access) -> Self {
        devices.into_iter().fold(self, |options, device| options.peer(device, access))
    }

    /// Whether network cards are to reach the memory (GPUDirect RDMA); [`Request::Off`] unless this is called. The
    /// host's memory has none.
    #[must_use]
    pub fn rdma(self, rdma: Request) -> Self {
        Self { rdma, ..self }
    }

    /// Whether the device may keep the memory compressed; [`Request::Off`] unless this is called. The host's memory has
    /// none, and drivers drop it from memory that network cards reach.
    #[must_use]
    pub fn compression(self, compression: Request) -> Self {
        Self { compression, ..self }
    }

    /// The most bytes that are made in one piece, rounded down to the granularity: what is larger becomes several
    /// chunks. Any number unless this is called. Less than the granularity is refused.
    #[must_use]
    pub fn max_chunk(self, bytes: usize) -> Self {
        Self { max_chunk: Some(bytes), ..self }
    }

    /// How much a grow adds; [`GrowthPolicy::Exact`] unless this is called.
    #[must_use]
    pub fn growth(self, growth: GrowthPolicy) -> Self {
        Self { growth, ..self }
    }

    /// Keeps memory of buffers that are gone for the next ones, and which. Unless this is called, closing releases. Beside a
    /// handle kind or RDMA it is refused, unless it is for memory that is [`shareable`](Recycling::shareable).
    #[must_use]
    pub fn recycling(self, recycling: Recycling) -> Self {
        Self { recycling: Some(recycling), ..self }
    }

    /// What is called when the device, or the host, has not so much memory as is asked for in one piece. It may free some, of
    /// these buffers or anybody's; when it answers `true` that piece is tried once more, once. Before, what resources of the
    /// process [keep](Self::recycling) there is released, and what the resource's own buffers left
    /// [pending](crate::VirtualMemoryResource::pending) is waited for, two seconds at most; after it, so is what it left. It is
    /// called without any lock of this library's, and may use it: what it allocates itself calls no hook. Nor does what a
    /// [growth policy](GrowthPolicy) only wishes for.
    ///
    /// ```
    /// # use std::sync::Mutex;
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::small()).driver()?.device(0)?;
    /// let cache = VirtualMemoryResource::new(&device, Options::new())?.allocate(600 << 20)?;
    /// let cache = Mutex::new(Some(cache));
    /// // The buffer goes when it is the only one left that could.
    /// let options = Options::new().on_out_of_memory(move |_| cache.lock().is_ok_and(|mut cache| cache.take().is_some()));
    /// let resource = VirtualMemoryResource::new(&device, options)?;
    /// let first = resource.allocate(900 << 20)?;
    /// let shortage = resource.allocate(900 << 20).unwrap_err();
    /// assert!(matches!(shortage, Error::OutOfMemory(_)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn on_out_of_memory(mut self, hook: impl Fn(&OutOfMemory) -> bool + Send + Sync + 'static) -> Self {
        self.relief.set_hook(hook);
        self
    }

    /// How often an allocation is tried again, each time after a pause, when the device has not so much memory: for
    /// memory that another process gave back a moment ago. Never unless this is called.
    #[must_use]
    pub fn retry_out_of_memory(mut self, times: u32, pause: Duration) -> Self {
        self.relief.set_retries(times, pause);
        self
    }

    /// What buffers wait for when they close or drop, until they are
    /// [told otherwise](crate::VirtualMemoryBuffer::set_release); [`Release::DefaultStream`] unless this is called.
    #[must_use]
    pub fn release(self, release: Release) -> Self {
        Self { release, ..self }
    }

    /// Who waits when a buffer is dropped, or moves; [`OnDrop::Wait`] unless this is called.
    #[must_use]
    pub fn on_drop(self, on_drop: OnDrop) -> Self {
        Self { on_drop, ..self }
    }

    /// Refuses what can be told to be wrong without asking the driver.
    pub(crate) fn check(&self, device: &Device) -> Result<(), Error> {
        self.check_values()?;
        self.release.require_driver(device.driver())?;
        for (peer, _) in &self.peers {
            device.driver().require_same(peer.driver())?;
        }
        Ok(())
    }

    /// Refuses values that fit no device.
    pub(crate) fn check_values(&self) -> Result<(), Error> {
        let alignment = self.alignment;
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(Error::Alignment { alignment });
        }
        let unit = alignment.max(Reservation::GRANULARITY.bytes());
        if !self.address_hint.0.is_multiple_of(unit as u64) {
            return Err(Error::AddressHint { hint: self.address_hint, alignment: unit });
        }
        let kinds = [Some(self.handle_kind), self.handle_fallback];
        if let (Location::Host, Some(kind)) =
            (self.location, kinds.into_iter().flatten().find(|kind| *kind != HandleKind::None))
        {
            return Err(Error::HandleKindOfHost { kind });
        }
        if let Some(recycling) = self.recycling {
            recycling.check()?;
            let is_kind = kinds.into_iter().flatten().any(|kind| kind != HandleKind::None);
            if is_kind || self.rdma != Request::Off {
                recycling.require_shareable()?;
            }
        }
        self.growth.check()
    }
}
