//! What sharing a buffer can fail with.

mod refusal;

use std::io;
use std::path::{Path, PathBuf};

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemLocation, CUresult, CUuuid};

use crate::descriptor::InvalidMetadata;
use crate::file_kind::FileKind;
use crate::identity::{HostId, Location};
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
    /// The socket is set to take a descriptor of the sending process with each message (`SO_PASSPIDFD`), which nobody
    /// here would close.
    #[error("the socket takes process descriptors with each message: turn SO_PASSPIDFD off")]
    PassesPidfds,
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
    /// The kernel did not hand over all the handles that were sent, though open files were left: most often because a
    /// security policy forbids one. Those that arrived are closed.
    #[error("only {received} of {announced} handles were handed over")]
    TruncatedHandles {
        /// How many were due in all.
        announced: usize,
        /// How many were taken over.
        received: usize,
    },
    /// No open file was left for the handles.
    #[error(
        "{needed} handles are as many open files, which a limit of {limit} leaves no room for: raise it, or move the \
         buffer with send_buffer and receive_buffer, which need few at once"
    )]
    OpenFiles {
        /// The soft limit of open files (`RLIMIT_NOFILE`).
        limit: u64,
        /// How many handles there were to be.
        needed: usize,
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
    #[error("the receiver refused: {reason}{}", if *detail == 0 { String::new() } else { format!(" ({detail})") })]
    Refused {
        /// Why.
        reason: Refusal,
        /// A number that says more, such as an errno or a driver's code; 0 where none does.
        detail: u32,
    },
    /// The receiver answered out of turn.
    #[error("the receiver answered out of turn")]
    UnexpectedReply,
    /// The buffer's memory was not made to be shared.
    #[error(
        "memory made for handle kinds {has} can't be exported as kind {wanted}: make its resource with the kind \
         (Options::handle_kind), or copy into a buffer that has it"
    )]
    NotExportable {
        /// The kinds of handle that it was made for.
        has: CUmemAllocationHandleType,
        /// The kind that an export needs.
        wanted: CUmemAllocationHandleType,
    },
    /// The buffer has memory of another process in it, which can't be exported from here.
    #[error(
        "chunk {chunk} was imported and can't be exported again: forward the descriptor that it came by, or copy into \
         a buffer of your own"
    )]
    Imported {
        /// The first such chunk.
        chunk: usize,
    },
    /// Handles of one kind where those of another are due: files, and fabric handles.
    #[error("handles of kind {found} where those of kind {wanted} are due")]
    HandlesOfAnotherKind {
        /// What they are.
        found: CUmemAllocationHandleType,
        /// What they should be.
        wanted: CUmemAllocationHandleType,
    },
    /// The resource can't take handles of the descriptor's kind.
    #[error("the descriptor has handles of kind {theirs}, and the resource is made for {ours} (Options::handle_kind)")]
    WrongHandleKind {
        /// The resource's.
        ours: CUmemAllocationHandleType,
        /// The descriptor's.
        theirs: CUmemAllocationHandleType,
    },
    /// The descriptor's memory is not where the resource's is, and a resource that is there can be made.
    #[error("the memory is on {theirs}, and the resource's is on {ours}: import it by a resource of {theirs}")]
    WrongLocation {
        /// Where the resource's memory is.
        ours: Location,
        /// Where the descriptor says it is.
        theirs: Location,
    },
    /// A chunk of a size that this memory doesn't come in.
    #[error("chunk {chunk} of {bytes} bytes is no multiple of the granularity, {granularity}")]
    ChunkSize {
        /// Which.
        chunk: usize,
        /// Its size.
        bytes: usize,
        /// The resource's granularity.
        granularity: usize,
    },
    /// The driver refused to import or to map a chunk. Where the size that was told is not the memory's own, it refuses to
    /// map it.
    #[error("failed to take over chunk {chunk}, which was told to have {bytes} bytes")]
    Chunk {
        /// Which.
        chunk: usize,
        /// Its size, as the descriptor tells it.
        bytes: usize,
        /// What the driver answered.
        source: Box<Error>,
    },
    /// A handle that is no file of the kind that this driver's handles are. The driver was not asked.
    #[error("handle {chunk} is {found}, {}", handles_are(*expected))]
    WrongFile {
        /// Which.
        chunk: usize,
        /// What it is.
        found: FileKind,
        /// What this driver's own handles are; none where it had no memory to make one, and the file can't be one of
        /// any driver.
        expected: Option<FileKind>,
    },
    /// The driver says that the imported memory lives elsewhere than the descriptor said.
    #[error("chunk {chunk} is memory of {found}, not of {expected}")]
    OtherMemory {
        /// Which chunk.
        chunk: usize,
        /// What the driver says.
        found: CUmemLocation,
        /// Where the resource's memory is.
        expected: CUmemLocation,
    },
    /// The memory lives on a device that this process does not see.
    #[error(
        "the memory is on {}, which is not visible to this process: make it visible (CUDA_VISIBLE_DEVICES), or import \
         with Importer::allow_hidden_device",
        device(*uuid)
    )]
    HiddenDevice {
        /// The device, where the descriptor told.
        uuid: Option<CUuuid>,
    },
    /// A path that is longer than a socket's name may be.
    #[error("a path of {length} bytes is no name for a socket: {limit} are the most")]
    PathTooLong {
        /// Its length, in bytes.
        length: usize,
        /// The most that there may be.
        limit: usize,
    },
    /// Somebody listens there, or the path is that of a file which is not removed.
    #[error("{} is in use, by a listener or by a file that is not removed", path.display())]
    AddressInUse {
        /// The path of the socket, or of its lock.
        path: PathBuf,
    },
    /// The process at the other end is none that was allowed. The connection is closed.
    #[error("process {pid} of user {uid} and group {gid} is not allowed")]
    PeerDenied {
        /// Its number when it connected; 0 where it can't be seen from here.
        pid: u32,
        /// Its effective user.
        uid: u32,
        /// Its effective group.
        gid: u32,
    },
    /// This process was not started with a socket, or has taken it already.
    #[error("no socket was inherited: {reason}")]
    NotInherited {
        /// What is not as it should be.
        reason: &'static str,
    },
    /// The driver refused a call, or the process was forked from the one that started it
    /// ([`Forked`](cuvmm_driver::Error::Forked)).
    #[error(transparent)]
    Driver(#[from] cuvmm_driver::Error),
    /// An operation on an allocation failed.
    #[error(transparent)]
    Handles(#[from] cuvmm_handles::Error),
    /// The resource could not map the memory.
    #[error(transparent)]
    Resource(#[from] cuvmm_resource::Error),
    /// The operating system refused.
    #[error("failed to {operation}{}", path.as_ref().map_or_else(String::new, |path| format!(" ({})", path.display())))]
    Os {
        /// What was tried.
        operation: &'static str,
        /// With what: the path of a socket or a directory, or the program, where there is one.
        path: Option<PathBuf>,
        /// With the errno.
        source: io::Error,
    },
}

impl Error {
    /// The driver call concerned, where there is one.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::Driver(error) => error.call(),
            Self::Handles(error) => error.call(),
            Self::Resource(error) => error.call(),
            Self::Chunk { source, .. } => source.call(),
            _ => None,
        }
    }

    /// The code that the driver answered, where it was asked.
    pub fn code(&self) -> Option<CUresult> {
        match self {
            Self::Driver(error) => error.code(),
            Self::Handles(error) => error.code(),
            Self::Resource(error) => error.code(),
            Self::Chunk { source, .. } => source.code(),
            _ => None,
        }
    }

    /// Makes an error of a failed call to the operating system.
    pub(crate) fn os<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Os { operation, path: None, source: error.into() }
    }

    /// As [`os`](Self::os), of a call that was about that path, or that program.
    pub(crate) fn os_at<E: Into<io::Error>>(operation: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        move |error| Self::Os { operation, path: Some(path.to_owned()), source: error.into() }
    }
}

fn device(uuid: Option<CUuuid>) -> String {
    uuid.map_or_else(|| "a device".to_owned(), |uuid| format!("device {uuid}"))
}

fn handles_are(expected: Option<FileKind>) -> String {
    expected.map_or_else(
        || "and no driver's handles are that".to_owned(),
        |expected| format!("and the handles of this driver are {expected}"),
    )
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::os::fd::AsFd;

    use cuvmm_driver::sys::CUuuid;

    use super::*;

    pub(super) fn failed(call: Call, code: CUresult) -> Error {
        let (name, text) = (String::new(), String::new());
        Error::Driver(cuvmm_driver::Error::Call { call, code, name, text })
    }

    #[test]
    fn messages_name_what_failed_with_its_numbers() {
        let check = |error: Error, expect: &str| assert_eq!(error.to_string(), expect);
        let metadata = InvalidMetadata::EmptyChunk { chunk: 2 };
        check(Error::Metadata(metadata), "not a descriptor of a buffer");
        check(Error::HandleCount { handles: 2, chunks: 3 }, "2 handles for 3 chunks");
        let (one, two) = (HostId::new([1; 16]).unwrap(), HostId::new([2; 16]).unwrap());
        let hosts = format!("made on host {}, and this is host {}", "02".repeat(16), "01".repeat(16));
        check(Error::WrongHost { ours: one, theirs: two }, &hosts);
        check(Error::TooManyHandles { chunks: 5, limit: 4 }, "5 chunks are announced, and at most 4 are taken");
        check(Error::TooManyBytes { bytes: 5, limit: 4 }, "5 bytes are announced, and at most 4 are taken");
        check(Error::NotUnixStream, "not a unix stream socket");
        check(Error::PassesPidfds, "the socket takes process descriptors with each message: turn SO_PASSPIDFD off");
        let operation = "receive a header";
        check(Error::Timeout { operation }, "the deadline passed while waiting to receive a header");
        check(Error::Closed { operation }, "the peer closed its end before we could receive a header");
        check(Error::Wire(WireError::Reply { found: 9 }), "what the peer sent is no message of the protocol");
        check(Error::UnexpectedHandles { announced: 4, received: 6 }, "6 handles arrived where 4 were due");
        check(Error::TruncatedHandles { announced: 300, received: 40 }, "only 40 of 300 handles were handed over");
        check(
            Error::OpenFiles { limit: 64, needed: 300 },
            "300 handles are as many open files, which a limit of 64 leaves no room for: raise it, or move the buffer \
             with send_buffer and receive_buffer, which need few at once",
        );
        check(Error::Abandoned { sent: 1, chunks: 3 }, "the sender gave up after 1 of 3 handles");
        let refused = |reason, detail| Error::Refused { reason, detail };
        check(refused(Refusal::DRIVER, 801), "the receiver refused: driver failed (801)");
        check(refused(Refusal::HOST, 0), "the receiver refused: another host");
        check(Error::UnexpectedReply, "the receiver answered out of turn");
        let (posix, fabric) = (CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR, CUmemAllocationHandleType::FABRIC);
        check(
            Error::NotExportable { has: CUmemAllocationHandleType::NONE, wanted: posix },
            "memory made for handle kinds NONE can't be exported as kind POSIX_FILE_DESCRIPTOR: make its resource with \
             the kind (Options::handle_kind), or copy into a buffer that has it",
        );
        check(
            Error::Imported { chunk: 1 },
            "chunk 1 was imported and can't be exported again: forward the descriptor that it came by, or copy into a \
             buffer of your own",
        );
        check(
            Error::HandlesOfAnotherKind { found: posix, wanted: fabric },
            "handles of kind POSIX_FILE_DESCRIPTOR where those of kind FABRIC are due",
        );
        check(
            Error::WrongHandleKind { ours: posix, theirs: fabric },
            "the descriptor has handles of kind FABRIC, and the resource is made for POSIX_FILE_DESCRIPTOR \
             (Options::handle_kind)",
        );
        let uuid = CUuuid::default();
        check(
            Error::WrongLocation { ours: Location::HostNuma { node: 1 }, theirs: Location::Device { uuid } },
            &format!(
                "the memory is on device {uuid}, and the resource's is on NUMA node 1 of the host: import it by a \
                 resource of device {uuid}"
            ),
        );
        check(
            Error::ChunkSize { chunk: 1, bytes: 4096, granularity: 65536 },
            "chunk 1 of 4096 bytes is no multiple of the granularity, 65536",
        );
        let source = Box::new(failed(Call::cuMemMap, CUresult::INVALID_VALUE));
        check(
            Error::Chunk { chunk: 2, bytes: 4096, source },
            "failed to take over chunk 2, which was told to have 4096 bytes",
        );
        let kind = |path| FileKind::of(std::fs::File::open(path).unwrap().as_fd()).unwrap();
        check(
            Error::WrongFile { chunk: 1, found: kind("/"), expected: Some(kind("/dev/null")) },
            "handle 1 is a directory, and the handles of this driver are character device 1:3",
        );
        check(
            Error::WrongFile { chunk: 1, found: kind("/"), expected: None },
            "handle 1 is a directory, and no driver's handles are that",
        );
        let other = |found, expected| Error::OtherMemory { chunk: 0, found, expected };
        let (device, node) = (CUmemLocation::device(1), CUmemLocation::host_numa(2));
        check(other(device, node), "chunk 0 is memory of device 1, not of NUMA node 2 of the host");
        check(other(CUmemLocation::default(), device), "chunk 0 is memory of location 0 of type 0, not of device 1");
        check(
            Error::HiddenDevice { uuid: None },
            "the memory is on a device, which is not visible to this process: make it visible (CUDA_VISIBLE_DEVICES), \
             or import with Importer::allow_hidden_device",
        );
        assert!(Error::HiddenDevice { uuid: Some(uuid) }.to_string().contains(&format!("is on device {uuid}, which")));
        check(
            Error::PathTooLong { length: 120, limit: 107 },
            "a path of 120 bytes is no name for a socket: 107 are the most",
        );
        check(
            Error::AddressInUse { path: "/run/weights".into() },
            "/run/weights is in use, by a listener or by a file that is not removed",
        );
        check(Error::PeerDenied { pid: 7, uid: 8, gid: 9 }, "process 7 of user 8 and group 9 is not allowed");
        check(
            Error::NotInherited { reason: "CUVMM_SOCKET is not set" },
            "no socket was inherited: CUVMM_SOCKET is not set",
        );
        let errno = || io::Error::from_raw_os_error(24);
        check(Error::os("send handles")(errno()), "failed to send handles");
        let program = Error::os_at("start a program", Path::new("/bin/none"))(errno());
        check(program, "failed to start a program (/bin/none)");
        // What lower layers say is theirs to word.
        let driver = cuvmm_driver::Error::NoSuchDevice { ordinal: 7, count: 1 };
        check(Error::Driver(driver.clone()), &driver.to_string());
        check(Error::Handles(cuvmm_handles::Error::Imported), &cuvmm_handles::Error::Imported.to_string());
        let chunks = || cuvmm_resource::Error::Chunks { size: 1, sum: 0 };
        check(Error::Resource(chunks()), &chunks().to_string());
    }

    #[test]
    fn the_cause_is_kept() {
        let error = Error::os("send handles")(io::Error::from_raw_os_error(24));
        assert_eq!(error.to_string(), "failed to send handles");
        let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
        assert_eq!(cause.and_then(io::Error::raw_os_error), Some(24));
        assert_eq!(error.refusal(), Some((Refusal::OPEN_FILES, 0)));
        let error = Error::from(WireError::Version { found: 7 });
        assert_eq!(
            error.source().map(ToString::to_string).as_deref(),
            Some("version 7 is not spoken here, version 1 is")
        );
        assert_eq!(error.refusal(), Some((Refusal::VERSION, 0)));
    }
}
