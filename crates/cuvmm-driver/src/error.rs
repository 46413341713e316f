//! What a typed call can fail with.

use crate::raw::Call;
use crate::sys::{CUresult, CudaVersion};

/// What a typed call failed with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver refused the call.
    #[error("{call} failed with {} ({}): {text}", code.0, name)]
    Call {
        /// The call.
        call: Call,
        /// The code it answered.
        code: CUresult,
        /// The driver's name for the code.
        name: String,
        /// The driver's text for the code.
        text: String,
    },
    /// The driver is older than the call.
    #[error("this driver has no {symbol}: it came with CUDA {since}")]
    Unsupported {
        /// The call.
        symbol: Call,
        /// The CUDA version of its signature.
        since: CudaVersion,
    },
    /// There is no device of that ordinal. No call was made.
    #[error("no device {ordinal}: {count} visible to this process")]
    NoSuchDevice {
        /// The ordinal that was asked for.
        ordinal: i32,
        /// How many devices there are.
        count: i32,
    },
    /// Values of two drivers in one operation. No call was made: a driver crashes on handles that it did not make.
    #[error("values of two different drivers in one operation")]
    DifferentDrivers,
    /// The process was forked from the one that started the driver, and no call works in it. None was made.
    #[error("called in a process that was forked from the one that started the driver")]
    Forked,
    /// An argument that the driver is known to misread. No call was made.
    #[error("{call} was not called: {reason}")]
    InvalidArgument {
        /// The call that would have been made.
        call: Call,
        /// What is wrong.
        reason: &'static str,
    },
}

impl Error {
    /// The call that failed, or the one that wasn't made; none where no call is concerned.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::Call { call, .. } | Self::InvalidArgument { call, .. } => Some(*call),
            Self::Unsupported { symbol, .. } => Some(*symbol),
            Self::NoSuchDevice { .. } | Self::DifferentDrivers | Self::Forked => None,
        }
    }

    /// Whether the driver lacked something, memory or open files, that may be there another time.
    pub fn is_shortage(&self) -> bool {
        matches!(self.code(), Some(CUresult::OUT_OF_MEMORY | CUresult::OPERATING_SYSTEM))
    }

    /// Whether the driver has shut down, as it does while the process ends: that gives back everything.
    pub fn is_shut_down(&self) -> bool {
        self.code() == Some(CUresult::DEINITIALIZED)
    }

    /// The code that the driver answered; none where it wasn't asked.
    pub fn code(&self) -> Option<CUresult> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }
}
