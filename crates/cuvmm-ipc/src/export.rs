//! [`export`]: a buffer's memory as handles that another process can import.

use std::ops::Range;

use cuvmm_driver::sys::CUmemAllocationHandleType;
use cuvmm_handles::Mapping;
use cuvmm_resource::VirtualMemoryBuffer;

use crate::descriptor::{BufferDescriptor, Metadata};
use crate::error::Error;
use crate::handles::Handles;
use crate::identity::{BufferId, HostId, Location};
use crate::open_files;
use crate::watch;

/// Exports a buffer: one handle for each chunk that covers its size, in address order.
///
/// The descriptor pins the memory from now on, by itself: the buffer may be closed, and may grow. An empty buffer
/// gives a descriptor without handles. Each export makes handles of its own, and all of one buffer have the same
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
    watch::export(buffer, || {
        let export = Export::of(buffer)?;
        open_files::require(export.chunks())?;
        BufferDescriptor::with_handles(export.metadata()?, export.handles(0..export.chunks())?)
    })
}

/// A buffer that can be exported, chunk by chunk.
pub(crate) struct Export<'b> {
    buffer: &'b VirtualMemoryBuffer,
    mappings: Vec<&'b Mapping>,
}

impl<'b> Export<'b> {
    /// Refuses what can't be exported. Makes no call.
    pub(crate) fn of(buffer: &'b VirtualMemoryBuffer) -> Result<Self, Error> {
        let wanted = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let has = buffer.resource().handle_kind().as_driver();
        if !has.contains(wanted) {
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
        Ok(Self { buffer, mappings })
    }

    pub(crate) fn chunks(&self) -> usize {
        self.mappings.len()
    }

    pub(crate) fn metadata(&self) -> Result<Metadata, Error> {
        let buffer = self.buffer;
        let id = BufferId::of_this_process(buffer.id(), buffer.generation());
        Ok(Metadata {
            location: Some(Location::of(buffer.resource())?),
            id: Some(id.map_err(Error::os("read random bits"))?),
            host: HostId::current(),
            size: buffer.size(),
            ..Metadata::new(self.mappings.iter().map(|mapping| mapping.size()).collect())
        })
    }

    /// Exports those chunks, or none: what was exported before a failure is closed.
    pub(crate) fn handles(&self, chunks: Range<usize>) -> Result<Handles, Error> {
        let mappings = self.mappings.get(chunks).unwrap_or_default();
        let export = |mapping: &&Mapping| mapping.allocation().export_posix_fd();
        let explained = |error: cuvmm_handles::Error| open_files::explain(error.into(), mappings.len());
        mappings.iter().map(|mapping| export(mapping).map_err(explained)).collect()
    }
}
