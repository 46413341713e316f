//! [`BufferDescriptor`]: a buffer in the form in which it travels, and the [`Metadata`] that it is told by.

use std::os::fd::{BorrowedFd, OwnedFd};

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemFabricHandle, CUuuid};

use crate::carried::{Carried, Kept};
use crate::error::Error;
use crate::handles::{HandleFd, Handles};
use crate::identity::{BufferId, HostId, Location};

/// What a descriptor says about a buffer: everything but the handles.
///
/// It is a claim until [`check`](Self::check) or [`BufferDescriptor::new`] looked at it, and, where a peer made it,
/// even then: what it says of the memory itself is compared when it is imported.
///
/// ```
/// use cuvmm_ipc::{InvalidMetadata, Metadata};
///
/// let mut metadata = Metadata::new(vec![2 << 20, 4 << 20]);
/// assert_eq!(metadata.size, 6 << 20);
/// metadata.size = 7 << 20;
/// assert_eq!(metadata.check(), Err(InvalidMetadata::Size { size: 7 << 20, sum: 6 << 20 }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metadata {
    /// The kind of its handles.
    pub handle_kind: CUmemAllocationHandleType,
    /// Where the memory lives; none where the maker didn't say, which is then not compared.
    pub location: Option<Location>,
    /// The buffer's identity; none where the maker gave it none.
    pub id: Option<BufferId>,
    /// The host on which the handles mean something; none where the maker didn't say.
    pub host: Option<HostId>,
    /// The size of each chunk in bytes, in address order.
    pub sizes: Vec<usize>,
    /// The size of the buffer: from 1 to the sum of the chunks, and 0 where there are no chunks.
    pub size: usize,
}

impl Metadata {
    /// The most chunks that a descriptor can have.
    pub const MAX_CHUNKS: usize = 1 << 24;

    /// Chunks of those sizes, shared as POSIX file descriptors, all of them covered by the buffer; nothing else told.
    pub fn new(sizes: Vec<usize>) -> Self {
        let size = sizes.iter().fold(0, |sum: usize, size| sum.saturating_add(*size));
        let handle_kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        Self { handle_kind, location: None, id: None, host: None, sizes, size }
    }

    /// That the sizes fit each other.
    ///
    /// # Errors
    /// [`InvalidMetadata`].
    pub fn check(&self) -> Result<(), InvalidMetadata> {
        self.sum().map(drop)
    }

    /// The sum of the chunks, in bytes, where the sizes fit each other.
    ///
    /// # Errors
    /// [`InvalidMetadata`].
    pub fn sum(&self) -> Result<usize, InvalidMetadata> {
        if self.sizes.len() > Self::MAX_CHUNKS {
            return Err(InvalidMetadata::TooManyChunks { chunks: self.sizes.len() });
        }
        let mut sum: usize = 0;
        for (chunk, &size) in self.sizes.iter().enumerate() {
            if size == 0 {
                return Err(InvalidMetadata::EmptyChunk { chunk });
            }
            sum = sum.checked_add(size).ok_or(InvalidMetadata::SumOverflow { chunk })?;
        }
        if self.size > sum || (self.size == 0 && sum > 0) {
            return Err(InvalidMetadata::Size { size: self.size, sum });
        }
        Ok(sum)
    }
}

/// Sizes that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidMetadata {
    /// More chunks than a descriptor can have.
    #[error("{chunks} chunks are more than the {} that a descriptor can have", Metadata::MAX_CHUNKS)]
    TooManyChunks {
        /// How many there are.
        chunks: usize,
    },
    /// A chunk of no bytes.
    #[error("chunk {chunk} has no bytes")]
    EmptyChunk {
        /// Which.
        chunk: usize,
    },
    /// The sum of the chunks is no address range.
    #[error("the sizes of the chunks overflow at chunk {chunk}")]
    SumOverflow {
        /// The chunk that made it too large.
        chunk: usize,
    },
    /// The buffer is not a prefix of its chunks.
    #[error("a buffer of {size} bytes cannot be a prefix of chunks of {sum} bytes in all")]
    Size {
        /// The buffer's size.
        size: usize,
        /// The sum of the chunks.
        sum: usize,
    },
}

/// A buffer in the form in which it travels between processes: one exported handle for each chunk, in address order,
/// with what is needed to import them.
///
/// It owns its handles, and so **pins the physical memory while it lives**, in every process that holds one, also
/// after the buffer it was exported from is closed and its process has ended. Dropping it closes the handles (what can
/// be no handle to memory, and may take its time, is closed by another thread). What was imported from it stays.
///
/// Fabric handles are bytes, which pin nothing. A descriptor of such pins the memory in the process that **exported** it
/// alone, by a share of it; one that was received is good as long as that one lives.
///
/// [`export`](crate::export()) makes one, and so does a transport of one's own:
///
/// ```
/// use std::os::fd::OwnedFd;
///
/// use cuvmm_ipc::BufferDescriptor;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let handles: Vec<OwnedFd> = vec![std::fs::File::open("/dev/null")?.into()];
/// // Handles that came by whatever way, and the sizes that were told with them.
/// let descriptor = BufferDescriptor::from_fds(handles, &[2 << 20], None)?;
/// assert_eq!(descriptor.size(), 2 << 20);
/// assert_eq!(descriptor.device_uuid(), None, "not told, and so not compared");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BufferDescriptor {
    /// Checked, and with as many sizes as there are handles.
    metadata: Metadata,
    handles: Carried,
}

impl BufferDescriptor {
    /// The descriptor of handles to the chunks of those sizes, in address order. `size` is the buffer's, and may be any
    /// from 1 to their sum, 0 where there are none; not given, it is the sum.
    ///
    /// Of each handle its owner says by its type what becomes of it: an [`OwnedFd`] is taken, a
    /// [`BorrowedFd`] duplicated (closed on exec), and an `Arc<OwnedFd>` shared until its last holder goes.
    ///
    /// What else a descriptor may tell, this one does not: it is `None`, and not compared when it is imported. So the
    /// memory is taken for that of the importer's own device, and refused where the driver says that it is another's.
    ///
    /// ```
    /// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// # let other_library = cuvmm_ipc::export(&resource.allocate(4 << 20)?)?;
    /// use cuvmm_ipc::BufferDescriptor;
    ///
    /// // Of 4 MiB that another library exported, and whose descriptor stays its own, 3 MiB are the buffer.
    /// let descriptor = BufferDescriptor::from_fds(other_library.fds(), &[4 << 20], Some(3 << 20))?;
    /// let buffer = cuvmm_ipc::import(&resource, descriptor)?;
    /// assert_eq!(buffer.size(), 3 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Os`] with `EBADF` for a number that is no open file, which is then nobody's to close, and with what the
    /// system said where a handle could not be duplicated; [`Error::OpenFiles`] where no open file was left for that;
    /// and those of [`new`](Self::new). What was taken is closed then, and so is what was duplicated.
    pub fn from_fds<'f>(
        fds: impl IntoIterator<Item: Into<HandleFd<'f>>>,
        sizes: &[usize],
        size: Option<usize>,
    ) -> Result<Self, Error> {
        let told = Metadata::new(sizes.to_vec());
        let metadata = Metadata { size: size.unwrap_or(told.size), ..told };
        Self::new(metadata, fds)
    }

    /// The descriptor of those parts, which need not come from an export: a transport of one's own ends here.
    ///
    /// What the handles are is looked at when they are imported. Who owns each is said as with [`from_fds`](Self::from_fds).
    ///
    /// ```
    /// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// use cuvmm_ipc::BufferDescriptor;
    ///
    /// let exported = cuvmm_ipc::export(&resource.allocate(2 << 20)?)?;
    /// // What it says and its handles may go different ways. Here the handles are duplicated, and stay.
    /// let descriptor = BufferDescriptor::new(exported.metadata().clone(), exported.fds())?;
    /// assert_eq!(descriptor.id(), exported.id());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Metadata`] where the sizes do not fit each other, [`Error::HandleCount`] where there are not as many
    /// handles as sizes, [`Error::HandlesOfAnotherKind`] where fabric handles are told; [`Error::Os`] and
    /// [`Error::OpenFiles`] for the handles, as [`from_fds`](Self::from_fds). What was taken is closed then, and so is
    /// what was duplicated.
    pub fn new<'f>(metadata: Metadata, handles: impl IntoIterator<Item: Into<HandleFd<'f>>>) -> Result<Self, Error> {
        Self::with_handles(metadata, Carried::Files(Handles::take(handles)?))
    }

    /// As [`new`](Self::new), of fabric handles: what came from another host, over whatever leads there.
    ///
    /// This descriptor **pins nothing**: bytes don't. Import it while the exporter has the memory.
    ///
    /// ```
    /// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::default().with_imex()).driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::Fabric))?;
    /// use cuvmm_ipc::{BufferDescriptor, import, wire};
    ///
    /// let exported = cuvmm_ipc::export(&resource.allocate(2 << 20)?)?;
    /// let header = wire::encode(exported.metadata())?;
    /// let message = wire::encode_fabric_handles(exported.fabric_handles());
    /// // Where those bytes arrive, as long as `exported` is there:
    /// let (metadata, handles) = (wire::decode(&header)?, wire::decode_fabric_handles(&message)?);
    /// let buffer = import(&resource, BufferDescriptor::from_fabric_handles(metadata, handles)?)?;
    /// assert_eq!(buffer.size(), 2 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new): [`Error::HandlesOfAnotherKind`] unless the metadata tell fabric handles.
    pub fn from_fabric_handles(metadata: Metadata, handles: Vec<CUmemFabricHandle>) -> Result<Self, Error> {
        Self::with_handles(metadata, Carried::Fabric(handles, Kept::default()))
    }

    pub(crate) fn with_handles(metadata: Metadata, handles: Carried) -> Result<Self, Error> {
        metadata.check()?;
        handles.require(metadata.handle_kind)?;
        if handles.len() != metadata.sizes.len() {
            return Err(Error::HandleCount { handles: handles.len(), chunks: metadata.sizes.len() });
        }
        Ok(Self { metadata, handles })
    }

    /// What it says, without the handles.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The size of each chunk in bytes, in address order.
    pub fn sizes(&self) -> &[usize] {
        &self.metadata.sizes
    }

    /// The size of the buffer in bytes: any prefix of the sum of the chunks, and 0 only where there are none.
    pub fn size(&self) -> usize {
        self.metadata.size
    }

    /// The kind of its handles.
    pub fn handle_kind(&self) -> CUmemAllocationHandleType {
        self.metadata.handle_kind
    }

    /// Where the memory lives, if that was told.
    pub fn location(&self) -> Option<Location> {
        self.metadata.location
    }

    /// The UUID of the device that the memory is on; none for host memory, or where it was not told.
    pub fn device_uuid(&self) -> Option<CUuuid> {
        match self.metadata.location {
            Some(Location::Device { uuid }) => Some(uuid),
            _ => None,
        }
    }

    /// The buffer's identity, if its maker gave it one.
    pub fn id(&self) -> Option<BufferId> {
        self.metadata.id
    }

    /// The host on which its handles mean something, if that was told.
    pub fn host(&self) -> Option<HostId> {
        self.metadata.host
    }

    /// The files that are its handles, in address order: none where they are fabric handles. They stay the descriptor's.
    pub fn fds(&self) -> impl ExactSizeIterator<Item = BorrowedFd<'_>> {
        self.handles.as_fds()
    }

    /// The fabric handles that are its handles, in address order: none where they are files. What was read here pins
    /// nothing: in the process that exported it, the descriptor does.
    pub fn fabric_handles(&self) -> &[CUmemFabricHandle] {
        self.handles.as_fabric()
    }

    pub(crate) fn handles(&self) -> &Carried {
        &self.handles
    }

    /// A second descriptor of the same buffer, with handles of its own.
    ///
    /// # Errors
    /// [`Error::OpenFiles`] at the limit of open files, [`Error::Os`]. What was duplicated is closed then.
    pub fn try_clone(&self) -> Result<Self, Error> {
        Ok(Self { metadata: self.metadata.clone(), handles: self.handles.try_clone()? })
    }

    /// The two parts, for a transport of one's own. A handle that others [share](HandleFd::Shared) is duplicated.
    ///
    /// # Errors
    /// As [`try_clone`](Self::try_clone), where a handle is shared; [`Error::HandlesOfAnotherKind`] for fabric handles,
    /// which are read by [`fabric_handles`](Self::fabric_handles) while the descriptor keeps their memory. The descriptor
    /// is gone then.
    pub fn into_parts(self) -> Result<(Metadata, Vec<OwnedFd>), Error> {
        Ok((self.metadata, self.handles.into_owned_files()?))
    }

    /// What it says, and its handles as they are.
    pub(crate) fn into_handles(self) -> (Metadata, Carried) {
        (self.metadata, self.handles)
    }

    /// Closes the handles, as dropping it does, and ends its hold on the memory. What others share stays open for them.
    ///
    /// ```
    /// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::default());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// let descriptor = cuvmm_ipc::export(&buffer)?;
    /// buffer.close()?;
    /// // The descriptor has kept the memory.
    /// let again = cuvmm_ipc::import_from(&resource, &descriptor)?;
    /// descriptor.close();
    /// # Ok(())
    /// # }
    /// ```
    pub fn close(self) {
        drop(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(sizes: &[usize], size: usize) -> Metadata {
        Metadata { size, ..Metadata::new(sizes.to_vec()) }
    }

    #[test]
    fn sizes_must_fit_each_other() {
        let check = |sizes: &[usize], size, expect| assert_eq!(metadata(sizes, size).sum(), expect, "{sizes:?}");
        check(&[], 0, Ok(0));
        check(&[5], 5, Ok(5));
        check(&[5, 7], 1, Ok(12));
        check(&[5, 7], 12, Ok(12));
        check(&[], 1, Err(InvalidMetadata::Size { size: 1, sum: 0 }));
        check(&[5], 0, Err(InvalidMetadata::Size { size: 0, sum: 5 }));
        check(&[5, 7], 13, Err(InvalidMetadata::Size { size: 13, sum: 12 }));
        check(&[5, 0], 5, Err(InvalidMetadata::EmptyChunk { chunk: 1 }));
        check(&[1, usize::MAX], 1, Err(InvalidMetadata::SumOverflow { chunk: 1 }));
        check(&[usize::MAX], usize::MAX, Ok(usize::MAX));
    }

    #[test]
    fn a_size_that_was_not_given_is_the_sum() {
        assert_eq!(Metadata::new(vec![3, 4]).size, 7);
        assert_eq!(Metadata::new(vec![]).size, 0);
        let overflowing = Metadata::new(vec![usize::MAX, 2]);
        assert_eq!(overflowing.check(), Err(InvalidMetadata::SumOverflow { chunk: 1 }));
    }

    #[test]
    fn there_are_as_many_handles_as_chunks() {
        let handle = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(BufferDescriptor::new(metadata(&[1, 1], 2), vec![handle(), handle()]).unwrap().fds().len(), 2);
        for handles in [0, 1, 3] {
            let handles: Vec<_> = (0..handles).map(|_| handle()).collect();
            let error = BufferDescriptor::new(metadata(&[1, 1], 2), handles).unwrap_err();
            assert!(matches!(error, Error::HandleCount { chunks: 2, .. }), "{error}");
        }
    }

    #[test]
    fn a_clone_has_handles_of_its_own() {
        use std::os::fd::AsRawFd;
        let handle = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let one = BufferDescriptor::new(metadata(&[9], 4), vec![handle]).unwrap();
        let two = one.try_clone().unwrap();
        assert_eq!(one.metadata(), two.metadata());
        let numbers = |descriptor: &BufferDescriptor| descriptor.fds().map(|fd| fd.as_raw_fd()).collect::<Vec<_>>();
        assert_ne!(numbers(&one), numbers(&two));
    }
}
