//! [`Carried`]: the handles that a descriptor has, all of one kind.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::vec;

use cuvmm_driver::OfProcess;
use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemFabricHandle};
use cuvmm_handles::Allocation;

use crate::aside::Threads;
use crate::error::Error;
use crate::handles::Handles;

/// Who releases memory where the thread that has to can't.
static RELEASING: OfProcess<Threads> = OfProcess::new();

/// The handles of one descriptor or of a part of it, in address order.
#[derive(Debug)]
pub(crate) enum Carried {
    /// Open files: each pins its memory.
    Files(Handles),
    /// Bytes, which pin nothing, and what pins the memory where they were exported.
    Fabric(Vec<CUmemFabricHandle>, Kept),
}

/// Those that one message has.
pub(crate) enum Batch<'c> {
    Files(Vec<BorrowedFd<'c>>),
    Fabric(&'c [CUmemFabricHandle]),
}

/// One of them.
pub(crate) enum Handle<F> {
    File(F),
    Fabric(CUmemFabricHandle),
}

impl Carried {
    /// None yet, of that kind.
    pub(crate) fn none_of(kind: CUmemAllocationHandleType) -> Self {
        match kind {
            CUmemAllocationHandleType::FABRIC => Self::Fabric(Vec::new(), Kept::default()),
            _ => Self::Files(Handles::default()),
        }
    }

    /// That they are what a descriptor of that kind has. What is neither kind is said of files, too, and refused when it
    /// is imported.
    pub(crate) fn require(&self, wanted: CUmemAllocationHandleType) -> Result<(), Error> {
        let found = self.kind();
        let fabric = CUmemAllocationHandleType::FABRIC;
        if (found == fabric) == (wanted == fabric) {
            Ok(())
        } else {
            Err(Error::HandlesOfAnotherKind { found, wanted })
        }
    }

    fn kind(&self) -> CUmemAllocationHandleType {
        match self {
            Self::Files(_) => CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR,
            Self::Fabric(..) => CUmemAllocationHandleType::FABRIC,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Files(files) => files.len(),
            Self::Fabric(handles, _) => handles.len(),
        }
    }

    /// The files, where they are files.
    pub(crate) fn as_fds(&self) -> impl ExactSizeIterator<Item = BorrowedFd<'_>> {
        let files = match self {
            Self::Files(files) => files.as_files(),
            Self::Fabric(..) => &[],
        };
        files.iter().map(AsFd::as_fd)
    }

    /// The fabric handles, where they are such.
    pub(crate) fn as_fabric(&self) -> &[CUmemFabricHandle] {
        match self {
            Self::Files(_) => &[],
            Self::Fabric(handles, _) => handles,
        }
    }

    /// Some of them, to be sent.
    pub(crate) fn batch(&self, range: Range<usize>) -> Batch<'_> {
        match self {
            Self::Files(_) => Batch::Files(self.as_fds().skip(range.start).take(range.len()).collect()),
            Self::Fabric(handles, _) => Batch::Fabric(handles.get(range).unwrap_or_default()),
        }
    }

    /// Moves all of `others`, of the same kind, behind these.
    pub(crate) fn append(&mut self, others: Self) {
        match (self, others) {
            (Self::Files(files), Self::Files(mut others)) => files.append(&mut others),
            (Self::Fabric(handles, _), Self::Fabric(others, _)) => handles.extend(others),
            _ => unreachable!("one exchange has handles of one kind"),
        }
    }

    /// Duplicates of all.
    pub(crate) fn try_clone(&self) -> Result<Self, Error> {
        match self {
            Self::Files(files) => files.try_clone().map(Self::Files),
            Self::Fabric(handles, kept) => Ok(Self::Fabric(handles.clone(), kept.clone())),
        }
    }

    /// The files, owned.
    pub(crate) fn into_owned_files(self) -> Result<Vec<OwnedFd>, Error> {
        self.require(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR)?;
        match self {
            Self::Files(files) => files.into_owned(),
            Self::Fabric(..) => Ok(Vec::new()),
        }
    }

    /// Each in turn.
    pub(crate) fn each(&self) -> impl Iterator<Item = Handle<BorrowedFd<'_>>> {
        self.as_fds().map(Handle::File).chain(self.as_fabric().iter().copied().map(Handle::Fabric))
    }

    /// Each in turn, of which the files are known to close at once. The memory is kept until the end of this.
    pub(crate) fn into_each(self) -> Each {
        let (handles, kept): (Vec<_>, _) = match self {
            Self::Files(files) => (files.into_files().into_iter().map(Handle::File).collect(), Kept::default()),
            Self::Fabric(handles, kept) => (handles.into_iter().map(Handle::Fabric).collect(), kept),
        };
        Each { handles: handles.into_iter(), _kept: kept }
    }
}

/// The handles of a descriptor that is gone.
#[derive(Default)]
pub(crate) struct Each {
    handles: vec::IntoIter<Handle<Arc<OwnedFd>>>,
    _kept: Kept,
}

impl Iterator for Each {
    type Item = Handle<Arc<OwnedFd>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.handles.next()
    }
}

/// A share of the memory that fabric handles name, in the process that exported it.
///
/// Whoever has the last share releases the memory, by a call of the driver. Where none is allowed, another thread does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept(Vec<Arc<Allocation>>);

impl FromIterator<Arc<Allocation>> for Kept {
    fn from_iter<I: IntoIterator<Item = Arc<Allocation>>>(memory: I) -> Self {
        Self(memory.into_iter().collect())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let last: Vec<_> = self.0.drain(..).filter_map(Arc::into_inner).collect();
        let is_forbidden = |memory: &Allocation| matches!(memory.driver().is_in_host_function(), Ok(true));
        if last.first().is_some_and(is_forbidden) {
            Threads::leave(&RELEASING, move || drop(last));
        }
    }
}
