//! What the resource and its buffers can fail with.

use cuvmm_driver::{CUresult, Call};

use crate::buffer::VirtualMemoryBuffer;

/// What an operation of the resource or a buffer failed with.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let error = resource.allocate(1 << 40).unwrap_err();
/// assert_eq!(error.call(), Some(cuvmm_driver::Call::cuMemCreate));
/// assert_eq!(error.code(), Some(cuvmm_driver::CUresult::OUT_OF_MEMORY));
/// assert_eq!(error.to_string(), "cuMemCreate failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x10000000000 bytes");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver refused a call, or values of two drivers met.
    #[error(transparent)]
    Driver(#[from] cuvmm_driver::Error),
    /// An operation on allocations, reservations or mappings failed.
    #[error(transparent)]
    Handles(#[from] cuvmm_handles::Error),
    /// The device lacks something that the options ask for.
    #[error("device {ordinal} does not support {what}")]
    Unsupported {
        /// What.
        what: &'static str,
        /// The device.
        ordinal: i32,
    },
    /// An alignment that is no power of two.
    #[error("an alignment of {alignment} is no power of two")]
    Alignment {
        /// The alignment.
        alignment: usize,
    },
    /// Bytes that do not lie within the buffer.
    #[error("{bytes} bytes at offset {offset} do not lie within a buffer of {size}")]
    OutOfBounds {
        /// Where they begin in the buffer.
        offset: usize,
        /// How many.
        bytes: usize,
        /// The buffer's size.
        size: usize,
    },
    /// A size that its chunks do not cover, or chunks with no size.
    #[error("a buffer of {size} bytes can't be made of chunks of {sum}")]
    Chunks {
        /// The size of the buffer.
        size: usize,
        /// What its chunks add up to.
        sum: usize,
    },
    /// The stream is capturing a graph: nothing was queued on it or waited for. Where the capture began in the midst of
    /// a copy or a fill, that is in the graph or was done; it is to be done again.
    #[error("the stream is capturing")]
    StreamCapturing,
    /// The calling thread is inside a host function of the driver's, where no CUDA call is allowed.
    #[error("called from a host function of the driver")]
    HostCallback,
}

impl Error {
    /// The driver's own error, where it is one.
    pub fn driver(&self) -> Option<&cuvmm_driver::Error> {
        match self {
            Self::Driver(error) => Some(error),
            Self::Handles(error) => error.driver(),
            _ => None,
        }
    }

    /// The driver call concerned, where there is one.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::Handles(error) => error.call(),
            _ => self.driver()?.call(),
        }
    }

    /// The code that the driver answered, where it was asked.
    pub fn code(&self) -> Option<CUresult> {
        self.driver()?.code()
    }
}

/// Why a buffer was not closed, or not cleanly.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let stranger = Simulator::new(Machine::h200());
/// let stream = StreamRef::create(&stranger.driver()?.device(0)?)?;
/// let error = resource.allocate(2 << 20)?.close_on(&stream).unwrap_err();
/// assert_eq!(error.error(), &Error::Driver(cuvmm_driver::Error::DifferentDrivers));
/// let buffer = error.into_buffer().ok_or("closed all the same")?;
/// buffer.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{}", if buffer.is_some() { "the buffer was not closed" } else { "the buffer was closed with an error" })]
pub struct CloseError {
    #[source]
    pub(crate) error: Error,
    pub(crate) buffer: Option<Box<VirtualMemoryBuffer>>,
}

impl CloseError {
    /// What went wrong first.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The buffer, where nothing was released; none where it is closed all the same.
    pub fn into_buffer(self) -> Option<VirtualMemoryBuffer> {
        self.buffer.map(|buffer| *buffer)
    }

    /// The error and the buffer.
    pub fn into_parts(self) -> (Error, Option<VirtualMemoryBuffer>) {
        (self.error, self.buffer.map(|buffer| *buffer))
    }
}

/// Why a buffer was not grown into a larger one.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let buffer = resource.allocate(2 << 20)?;
/// let error = buffer.grow_into(1 << 40).unwrap_err();
/// assert_eq!(error.error().code(), Some(cuvmm_driver::CUresult::OUT_OF_MEMORY));
/// assert_eq!(error.into_buffer().size(), 2 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{}", if *grown { "the buffer was grown, and its old addresses were not given back" } else { "the buffer was not grown" })]
pub struct GrowError {
    #[source]
    pub(crate) error: Error,
    pub(crate) buffer: Box<VirtualMemoryBuffer>,
    pub(crate) grown: bool,
}

impl GrowError {
    /// What went wrong first.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Whether the buffer inside is the grown one: it moved, and giving back its old addresses failed.
    pub fn is_grown(&self) -> bool {
        self.grown
    }

    /// The buffer: as it was, or the grown one where [`is_grown`](Self::is_grown) says so.
    pub fn into_buffer(self) -> VirtualMemoryBuffer {
        *self.buffer
    }

    /// The error and the buffer.
    pub fn into_parts(self) -> (Error, VirtualMemoryBuffer) {
        (self.error, *self.buffer)
    }
}
