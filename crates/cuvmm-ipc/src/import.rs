//! [`import`]: a buffer over memory that another process exported.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemLocation};
use cuvmm_handles::{Allocation, GranularSize};
use cuvmm_resource::{VirtualMemoryBuffer, VirtualMemoryResource};

use crate::descriptor::{BufferDescriptor, Metadata};
use crate::error::Error;
use crate::file_kind::FileKind;
use crate::identity::{HostId, Location};
use crate::watch;

/// What the driver answers as the device of memory whose device this process does not see.
const HIDDEN_DEVICE: i32 = -2;

/// Imports a descriptor: maps its chunks one behind the other, with the resource's own access and alignment, in a range
/// that is exactly their sum. Each handle is closed as soon as its chunk is imported; the mapping keeps the memory.
///
/// The resource is one of the same memory, a device's or that of the same NUMA node of the host, that can be shared by
/// POSIX file descriptor. Its granularity need not be the exporter's.
///
/// The descriptor is not trusted. Everything that can be is checked before the driver is called: handle kind, host,
/// location, sizes, and that each handle is a file of the kind that this driver's own handles are (found out once a device,
/// by its probe). After it, the driver's own word about the memory is compared, and a size that was not true is what the
/// driver refuses to map.
///
/// In the process that exported it, this gives an alias at another address. The buffer can't be exported again.
///
/// ```
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
/// let buffer = resource.allocate(2 << 20)?;
/// let alias = cuvmm_ipc::import(&resource, cuvmm_ipc::export(&buffer)?)?;
/// assert_eq!(alias.size(), buffer.size());
/// assert_ne!(alias.address(), buffer.address());
/// assert!(cuvmm_ipc::export(&alias).is_err());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::WrongHandleKind`], [`Error::WrongHost`], [`Error::WrongLocation`], [`Error::ChunkSize`],
/// [`Error::WrongFile`], [`Forked`](cuvmm_driver::Error::Forked) before the memory is asked for; [`Error::OtherMemory`],
/// [`Error::HiddenDevice`]; what the driver answers. Nothing is left behind, and the handles are closed.
#[doc(alias = "cuMemImportFromShareableHandle")]
pub fn import(resource: &VirtualMemoryResource, descriptor: BufferDescriptor) -> Result<VirtualMemoryBuffer, Error> {
    watch::import(watch::import_span(resource, Some(descriptor.metadata()))?, || {
        check(resource, descriptor.metadata())?;
        FileKind::check(resource.device(), descriptor.fds().enumerate())?;
        let (metadata, handles) = descriptor.into_parts();
        let mut handles = handles.into_iter();
        resource.map_chunks(&metadata.sizes, metadata.size, |chunk, size| {
            let handle = handles.next().ok_or(Error::HandleCount { handles: chunk, chunks: metadata.sizes.len() })?;
            import_chunk(resource, chunk, handle.as_fd(), size)
        })
    })
}

/// As [`import`], from a descriptor that stays: to be imported again, or forwarded.
///
/// ```
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
/// let descriptor = cuvmm_ipc::export(&resource.allocate(2 << 20)?)?;
/// // The buffer is gone. The descriptor keeps its memory, for as many imports as one likes.
/// let one = cuvmm_ipc::import_from(&resource, &descriptor)?;
/// let two = cuvmm_ipc::import_from(&resource, &descriptor)?;
/// assert_ne!(one.address(), two.address());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`import`]; the handles stay open.
pub fn import_from(
    resource: &VirtualMemoryResource,
    descriptor: &BufferDescriptor,
) -> Result<VirtualMemoryBuffer, Error> {
    watch::import(watch::import_span(resource, Some(descriptor.metadata()))?, || {
        check(resource, descriptor.metadata())?;
        FileKind::check(resource.device(), descriptor.fds().enumerate())?;
        let mut handles = descriptor.fds();
        let chunks = descriptor.sizes().len();
        resource.map_chunks(descriptor.sizes(), descriptor.size(), |chunk, size| {
            let handle = handles.next().ok_or(Error::HandleCount { handles: chunk, chunks })?;
            import_chunk(resource, chunk, handle, size)
        })
    })
}

/// Refuses metadata that `resource` can't import. The only call is the one that asks for the device's UUID, once.
pub(crate) fn check(resource: &VirtualMemoryResource, metadata: &Metadata) -> Result<(), Error> {
    let ours = resource.handle_kind().as_driver();
    let posix = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
    if metadata.handle_kind != posix || !ours.contains(posix) {
        return Err(Error::WrongHandleKind { ours, theirs: metadata.handle_kind });
    }
    if let Some((ours, theirs)) = HostId::differ(HostId::current(), metadata.host) {
        return Err(Error::WrongHost { ours, theirs });
    }
    metadata.check()?;
    let granularity = resource.minimum_granularity();
    for (chunk, &bytes) in metadata.sizes.iter().enumerate() {
        let granularity_bytes = granularity.bytes();
        granularity.exact(bytes).map_err(|_| Error::ChunkSize { chunk, bytes, granularity: granularity_bytes })?;
    }
    if let Some(theirs) = metadata.location {
        let ours = Location::of(resource)?;
        if theirs != ours {
            return Err(Error::WrongLocation { ours, theirs });
        }
    }
    Ok(())
}

/// Imports one chunk from a handle that is a file of the right kind, and compares what the driver says of it.
pub(crate) fn import_chunk(
    resource: &VirtualMemoryResource,
    chunk: usize,
    handle: BorrowedFd<'_>,
    size: GranularSize,
) -> Result<Allocation, Error> {
    let driver = resource.device().driver();
    let allocation = if handle.as_raw_fd() == 0 {
        // The driver takes 0 for a null pointer. A duplicate has another number.
        let duplicate = handle.try_clone_to_owned().map_err(Error::os("duplicate a handle"))?;
        Allocation::import_posix_fd(driver, duplicate.as_fd(), size)?
    } else {
        Allocation::import_posix_fd(driver, handle, size)?
    };
    let found = allocation.properties()?.location;
    let expected = match resource.location() {
        cuvmm_resource::Location::HostNuma(node) => CUmemLocation::host_numa(node),
        _ => resource.device().location(),
    };
    if found == expected {
        Ok(allocation)
    } else if found == CUmemLocation::device(HIDDEN_DEVICE) {
        Err(Error::HiddenDevice { chunk })
    } else {
        Err(Error::OtherMemory { chunk, found, expected })
    }
}
