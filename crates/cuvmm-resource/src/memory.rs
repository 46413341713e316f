//! [`Memory`]: a kind of memory that was found to be there, and the one place that makes chunks of it.

use std::path::Path;

use cuvmm_driver::sys::{CUdevice_attribute, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation, CUmemLocationType};
use cuvmm_driver::{Device, Probe};
use cuvmm_handles::{Allocation, GranularSize, Granularity, Mapping, Reservation, Room, Usage};

use crate::error::Error;
use crate::kept::Kept;
use crate::kind::{Access, GranularityKind, HandleKind, Location, Request};
use crate::numa;
use crate::obtain::{Obtained, obtain};
use crate::options::Options;
use crate::range::Range;
use crate::shortage::Relief;
use crate::statistics::Counts;
use crate::sync::Arc;
use crate::watch::TARGET;

/// `CU_MEM_ALLOCATION_COMP_GENERIC`.
const GENERIC_COMPRESSION: u8 = 1;

/// Whether memory is needed, or would merely be good to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    Wish,
    Need,
}

/// Memory of one kind: what a driver was found to give for some options.
pub(crate) struct Memory {
    pub(crate) device: Device,
    /// Where it lies, with the current node by its number.
    pub(crate) location: Location,
    /// How it can be shared.
    pub(crate) handle_kind: HandleKind,
    /// Why that is not the kind that was asked for first.
    pub(crate) handle_refused: Option<Error>,
    pub(crate) properties: CUmemAllocationProp,
    /// What its chunks are multiples of.
    pub(crate) granularity: Granularity,
    /// What chunks that come from elsewhere are multiples of.
    pub(crate) least: Granularity,
    /// Whom each chunk is granted to: for memory of the host, the host among them, to read and write.
    pub(crate) access: Arc<[CUmemAccessDesc]>,
    /// The most bytes of one chunk.
    max_chunk: usize,
    relief: Relief,
    /// What is left of its buffers, where that is kept.
    pub(crate) kept: Option<Arc<Kept>>,
    /// Where what is made and reserved is counted.
    pub(crate) usage: Arc<Usage>,
    /// Where its buffers are counted, also when they are gone.
    pub(crate) counts: Arc<Counts>,
}

impl Memory {
    /// Finds out whether the driver gives such memory. What can be told without it was checked before.
    pub(crate) fn find(device: &Device, options: &Options) -> Result<Self, Error> {
        require(device, CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management")?;
        let location = find_location(device, options)?;
        let (handle_kind, handle_refused) = find_handle_kind(device, options)?;
        let access = find_access(device, options, location)?;
        let mut properties = CUmemAllocationProp::pinned(place(device, location), handle_kind.as_driver());
        find_features(device, options, &access, &mut properties)?;
        if location.is_host() {
            // No attribute tells whether there is such a node, and whether these devices reach it.
            match attempt(device, &properties, &access, None) {
                Err(error) if !is_shortage(&error) => return Err(node_refused(location, error)),
                _ => {}
            }
        }
        let granularity = find_granularity(device, options.granularity, &properties, &access)?;
        let least = find_granularity(device, GranularityKind::Minimum, &properties, &access)?;
        let max_chunk = match options.max_chunk {
            Some(bound) if bound < granularity.bytes() => {
                return Err(Error::MaxChunk { bound, granularity: granularity.bytes() });
            }
            Some(bound) => bound - bound % granularity.bytes(),
            None => usize::MAX,
        };
        if let Some(recycling) = options.recycling {
            recycling.require_room(granularity)?;
        }
        let counts = Arc::default();
        let kept = options.recycling.map(|recycling| Kept::new(recycling, device, properties.location, &counts));
        Ok(Self {
            device: device.clone(),
            location,
            handle_kind,
            handle_refused,
            properties,
            granularity,
            least,
            access,
            max_chunk,
            relief: options.relief.clone(),
            kept,
            usage: Arc::default(),
            counts,
        })
    }

    /// Whether memory that the driver says lies there is of this kind. Memory that was made anywhere on the host reads as
    /// a node's (measured).
    pub(crate) fn lies_at(&self, location: CUmemLocation) -> bool {
        location == self.properties.location || (self.location == Location::Host && is_host(location))
    }

    /// Whether a GPU may touch it.
    pub(crate) fn is_device_accessible(&self) -> bool {
        self.access.iter().any(|desc| desc.location.location_type == CUmemLocationType::DEVICE)
    }

    /// Refuses to write what nobody here may: memory of the device that this may not write.
    pub(crate) fn require_writable(&self) -> Result<(), Error> {
        let granted = CUmemAccessDesc { location: self.device.location(), flags: Access::ReadWrite.as_driver() };
        if self.location.is_host() || self.access.contains(&granted) { Ok(()) } else { Err(Error::NotWritable) }
    }

    /// Refuses to put chunks of other memory beside those of this.
    pub(crate) fn require_alike(&self, other: &Self) -> Result<(), Error> {
        let differ = [
            (self.device != other.device, "device"),
            (self.location != other.location, "location"),
            (self.handle_kind != other.handle_kind, "handle kind"),
        ];
        match differ.into_iter().find(|(differs, _)| *differs) {
            Some((_, what)) => Err(Error::ChunkMismatch { what }),
            None => Ok(()),
        }
    }

    /// Refuses memory of a device where that of the host is wanted, which copies of ours touch themselves. The driver
    /// refuses to let the host have it, too. What else such memory is, its maker knows.
    pub(crate) fn require_hosts(&self, allocation: &Allocation) -> Result<(), Error> {
        if !self.location.is_host() || is_host(allocation.properties()?.location) {
            return Ok(());
        }
        Err(Error::ChunkMismatch { what: "location" })
    }

    /// Fills the room that lies behind a range, and the one behind that, with memory of this kind, in chunks as large as they
    /// may be. Where there is not so much as is wished for, it is what there is, if the range then has `needed` bytes: nothing
    /// is undone that was made.
    pub(crate) fn extend(
        &self,
        range: Range,
        room: Room,
        mut behind: Option<Room>,
        needed: usize,
        want: Want,
    ) -> Result<Range, Error> {
        // What was made here goes where the rest fails, and is kept by nobody: these are let go of after the range.
        let mut made = Vec::new();
        let begin = range.count();
        let mut range = range;
        let mut next = Some(room);
        while let Some(room) = next {
            let (mut first, rest) = if room.size() > self.max_chunk {
                room.split(self.max_chunk).map(|(a, b)| (a, Some(b)))?
            } else {
                (room, None)
            };
            next = rest.or_else(|| behind.take());
            let missing = needed.saturating_sub(range.end());
            let obtained = match self.chunk(self.granularity.exact(first.size())?, want) {
                Err(Error::OutOfMemory(_)) if want == Want::Wish && missing == 0 => return Ok(range),
                Err(Error::OutOfMemory(_)) if want == Want::Wish && range.count() > begin && missing < first.size() => {
                    (first, next) = (first.split(missing)?.0, None);
                    self.chunk(self.granularity.exact(missing)?, want)?
                }
                obtained => obtained?,
            };
            let mapping = match obtained {
                Obtained::Kept(kept, allocation) => {
                    let allocation = Arc::new(allocation);
                    let mapped = self.map(first, Arc::clone(&allocation));
                    let Ok(mapping) = mapped else {
                        kept.put_back(allocation);
                        return mapped.map(|_| range);
                    };
                    self.counts.add_recycled();
                    mapping
                }
                Obtained::Made(allocation) => {
                    let allocation = Arc::new(allocation.counted(&self.usage));
                    made.extend(next.as_ref().and(self.kept.as_ref()).map(|_| Arc::clone(&allocation)));
                    self.map(first, allocation)?
                }
            };
            range = range.with(mapping, self.kept.clone());
        }
        Ok(range)
    }

    /// A chunk that is kept, or memory that is made.
    fn chunk(&self, size: GranularSize, want: Want) -> Result<Obtained<'_>, Error> {
        let relief = (want == Want::Need).then_some((&self.relief, &*self.counts));
        obtain(&self.device, size, &self.properties, self.kept.as_deref(), relief)
    }

    /// Maps memory in the room, with the access of this kind.
    pub(crate) fn map(&self, room: Room, allocation: Arc<Allocation>) -> Result<Mapping, Error> {
        Ok(Mapping::map_in(room, allocation, Arc::clone(&self.access))?)
    }
}

/// The driver's own name of a location.
fn place(device: &Device, location: Location) -> CUmemLocation {
    match location {
        Location::Device => device.location(),
        Location::HostNuma(node) => CUmemLocation::host_numa(node),
        Location::Host | Location::HostNumaCurrent => CUmemLocation::host(),
    }
}

/// Whether a location is the host, by any of the driver's names.
pub(crate) fn is_host(location: CUmemLocation) -> bool {
    matches!(location.location_type, CUmemLocationType::HOST | CUmemLocationType::HOST_NUMA)
}

/// Where the memory is to lie: with a node that is there, and never the current one unnamed, which no driver takes.
fn find_location(device: &Device, options: &Options) -> Result<Location, Error> {
    let attribute = match options.location {
        Location::Device => return Ok(Location::Device),
        Location::Host => {
            let attribute = CUdevice_attribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
            require(device, attribute, "virtual memory of the host")?;
            return Ok(Location::Host);
        }
        Location::HostNuma(_) | Location::HostNumaCurrent => {
            CUdevice_attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        }
    };
    // Drivers gave such memory before they had the attribute.
    if device.attribute(attribute)? == Some(0) {
        return Err(unsupported(device, "virtual memory of the host's NUMA nodes"));
    }
    let system = Path::new(numa::SYSTEM);
    let node = match options.location {
        Location::HostNuma(node) => node,
        _ => numa::current(system)?,
    };
    numa::check(system, node)?;
    Ok(Location::HostNuma(node))
}

/// What a driver that refuses host memory means.
fn node_refused(location: Location, error: Error) -> Error {
    match (location, error) {
        (Location::HostNuma(node), Error::Handles(cuvmm_handles::Error::Create { error, .. })) => {
            Error::NumaNodeRefused { node, error }
        }
        (_, error) => error,
    }
}

/// The handle kind that can be had, and why it is not the first choice.
fn find_handle_kind(device: &Device, options: &Options) -> Result<(HandleKind, Option<Error>), Error> {
    match (require_handle_kind(device, options.handle_kind), options.handle_fallback) {
        (Ok(()), _) => Ok((options.handle_kind, None)),
        // What says nothing of the kind is no reason to do without it.
        (Err(error @ (Error::Unsupported { .. } | Error::HandleKindRefused { .. })), Some(fallback)) => {
            require_handle_kind(device, fallback)?;
            Ok((fallback, Some(error)))
        }
        (Err(error), _) => Err(error),
    }
}

/// Refuses a handle kind that can't be had: by attribute first, then by trying it out, once a device. What is short
/// now, memory or open files, may not be when it is needed.
fn require_handle_kind(device: &Device, kind: HandleKind) -> Result<(), Error> {
    if kind == HandleKind::None {
        return Ok(());
    }
    if kind.has_posix_fd() {
        let attribute = CUdevice_attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        require(device, attribute, "memory exported as POSIX file descriptors")?;
    }
    if kind.has_fabric() {
        let attribute = CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED;
        require(device, attribute, "memory exported as fabric handles")?;
    }
    match device.probe(kind.as_driver()) {
        Probe::Refused { error, .. } if !error.is_shortage() => Err(Error::HandleKindRefused { kind, error }),
        Probe::Refused { .. } | Probe::Available => Ok(()),
    }
}

/// Whom chunks are granted to: the own device, its peers, and for memory of the host the host.
fn find_access(device: &Device, options: &Options, location: Location) -> Result<Arc<[CUmemAccessDesc]>, Error> {
    let mut access = vec![(device.location(), options.own_access)];
    for (index, (peer, granted)) in options.peers.iter().enumerate() {
        // Of one that is named twice the last counts.
        let is_replaced = options.peers[index + 1..].iter().any(|(later, _)| later == peer);
        if peer == device || is_replaced || *granted == Access::None {
            continue;
        }
        if !location.is_host() && !peer.can_access_peer(device)? {
            return Err(Error::PeerUnreachable { from: peer.ordinal(), to: device.ordinal() });
        }
        access.push((peer.location(), *granted));
    }
    if location.is_host() {
        access.push((place(device, location), Access::ReadWrite));
    }
    let granted = access.into_iter().filter(|(_, access)| *access != Access::None);
    Ok(granted.map(|(location, access)| CUmemAccessDesc { location, flags: access.as_driver() }).collect())
}

/// Sets the flags that are wanted and can be had. Attributes promise what drivers then refuse (WSL), or drop without a
/// word, so each is tried out, those first that must be had: one may leave no room for the other. Where memory is short
/// nothing was found out, which is no reason to go without.
fn find_features(
    device: &Device,
    options: &Options,
    access: &Arc<[CUmemAccessDesc]>,
    properties: &mut CUmemAllocationProp,
) -> Result<(), Error> {
    type Set = fn(&mut CUmemAllocationProp);
    // It is not for the device that memory of the host has neither.
    let [rdma, compression] = if options.location.is_host() {
        ["GPUDirect RDMA of the host's memory", "compressible memory of the host"]
    } else {
        ["GPUDirect RDMA of virtual memory", "compressible memory"]
    };
    let mut features: [(Request, CUdevice_attribute, &str, Set); 2] = [
        (options.rdma, CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, rdma, |properties| {
            properties.alloc_flags.gpu_direct_rdma_capable = 1
        }),
        (options.compression, CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED, compression, |properties| {
            properties.alloc_flags.compression_type = GENERIC_COMPRESSION
        }),
    ];
    features.sort_by_key(|(request, ..)| *request != Request::Required);
    for (request, attribute, what, set) in features {
        if request == Request::Off {
            continue;
        }
        let mut wanted = *properties;
        set(&mut wanted);
        let found = match device.attribute(attribute)? {
            Some(1) if !options.location.is_host() => match attempt(device, &wanted, access, Some(&options.relief)) {
                Ok(obtained) if obtained.alloc_flags == wanted.alloc_flags => Ok(()),
                // Dropped without a word.
                Ok(_) => Err(unsupported(device, what)),
                Err(error) => Err(error),
            },
            _ => Err(unsupported(device, what)),
        };
        match (found, request) {
            (Ok(()), _) => *properties = wanted,
            (Err(error), _) if is_shortage(&error) => return Err(error),
            (Err(error), Request::Required) => return Err(error),
            (Err(error), _) => tracing::debug!(target: TARGET, %error, "made without {what}"),
        }
    }
    Ok(())
}

/// Makes one granule of memory, maps it, grants access, and gives everything back. Tells what the driver says that it
/// made.
fn attempt(
    device: &Device,
    properties: &CUmemAllocationProp,
    access: &Arc<[CUmemAccessDesc]>,
    relief: Option<&Relief>,
) -> Result<CUmemAllocationProp, Error> {
    let driver = device.driver();
    let size = find_granularity(device, GranularityKind::Minimum, properties, access)?.round_up(1)?;
    // No buffer of the resource is there yet, to give anything back.
    let none = Counts::default();
    let relief = relief.map(|relief| (relief, &none));
    let (Obtained::Made(allocation) | Obtained::Kept(_, allocation)) = obtain(device, size, properties, None, relief)?;
    let obtained = allocation.properties()?;
    let addresses = size.granularity().max(Reservation::GRANULARITY).round_up(1)?;
    let alignment = if addresses.bytes() > Reservation::GRANULARITY.bytes() { addresses.bytes() } else { 0 };
    let reservation = Arc::new(Reservation::reserve(driver, addresses, alignment)?);
    Mapping::map(&reservation, 0, Arc::new(allocation), Arc::clone(access))?.close()?;
    drop(reservation);
    Ok(obtained)
}

/// A granularity of such memory: the coarsest of where it lies and of the devices that map it.
fn find_granularity(
    device: &Device,
    kind: GranularityKind,
    properties: &CUmemAllocationProp,
    access: &[CUmemAccessDesc],
) -> Result<Granularity, Error> {
    let ask = |properties: &CUmemAllocationProp| match kind {
        GranularityKind::Minimum => Granularity::minimum(device.driver(), properties),
        GranularityKind::Recommended => Granularity::recommended(device.driver(), properties),
    };
    let mut coarsest = ask(properties)?;
    let peers = access.iter().map(|desc| desc.location).filter(|location| *location != properties.location);
    for location in peers.filter(|location| location.location_type == properties.location.location_type) {
        coarsest = coarsest.max(ask(&CUmemAllocationProp { location, ..*properties })?);
    }
    Ok(coarsest)
}

fn is_shortage(error: &Error) -> bool {
    error.driver().is_some_and(cuvmm_driver::Error::is_shortage)
}

fn unsupported(device: &Device, what: &'static str) -> Error {
    Error::Unsupported { what, ordinal: device.ordinal() }
}

/// Refuses a device that lacks an attribute.
fn require(device: &Device, attribute: CUdevice_attribute, what: &'static str) -> Result<(), Error> {
    match device.attribute(attribute)? {
        Some(1) => Ok(()),
        _ => Err(unsupported(device, what)),
    }
}
