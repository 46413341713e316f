//! [`import`]: a buffer over memory that another process exported.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemLocation, CUmemLocationType};
use cuvmm_handles::{Allocation, GranularSize};
use cuvmm_resource::{Release, VirtualMemoryBuffer, VirtualMemoryResource};

use crate::carried::Handle;
use crate::descriptor::{BufferDescriptor, Metadata};
use crate::error::Error;
use crate::file_kind::FileKind;
use crate::handles::duplicate;
use crate::identity::{HostId, Location};
use crate::watch;

/// What the driver says of memory whose device this process does not see.
const HIDDEN: CUmemLocation = CUmemLocation::device(-2);

/// Imports a descriptor: maps its chunks one behind the other, with the resource's own access and alignment, in a range
/// that is exactly their sum. Each handle is closed as soon as its chunk is imported; the mapping keeps the memory.
///
/// The resource is one of the same memory, a device's or that of the same NUMA node of the host, made for the kind of
/// handle that the descriptor has. Its granularity need not be the exporter's.
///
/// The descriptor is not trusted. Everything that can be is checked before the driver is called: handle kind, host,
/// location, sizes, and that each file is of the kind that this driver's own handles are (found out once a device, by its
/// probe). After it, the driver's own word about the memory is compared, and a size that was not true is what the
/// driver refuses to map. Fabric handles are bytes that only the driver can judge, and their host is not compared.
///
/// In the process that exported it, this gives an alias at another address. The buffer can't be exported again. Each
/// import has an address of its own, also one of a buffer that grew. What is added by growing an imported buffer is this
/// process's own: the exporter never sees it.
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
/// [`Error::WrongHandleKind`], [`Error::WrongHost`], [`Error::WrongLocation`], [`Error::HiddenDevice`],
/// [`Error::ChunkSize`], [`Error::WrongFile`], [`Forked`](cuvmm_driver::Error::Forked) before the memory is asked for;
/// [`Error::OtherMemory`], [`Error::HiddenDevice`] by the driver's own word; [`Error::Chunk`] with what the driver answers
/// to a chunk, and what else it answers. Nothing is left behind, and the handles are closed.
#[doc(alias = "cuMemImportFromShareableHandle")]
pub fn import(resource: &VirtualMemoryResource, descriptor: BufferDescriptor) -> Result<VirtualMemoryBuffer, Error> {
    Importer::new(resource).import(descriptor)
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
    Importer::new(resource).import_from(descriptor)
}

/// How a resource imports buffers: [`import`](crate::import()), [`import_from`] and
/// [`receive_buffer`](crate::receive_buffer), with what those leave at its default.
///
/// ```
/// # use cuvmm_resource::{HandleKind, Options, Release, StreamRef, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
/// # let descriptor = cuvmm_ipc::export(&resource.allocate(2 << 20)?)?;
/// let stream = StreamRef::create(&device)?;
/// let importer = cuvmm_ipc::Importer::new(&resource).release(Release::Stream(stream));
/// let buffer = importer.import(descriptor)?;
/// assert!(matches!(buffer.released_after(), Release::Stream(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Importer<'r> {
    resource: &'r VirtualMemoryResource,
    release: Option<Release>,
    allows_hidden: bool,
}

impl<'r> Importer<'r> {
    /// By that resource, and as it says.
    pub fn new(resource: &'r VirtualMemoryResource) -> Self {
        Self { resource, release: None, allows_hidden: false }
    }

    /// What the imported buffers wait for when they close or drop; what the resource says unless this is called.
    #[must_use]
    pub fn release(self, release: Release) -> Self {
        Self { release: Some(release), ..self }
    }

    /// Imports memory of a device that is not visible to this process, too, where the resource's is a device's: some
    /// hardware lets a device that is visible use it as a peer's. Where it doesn't, the driver refuses the import.
    ///
    /// The UUID that the descriptor tells is then nobody's here to compare: what the driver says of the memory must
    /// be that its device is hidden. Memory of another device that *is* visible is refused all the same.
    ///
    /// ```
    /// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Preset, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pair = Machine::h200_pair();
    /// # let exporter = Simulator::new(pair.clone()).driver()?.device(1)?;
    /// # let exporter = VirtualMemoryResource::new(&exporter, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// # let descriptor = cuvmm_ipc::export(&exporter.allocate(2 << 20)?)?;
    /// # let device = Simulator::new(pair.visible(&[0]).preset(Preset::Measured)).driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// use cuvmm_ipc::{Error, Importer};
    ///
    /// // Memory of the second GPU, in a process that was started with CUDA_VISIBLE_DEVICES=0.
    /// let refused = Importer::new(&resource).import_from(&descriptor);
    /// assert!(matches!(refused, Err(Error::HiddenDevice { .. })));
    /// let buffer = Importer::new(&resource).allow_hidden_device().import_from(&descriptor)?;
    /// buffer.copy_from_host(0, b"over the link")?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn allow_hidden_device(self) -> Self {
        Self { allows_hidden: true, ..self }
    }

    /// Imports a descriptor, as [`import`](crate::import()) does.
    ///
    /// # Errors
    /// As [`import`](crate::import()); [`DifferentDrivers`](cuvmm_driver::Error::DifferentDrivers) for a release stream of
    /// another driver, before any call.
    pub fn import(&self, descriptor: BufferDescriptor) -> Result<VirtualMemoryBuffer, Error> {
        watch::import(watch::import_span(self.resource, Some(descriptor.metadata()))?, || {
            let admitted = self.admit(descriptor.metadata())?;
            admitted.check_files(descriptor.fds().enumerate())?;
            let (metadata, handles) = descriptor.into_handles();
            let mut handles = handles.into_each();
            admitted.map(&metadata, |_| Ok(handles.next()))
        })
    }

    /// As [`import`](Self::import), from a descriptor that stays, as [`import_from`](crate::import_from()) does.
    ///
    /// # Errors
    /// As [`import`](Self::import); the handles stay open.
    pub fn import_from(&self, descriptor: &BufferDescriptor) -> Result<VirtualMemoryBuffer, Error> {
        watch::import(watch::import_span(self.resource, Some(descriptor.metadata()))?, || {
            let admitted = self.admit(descriptor.metadata())?;
            admitted.check_files(descriptor.fds().enumerate())?;
            let mut handles = descriptor.handles().each();
            admitted.map(descriptor.metadata(), |_| Ok(handles.next()))
        })
    }

    pub(crate) fn resource(&self) -> &'r VirtualMemoryResource {
        self.resource
    }

    /// Refuses metadata that can't be imported. The only calls are those that ask for UUIDs, once a device.
    pub(crate) fn admit(&self, metadata: &Metadata) -> Result<Admitted<'_>, Error> {
        let resource = self.resource;
        let driver = resource.device().driver();
        if let Some(Release::Stream(stream)) = &self.release {
            driver.require_same(stream.driver())?;
        }
        let ours = resource.handle_kind().as_driver();
        let theirs = metadata.handle_kind;
        let kinds = [CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR, CUmemAllocationHandleType::FABRIC];
        if !kinds.contains(&theirs) || !ours.contains(theirs) {
            return Err(Error::WrongHandleKind { ours, theirs });
        }
        check_host(theirs, metadata.location, metadata.host)?;
        metadata.check()?;
        let granularity = resource.minimum_granularity();
        for (chunk, &bytes) in metadata.sizes.iter().enumerate() {
            let granularity_bytes = granularity.bytes();
            granularity.exact(bytes).map_err(|_| Error::ChunkSize { chunk, bytes, granularity: granularity_bytes })?;
        }
        let (expected, or_hidden) = self.expected(metadata.location)?;
        Ok(Admitted { importer: self, expected, or_hidden })
    }

    /// What the driver must say of memory that is where the descriptor told, and whether it may say instead that its
    /// device is hidden.
    fn expected(&self, told: Option<Location>) -> Result<(CUmemLocation, bool), Error> {
        let resource = self.resource;
        let own = match resource.location() {
            cuvmm_resource::Location::HostNuma(node) => CUmemLocation::host_numa(node),
            _ => resource.device().location(),
        };
        let is_device = own.location_type == CUmemLocationType::DEVICE;
        let allows_hidden = self.allows_hidden && is_device;
        let Some(theirs) = told else { return Ok((own, allows_hidden)) };
        let ours = Location::of(resource)?;
        if theirs == ours {
            return Ok((own, false));
        }
        let Location::Device { uuid } = theirs else { return Err(Error::WrongLocation { ours, theirs }) };
        if !is_device || resource.device().driver().device_by_uuid(uuid)?.is_some() {
            return Err(Error::WrongLocation { ours, theirs });
        }
        if allows_hidden { Ok((HIDDEN, false)) } else { Err(Error::HiddenDevice { uuid: Some(uuid) }) }
    }
}

/// Refuses what means nothing on this host: files of another one, and the number of another's node. Fabric handles of a
/// device's memory are there for other hosts.
pub(crate) fn check_host(
    handles: CUmemAllocationHandleType,
    location: Option<Location>,
    host: Option<HostId>,
) -> Result<(), Error> {
    let is_for_any =
        handles == CUmemAllocationHandleType::FABRIC && !matches!(location, Some(Location::HostNuma { .. }));
    match HostId::differ(HostId::current(), host) {
        Some((ours, theirs)) if !is_for_any => Err(Error::WrongHost { ours, theirs }),
        _ => Ok(()),
    }
}

/// Metadata that were found to be acceptable: the importer's, and what is due to be found of the memory.
pub(crate) struct Admitted<'i> {
    importer: &'i Importer<'i>,
    expected: CUmemLocation,
    or_hidden: bool,
}

impl Admitted<'_> {
    /// Refuses what can't be handles of this driver.
    pub(crate) fn check_files<'a>(
        &self,
        handles: impl ExactSizeIterator<Item = (usize, BorrowedFd<'a>)>,
    ) -> Result<(), Error> {
        FileKind::check(self.importer.resource.device(), handles)
    }

    /// Maps the chunks whose handles, checked ones, `next` gives in turn. Each handle is let go of when its chunk is
    /// imported.
    pub(crate) fn map<F: AsFd>(
        &self,
        metadata: &Metadata,
        mut next: impl FnMut(usize) -> Result<Option<Handle<F>>, Error>,
    ) -> Result<VirtualMemoryBuffer, Error> {
        // The chunk that is being imported or mapped.
        let mut at = None;
        let mapped = self.importer.resource.map_chunks(&metadata.sizes, metadata.size, |chunk, size| {
            let chunks = metadata.sizes.len();
            let handle = next(chunk)?.ok_or(Error::HandleCount { handles: chunk, chunks })?;
            at = Some((chunk, size.bytes()));
            self.import_chunk(chunk, &handle, size)
        });
        let buffer = mapped.map_err(|error| match at {
            Some((chunk, bytes)) if error.call().is_some() => Error::Chunk { chunk, bytes, source: Box::new(error) },
            _ => error,
        })?;
        if let Some(release) = &self.importer.release {
            buffer.set_release(release.clone())?;
        }
        Ok(buffer)
    }

    /// Imports one chunk, and compares what the driver says of it.
    fn import_chunk<F: AsFd>(&self, chunk: usize, handle: &Handle<F>, size: GranularSize) -> Result<Allocation, Error> {
        let driver = self.importer.resource.device().driver();
        let allocation = match handle {
            // The driver takes 0 for a null pointer. A duplicate has another number.
            Handle::File(file) if file.as_fd().as_raw_fd() == 0 => {
                Allocation::import_posix_fd(driver, duplicate(file.as_fd())?.as_fd(), size)
            }
            Handle::File(file) => Allocation::import_posix_fd(driver, file.as_fd(), size),
            Handle::Fabric(handle) => Allocation::import_fabric(driver, handle, size),
        }?;
        let (found, expected) = (allocation.properties()?.location, self.expected);
        if found == expected || (found == HIDDEN && self.or_hidden) {
            Ok(allocation)
        } else if found == HIDDEN && !self.importer.allows_hidden {
            Err(Error::HiddenDevice { uuid: None })
        } else {
            Err(Error::OtherMemory { chunk, found, expected })
        }
    }
}
