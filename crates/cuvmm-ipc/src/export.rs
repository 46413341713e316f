//! [`export`]: a buffer's memory as handles that another process can import.

use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::sys::CUmemAllocationHandleType;
use cuvmm_handles::Mapping;
use cuvmm_resource::{HandleKind, VirtualMemoryBuffer};

use crate::carried::Carried;
use crate::descriptor::{BufferDescriptor, Metadata};
use crate::error::Error;
use crate::identity::{BufferId, HostId, Location};
use crate::open_files;
use crate::watch;

/// Exports a buffer: one handle for each chunk that covers its size, in address order.
///
/// The descriptor pins the memory from now on, by itself: the buffer may be closed, and may grow. Its handles are files;
/// those of memory that has fabric handles alone are such ([`export_as`]). An empty buffer gives a descriptor without
/// handles. Each export makes handles of its own, and all of one buffer have the same
/// [id](BufferDescriptor::id).
///
/// ```
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
/// let buffer = resource.allocate(2 << 20)?.grow(6 << 20)?;
/// let descriptor = cuvmm_ipc::export(&buffer)?;
/// assert_eq!(descriptor.sizes(), [2 << 20, 4 << 20]);
/// assert_eq!(descriptor.id(), cuvmm_ipc::export(&buffer)?.id());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::NotExportable`] for a buffer of a resource that was not made for it, [`Error::Imported`] for one with
/// memory of another process in it, [`Forked`](cuvmm_driver::Error::Forked), all before any call; [`Error::OpenFiles`] for
/// one of more chunks than open files are left, which [`send_buffer`](crate::send_buffer) needs few of; what the driver
/// answers. What was exported before a failure is closed.
#[doc(alias = "cuMemExportToShareableHandle")]
pub fn export(buffer: &VirtualMemoryBuffer) -> Result<BufferDescriptor, Error> {
    export_as(buffer, HandleKind::PosixFdAndFabric)
}

/// As [`export`], as handles of that kind. Where it may be either, they are files if the memory has such, as with
/// [`export`].
///
/// Fabric handles can be imported on other hosts, and pin nothing by themselves: the descriptor that this gives holds a
/// share of the memory, and its copies elsewhere don't. So it has to live until it is imported where it was sent.
///
/// ```
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default().with_imex()).driver()?.device(0)?;
/// let options = Options::new().handle_kind(HandleKind::PosixFdAndFabric);
/// let resource = VirtualMemoryResource::new(&device, options)?;
/// let buffer = resource.allocate(2 << 20)?;
/// let descriptor = cuvmm_ipc::export_as(&buffer, HandleKind::Fabric)?;
/// assert_eq!((descriptor.fabric_handles().len(), descriptor.fds().len()), (1, 0));
/// buffer.close()?;
/// let again = cuvmm_ipc::import(&resource, descriptor)?;
/// # again.close()?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`export`]; [`Error::NotExportable`] also for [`HandleKind::None`].
#[doc(alias = "cuMemExportToShareableHandle")]
pub fn export_as(buffer: &VirtualMemoryBuffer, kind: HandleKind) -> Result<BufferDescriptor, Error> {
    watch::export(buffer, || {
        let export = Export::of(buffer, kind)?;
        if export.wanted != CUmemAllocationHandleType::FABRIC {
            open_files::require(export.chunks())?;
        }
        BufferDescriptor::with_handles(export.metadata()?, export.handles(0..export.chunks())?)
    })
}

/// The id that an export of this buffer has: what others know it by, before and after it is sent. It need not be one that
/// can be exported.
///
/// ```
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
/// use cuvmm_ipc::buffer_id;
///
/// let buffer = resource.allocate(2 << 20)?;
/// let larger = buffer.grow(6 << 20)?;
/// let (id, grown) = (buffer_id(&buffer)?, buffer_id(&larger)?);
/// assert_eq!(cuvmm_ipc::export(&buffer)?.id(), Some(id));
/// assert_eq!(grown.family(), id.family());
/// assert!(grown.generation() > id.generation());
/// # Ok(())
/// # }
/// ```
///
/// An imported buffer has one of its own: its exporter's is in the [`Metadata`] that came with it
/// ([`receive_with_metadata`](crate::Importer::receive_with_metadata)).
///
/// # Errors
/// [`Error::Os`] where the system has no random bits; [`Forked`](cuvmm_driver::Error::Forked). No call is made.
pub fn buffer_id(buffer: &VirtualMemoryBuffer) -> Result<BufferId, Error> {
    buffer.resource().device().driver().require_own_process()?;
    BufferId::of_this_process(buffer.id(), buffer.generation()).map_err(Error::os("read random bits"))
}

/// A buffer that can be exported, chunk by chunk.
pub(crate) struct Export<'b> {
    buffer: &'b VirtualMemoryBuffer,
    mappings: Vec<&'b Mapping>,
    /// The one kind of its handles.
    wanted: CUmemAllocationHandleType,
}

impl<'b> Export<'b> {
    /// Refuses what can't be exported. Makes no call.
    pub(crate) fn of(buffer: &'b VirtualMemoryBuffer, kind: HandleKind) -> Result<Self, Error> {
        let has = buffer.resource().handle_kind().as_driver();
        let wanted = match kind.as_driver() {
            one if kind != HandleKind::PosixFdAndFabric => one,
            _ if has == CUmemAllocationHandleType::FABRIC => has,
            _ => CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR,
        };
        if !has.contains(wanted) || wanted == CUmemAllocationHandleType::NONE {
            return Err(Error::NotExportable { has, wanted });
        }
        let mappings = buffer.mappings();
        for (chunk, mapping) in mappings.iter().enumerate() {
            mapping.allocation().check_exportable(wanted).map_err(|error| match error {
                cuvmm_handles::Error::Imported => Error::Imported { chunk },
                cuvmm_handles::Error::NotExportable { has, wanted } => Error::NotExportable { has, wanted },
                error => error.into(),
            })?;
        }
        Ok(Self { buffer, mappings, wanted })
    }

    pub(crate) fn chunks(&self) -> usize {
        self.mappings.len()
    }

    pub(crate) fn metadata(&self) -> Result<Metadata, Error> {
        let buffer = self.buffer;
        Ok(Metadata {
            handle_kind: self.wanted,
            location: Some(Location::of(buffer.resource())?),
            id: Some(buffer_id(buffer)?),
            host: HostId::current(),
            size: buffer.size(),
            ..Metadata::new(self.mappings.iter().map(|mapping| mapping.size()).collect())
        })
    }

    /// Exports those chunks, or none: what was exported before a failure is closed.
    pub(crate) fn handles(&self, chunks: Range<usize>) -> Result<Carried, Error> {
        let mappings = self.mappings.get(chunks).unwrap_or_default();
        let memory = mappings.iter().map(|mapping| mapping.allocation());
        if self.wanted == CUmemAllocationHandleType::FABRIC {
            let handles = memory.clone().map(|memory| memory.export_fabric()).collect::<Result<_, _>>()?;
            return Ok(Carried::Fabric(handles, memory.map(Arc::clone).collect()));
        }
        let explained = |error: cuvmm_handles::Error| open_files::explain(error.into(), mappings.len());
        let files = memory.map(|memory| memory.export_posix_fd().map_err(explained)).collect::<Result<_, _>>()?;
        Ok(Carried::Files(files))
    }
}
