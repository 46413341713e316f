//! One error for all layers.

use cuvmm_driver::{CUresult, Call, LoadError};
use cuvmm_resource::{CloseError, DeallocateError, ResizeError};

/// What any layer failed with. Each layer's own error is inside, unchanged.
///
/// ```
/// use cuvmm::{CUresult, Call, Options, VirtualMemoryResource};
/// use cuvmm_sim::{Machine, Simulator};
///
/// fn more_than_there_is() -> Result<(), cuvmm::Error> {
///     let driver = Simulator::new(Machine::default()).driver()?;
///     let resource = VirtualMemoryResource::new(&driver.device(0)?, Options::new())?;
///     resource.allocate(1 << 40)?.close()?;
///     Ok(())
/// }
///
/// let error = more_than_there_is().unwrap_err();
/// assert_eq!(error.call(), Some(Call::cuMemCreate));
/// assert_eq!(error.code(), Some(CUresult::OUT_OF_MEMORY));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No driver could be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] cuvmm_driver::Error),
    /// An operation on allocations, reservations or mappings failed.
    #[error(transparent)]
    Handles(#[from] cuvmm_handles::Error),
    /// An operation of a resource or a buffer failed.
    #[error(transparent)]
    Resource(#[from] cuvmm_resource::Error),
    /// A buffer was not closed, or not cleanly. It is inside, where it was not.
    #[error(transparent)]
    Close(#[from] CloseError),
    /// A buffer was not made larger or smaller, or not cleanly. It is inside.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// A range that was made elsewhere was not deallocated, or not cleanly.
    #[error(transparent)]
    Deallocate(#[from] DeallocateError),
    /// Sharing a buffer failed.
    #[error(transparent)]
    Ipc(#[from] cuvmm_ipc::Error),
}

impl Error {
    /// The driver call concerned, where there is one.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::Load(LoadError::Init(error)) | Self::Driver(error) => error.call(),
            Self::Load(_) => None,
            Self::Handles(error) => error.call(),
            Self::Resource(error) => error.call(),
            Self::Close(error) => error.error().call(),
            Self::Resize(error) => error.error().call(),
            Self::Deallocate(error) => error.error().call(),
            Self::Ipc(error) => error.call(),
        }
    }

    /// The code that the driver answered, where it was asked.
    pub fn code(&self) -> Option<CUresult> {
        match self {
            Self::Load(LoadError::Init(error)) | Self::Driver(error) => error.code(),
            Self::Load(_) => None,
            Self::Handles(error) => error.code(),
            Self::Resource(error) => error.code(),
            Self::Close(error) => error.error().code(),
            Self::Resize(error) => error.error().code(),
            Self::Deallocate(error) => error.error().code(),
            Self::Ipc(error) => error.code(),
        }
    }
}
