//! What is told the other side of a failure.

use std::io;

use cuvmm_driver::Call;
use cuvmm_driver::sys::CUresult;

use super::Error;
use crate::wire::{Refusal, WireError};

const IMPORT: Call = Call::cuMemImportFromShareableHandle;
/// Too many open files: of this process, and of the system.
const EMFILE: u32 = 24;
const ENFILE: u32 = 23;

impl Error {
    /// What a receiver that failed with this tells the sender; none where the sender is beyond telling.
    pub(crate) fn refusal(&self) -> Option<(Refusal, u32)> {
        let errno = |source: &io::Error| source.raw_os_error().and_then(|code| u32::try_from(code).ok());
        let plain = |reason| Some((reason, 0));
        match self {
            Self::Closed { .. } | Self::Timeout { .. } | Self::Refused { .. } => None,
            Self::NotUnixStream | Self::PassesPidfds | Self::Abandoned { .. } | Self::UnexpectedReply => None,
            Self::Wire(WireError::Version { .. }) => plain(Refusal::VERSION),
            Self::Wire(_) | Self::Metadata(_) => plain(Refusal::MALFORMED),
            Self::ChunkSize { .. } => plain(Refusal::CHUNK_SIZE),
            Self::Chunk { source, .. } => source.refusal(),
            Self::WrongHost { .. } => plain(Refusal::HOST),
            Self::TooManyHandles { .. } => plain(Refusal::TOO_MANY_HANDLES),
            Self::TooManyBytes { .. } => plain(Refusal::TOO_MANY_BYTES),
            Self::UnexpectedHandles { .. } | Self::TruncatedHandles { .. } => plain(Refusal::HANDLES),
            Self::HandleCount { .. } | Self::WrongFile { .. } => plain(Refusal::HANDLES),
            Self::WrongHandleKind { .. } => plain(Refusal::HANDLE_KIND),
            Self::WrongLocation { .. } | Self::OtherMemory { .. } | Self::HiddenDevice { .. } => {
                plain(Refusal::LOCATION)
            }
            Self::OpenFiles { .. } => plain(Refusal::OPEN_FILES),
            Self::Os { source, .. } if matches!(errno(source), Some(EMFILE | ENFILE)) => plain(Refusal::OPEN_FILES),
            Self::Os { source, .. } => Some((Refusal::OTHER, errno(source).unwrap_or(0))),
            // So the driver says that no descriptor is left: an import opens one of its own.
            _ if (self.call(), self.code()) == (Some(IMPORT), Some(CUresult::OPERATING_SYSTEM)) => {
                plain(Refusal::OPEN_FILES)
            }
            Self::Driver(_) | Self::Handles(_) | Self::Resource(_) => {
                Some(self.code().map_or((Refusal::OTHER, 0), |code| (Refusal::DRIVER, code.0)))
            }
            Self::NotExportable { .. } | Self::Imported { .. } | Self::HandlesOfAnotherKind { .. } => None,
            // Before there is anybody to tell.
            Self::PathTooLong { .. } | Self::AddressInUse { .. } | Self::PeerDenied { .. } => None,
            Self::NotInherited { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::tests::failed;

    #[test]
    fn a_receiver_without_open_files_says_so() {
        let check = |error: Error, expect| assert_eq!(error.refusal(), Some(expect), "{error}");
        for errno in [EMFILE, ENFILE] {
            let error = io::Error::from_raw_os_error(errno.cast_signed());
            check(Error::os("duplicate a handle")(error), (Refusal::OPEN_FILES, 0));
        }
        check(Error::os("wait")(io::Error::from_raw_os_error(5)), (Refusal::OTHER, 5));
        check(failed(IMPORT, CUresult::OPERATING_SYSTEM), (Refusal::OPEN_FILES, 0));
        check(failed(IMPORT, CUresult::UNKNOWN), (Refusal::DRIVER, 999));
        let of_chunk = |call, code| Error::Chunk { chunk: 1, bytes: 4096, source: Box::new(failed(call, code)) };
        check(of_chunk(IMPORT, CUresult::OPERATING_SYSTEM), (Refusal::OPEN_FILES, 0));
        check(of_chunk(Call::cuMemMap, CUresult::INVALID_VALUE), (Refusal::DRIVER, 1));
        check(failed(Call::cuMemMap, CUresult::OPERATING_SYSTEM), (Refusal::DRIVER, 304));
        check(Error::OpenFiles { limit: 64, needed: 65 }, (Refusal::OPEN_FILES, 0));
        check(Error::ChunkSize { chunk: 0, bytes: 1, granularity: 2 }, (Refusal::CHUNK_SIZE, 0));
    }
}
