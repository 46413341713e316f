//! [`Incoming`]: the receiver's side of one transfer.

use cuvmm_driver::sys::CUmemAllocationHandleType;

use super::Limits;
use super::channel::Channel;
use crate::carried::{Carried, Kept};
use crate::descriptor::Metadata;
use crate::error::Error;
use crate::handles::Handles;
use crate::import;
use crate::wire::{self, INITIAL_HANDLES, MAX_HANDLES_PER_MESSAGE, Preamble, Reply};

/// A transfer whose header was received and is acceptable. Its handles follow in batches.
pub(super) struct Incoming<'s> {
    channel: Channel<'s>,
    metadata: Metadata,
    /// How many handles came.
    received: usize,
    /// How many more the sender may send unasked.
    allowed: usize,
}

impl<'s> Incoming<'s> {
    /// Receives the header, and looks at it before anything is allocated for what it announces.
    pub(super) fn begin(channel: Channel<'s>, limits: &Limits) -> Result<Self, Error> {
        let mut preamble = [0; wire::PREAMBLE_LENGTH];
        channel.receive_bytes(&mut preamble, "receive a header")?;
        let preamble = Preamble::decode(&preamble)?;
        import::check_host(preamble.handle_kind(), preamble.location(), preamble.host())?;
        let limit = limits.max_handles.min(Metadata::MAX_CHUNKS);
        if preamble.chunks() > limit {
            return Err(Error::TooManyHandles { chunks: preamble.chunks(), limit });
        }
        let fits = |bytes| {
            let limit = limits.max_bytes;
            if bytes > limit { Err(Error::TooManyBytes { bytes, limit }) } else { Ok(()) }
        };
        fits(preamble.size())?;
        let mut sizes = vec![0; preamble.sizes_length()];
        channel.receive_bytes(&mut sizes, "receive the sizes of the chunks")?;
        let metadata = preamble.with_sizes(&sizes)?;
        fits(metadata.sum()?)?;
        let allowed = INITIAL_HANDLES.min(metadata.sizes.len());
        Ok(Self { channel, metadata, received: 0, allowed })
    }

    /// What was announced.
    pub(super) fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Receives the next handles: at least one; none at the end. Where the sender must be asked for more, it is asked
    /// for `batch` at most.
    pub(super) fn next(&mut self, batch: usize) -> Result<Carried, Error> {
        let chunks = self.metadata.sizes.len();
        let left = chunks.saturating_sub(self.received);
        let kind = self.metadata.handle_kind;
        if left == 0 {
            return Ok(Carried::none_of(kind));
        }
        if self.allowed == 0 {
            self.allowed = left.min(batch.clamp(1, MAX_HANDLES_PER_MESSAGE));
            let more = Reply::More { handles: u16::try_from(self.allowed).unwrap_or(u16::MAX) };
            self.channel.reply(&more.encode(), "ask for more handles")?;
        }
        let handles = if kind == CUmemAllocationHandleType::FABRIC { self.fabric()? } else { self.files()? };
        if handles.len() == 0 {
            return Err(Error::Abandoned { sent: self.received, chunks });
        }
        self.received += handles.len();
        self.allowed -= handles.len();
        Ok(handles)
    }

    /// Receives a message of files: as many as it says, and no more than may come.
    fn files(&self) -> Result<Carried, Error> {
        let mut announced = [0; wire::HANDLES_LENGTH];
        let mut handles = Handles::default();
        let result = self.channel.receive(&mut announced, &mut handles, self.allowed, "receive handles");
        result.map_err(|error| match error {
            Error::TruncatedHandles { received, .. } => {
                Error::TruncatedHandles { announced: self.metadata.sizes.len(), received: self.received + received }
            }
            error => error,
        })?;
        let announced = wire::decode_handles(&announced)?;
        if announced != handles.len() || announced > self.allowed {
            return Err(Error::UnexpectedHandles { announced, received: handles.len() });
        }
        Ok(Carried::Files(handles))
    }

    /// Receives a message of fabric handles. How many is looked at before there is room for them.
    fn fabric(&self) -> Result<Carried, Error> {
        let operation = "receive handles";
        let mut announced = [0; wire::HANDLES_LENGTH];
        self.channel.receive_bytes(&mut announced, operation)?;
        let received = wire::decode_handles(&announced)?;
        if received > self.allowed {
            return Err(Error::UnexpectedHandles { announced: self.allowed, received });
        }
        let mut handles = vec![0; wire::FABRIC_HANDLE_LENGTH * received];
        self.channel.receive_bytes(&mut handles, operation)?;
        let handles = wire::decode_fabric_handles(&[&announced[..], &handles].concat())?;
        Ok(Carried::Fabric(handles, Kept::default()))
    }

    /// Tells the sender that all came and is kept; a sender that is gone by now need not hear it.
    pub(super) fn accept(self) -> Result<Metadata, Error> {
        match self.channel.reply(&Reply::Accepted.encode(), "say that all handles came") {
            Ok(()) | Err(Error::Closed { .. }) => Ok(self.metadata),
            Err(error) => Err(error),
        }
    }
}

/// Tells the sender why nothing more is wanted, if it is there to listen.
pub(super) fn refuse(channel: Channel<'_>, error: &Error) {
    if let Some((reason, detail)) = error.refusal() {
        channel.send_if_possible(&Reply::Refused { reason, detail }.encode());
    }
}
