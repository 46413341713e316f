//! [`Options`]: what a resource's memory is to be.

use cuvmm_driver::sys::CUmemAllocationHandleType;

use crate::release::Release;

/// How memory can be handed to other processes: fixed when it is made.
///
/// ```
/// # use cuvmm_driver::sys::CUmemAllocationHandleType;
/// # use cuvmm_resource::HandleKind;
/// assert_eq!(HandleKind::default(), HandleKind::None);
/// assert_eq!(HandleKind::PosixFd.as_driver(), CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HandleKind {
    /// Not at all, which costs nothing.
    #[default]
    None,
    /// As POSIX file descriptors.
    PosixFd,
}

impl HandleKind {
    /// The driver's own name of it.
    pub fn as_driver(self) -> CUmemAllocationHandleType {
        match self {
            Self::None => CUmemAllocationHandleType::NONE,
            Self::PosixFd => CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR,
        }
    }
}

/// What a resource's memory is to be. They are checked when the resource is made, and never change after.
///
/// ```
/// use cuvmm_resource::{HandleKind, Options};
///
/// let options = Options::new().handle_kind(HandleKind::PosixFd).alignment(64 << 20);
/// assert_eq!(options.kind(), HandleKind::PosixFd);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    handle_kind: HandleKind,
    alignment: usize,
    release: Release,
}

impl Options {
    /// Memory of the device, readable and writable by it, that can't be exported.
    pub fn new() -> Self {
        Self::default()
    }

    /// How the memory can be handed to other processes; [`HandleKind::None`] unless this is called.
    #[must_use]
    pub fn handle_kind(mut self, handle_kind: HandleKind) -> Self {
        self.handle_kind = handle_kind;
        self
    }

    /// What the address of an allocation is a multiple of, in bytes: a power of two. 0, the default, leaves it at
    /// the granularity. Where a buffer moves, its address is such a multiple again.
    #[must_use]
    pub fn alignment(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    /// What buffers wait for when they close or drop, until they are
    /// [told otherwise](crate::VirtualMemoryBuffer::set_release); [`Release::DefaultStream`] unless this is called.
    #[must_use]
    pub fn release(mut self, release: Release) -> Self {
        self.release = release;
        self
    }

    /// The handle kind.
    pub fn kind(&self) -> HandleKind {
        self.handle_kind
    }

    /// The alignment in bytes; 0 for the granularity.
    pub fn align(&self) -> usize {
        self.alignment
    }

    /// What buffers wait for.
    pub fn released_after(&self) -> &Release {
        &self.release
    }
}
