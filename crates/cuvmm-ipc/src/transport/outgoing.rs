//! [`Outgoing`]: the sender's side of one transfer.

use std::ops::Range;

use super::channel::Channel;
use crate::carried::Batch;
use crate::descriptor::Metadata;
use crate::error::Error;
use crate::wire::{self, INITIAL_HANDLES, MAX_HANDLES_PER_MESSAGE, Reply};

/// A transfer whose header is sent. Its handles follow in batches, so that no more of them need be open at once than
/// one batch has. Dropped before the end, it leaves the receiver without the rest: [`abandon`](Self::abandon) says so.
pub(super) struct Outgoing<'s> {
    channel: Channel<'s>,
    /// The handles that are still to be sent.
    left: Range<usize>,
    /// How many of them the receiver takes now.
    wanted: usize,
}

impl<'s> Outgoing<'s> {
    /// Sends the header.
    pub(super) fn begin(channel: Channel<'s>, metadata: &Metadata) -> Result<Self, Error> {
        let this = Self { channel, left: 0..metadata.sizes.len(), wanted: INITIAL_HANDLES };
        let operation = "send a header";
        this.answered(channel.send(&wire::encode(metadata)?, &[], operation), operation)?;
        Ok(this)
    }

    /// Which handles are due next; none at the end. Waits until the receiver wants some.
    pub(super) fn due(&mut self) -> Result<Option<Range<usize>>, Error> {
        if self.left.is_empty() {
            return Ok(None);
        }
        if self.wanted == 0 {
            match reply(self.channel, "hear that more handles are wanted")? {
                Reply::More { handles } => self.wanted = handles.into(),
                _ => return Err(Error::UnexpectedReply),
            }
        }
        let due = self.left.len().min(self.wanted).min(MAX_HANDLES_PER_MESSAGE);
        Ok(Some(self.left.start..self.left.start + due))
    }

    /// Sends those. Files may be closed when this returns: the kernel holds what is on its way.
    pub(super) fn send(&mut self, handles: &Batch<'_>) -> Result<(), Error> {
        let operation = "send handles";
        let (sent, result) = match handles {
            Batch::Files(files) => {
                (files.len(), self.channel.send(&wire::encode_handles(files.len()), files, operation))
            }
            Batch::Fabric(handles) => {
                (handles.len(), self.channel.send(&wire::encode_fabric_handles(handles), &[], operation))
            }
        };
        self.answered(result, operation)?;
        self.left.start += sent;
        self.wanted = self.wanted.saturating_sub(sent);
        Ok(())
    }

    /// Waits until the receiver has said that it keeps what came.
    pub(super) fn finish(self) -> Result<(), Error> {
        match reply(self.channel, "hear that the handles were accepted")? {
            Reply::Accepted => Ok(()),
            _ => Err(Error::UnexpectedReply),
        }
    }

    /// Tells the receiver that nothing more comes.
    pub(super) fn abandon(self) {
        self.channel.send_if_possible(&wire::encode_handles(0));
    }

    /// A receiver that refuses may be gone before we have sent all, or take nothing more: then its reply, and not the
    /// broken pipe or the deadline, says why.
    fn answered(&self, result: Result<(), Error>, operation: &'static str) -> Result<(), Error> {
        let Err(Error::Closed { .. } | Error::Timeout { .. } | Error::UnexpectedReply) = result else { return result };
        match reply(self.channel.without_waiting(), operation) {
            Err(told @ (Error::Refused { .. } | Error::Closed { .. } | Error::UnexpectedHandles { .. })) => Err(told),
            _ => result,
        }
    }
}

fn reply(channel: Channel<'_>, operation: &'static str) -> Result<Reply, Error> {
    let mut bytes = [0; wire::REPLY_LENGTH];
    channel.receive_bytes(&mut bytes, operation)?;
    match Reply::decode(&bytes)? {
        Reply::Refused { reason, detail } => Err(Error::Refused { reason, detail }),
        reply => Ok(reply),
    }
}
