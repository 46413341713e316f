//! What sharing a buffer can fail with.

use std::io;

use crate::descriptor::InvalidMetadata;
use crate::identity::HostId;
use crate::wire::{Refusal, WireError};

/// What sharing a buffer failed with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The sizes of a descriptor do not fit each other.
    #[error("not a descriptor of a buffer")]
    Metadata(#[from] InvalidMetadata),
    /// A descriptor has not as many handles as chunks.
    #[error("{handles} handles for {chunks} chunks")]
    HandleCount {
        /// How many handles there are.
        handles: usize,
        /// How many chunks there are.
        chunks: usize,
    },
    /// The descriptor was made on another host, or before this one was started again. Its handles name nothing here.
    #[error("made on host {theirs}, and this is host {ours}")]
    WrongHost {
        /// This host.
        ours: HostId,
        /// The descriptor's.
        theirs: HostId,
    },
    /// The peer announces more chunks than the receiver takes. Nothing of it was received.
    #[error("{chunks} chunks are announced, and at most {limit} are taken")]
    TooManyHandles {
        /// How many it announces.
        chunks: usize,
        /// The receiver's limit.
        limit: usize,
    },
    /// The peer announces more memory than the receiver takes. No handle was received.
    #[error("{bytes} bytes are announced, and at most {limit} are taken")]
    TooManyBytes {
        /// How many it announces.
        bytes: usize,
        /// The receiver's limit.
        limit: usize,
    },
    /// The socket is of another kind than the transport needs.
    #[error("not a unix stream socket")]
    NotUnixStream,
    /// The deadline passed.
    #[error("the deadline passed while waiting to {operation}")]
    Timeout {
        /// What could not be done in time.
        operation: &'static str,
    },
    /// The peer closed its end.
    #[error("the peer closed its end before we could {operation}")]
    Closed {
        /// What could not be done any more.
        operation: &'static str,
    },
    /// The peer sent what is no message of the protocol.
    #[error("what the peer sent is no message of the protocol")]
    Wire(#[from] WireError),
    /// The peer sent another number of handles than it said. They are closed.
    #[error("{received} handles arrived where {announced} were due")]
    UnexpectedHandles {
        /// How many were due.
        announced: usize,
        /// How many arrived at least.
        received: usize,
    },
    /// The kernel could not hand over all the handles that were sent, most often because the process has too many
    /// open files. Those that arrived are closed.
    #[error("only {received} handles could be taken over, under a limit of {limit} open files")]
    TruncatedHandles {
        /// How many were.
        received: usize,
        /// The soft limit of open files.
        limit: u64,
    },
    /// The sender gave up before it sent all handles.
    #[error("the sender gave up after {sent} of {chunks} handles")]
    Abandoned {
        /// How many it sent.
        sent: usize,
        /// How many it announced.
        chunks: usize,
    },
    /// The receiver refused the descriptor.
    #[error("the receiver refused: {reason} ({detail})")]
    Refused {
        /// Why.
        reason: Refusal,
        /// A number that says more, such as an errno or a driver's code; 0 where none does.
        detail: u32,
    },
    /// The receiver answered out of turn.
    #[error("the receiver answered out of turn")]
    UnexpectedReply,
    /// The operating system refused.
    #[error("failed to {operation}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// With the errno.
        source: io::Error,
    },
}

impl Error {
    /// Makes an error of a failed call to the operating system.
    pub(crate) fn os<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Os { operation, source: error.into() }
    }

    /// What a receiver that failed with this tells the sender; none where the sender is beyond telling.
    pub(crate) fn refusal(&self) -> Option<(Refusal, u32)> {
        let errno = |source: &io::Error| source.raw_os_error().and_then(|code| u32::try_from(code).ok());
        let plain = |reason| Some((reason, 0));
        match self {
            Self::Closed { .. } | Self::Timeout { .. } | Self::Refused { .. } | Self::NotUnixStream => None,
            Self::Abandoned { .. } | Self::UnexpectedReply => None,
            Self::Wire(WireError::Version { .. }) => plain(Refusal::VERSION),
            Self::Wire(_) | Self::Metadata(_) => plain(Refusal::MALFORMED),
            Self::WrongHost { .. } => plain(Refusal::HOST),
            Self::TooManyHandles { .. } => plain(Refusal::TOO_MANY_HANDLES),
            Self::TooManyBytes { .. } => plain(Refusal::TOO_MANY_BYTES),
            Self::UnexpectedHandles { .. } | Self::HandleCount { .. } => plain(Refusal::HANDLES),
            Self::TruncatedHandles { .. } => plain(Refusal::OPEN_FILES),
            Self::Os { source, .. } => Some((Refusal::OTHER, errno(source).unwrap_or(0))),
        }
    }
}
