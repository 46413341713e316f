//! Fabric handles: 64 bytes that name a memory file of a process of this host, and hold nothing.
//!
//! They say which process has the file open, under which number, and which file it is. An importer opens it there,
//! so it works as long as the maker has the memory, in any process that can see the maker's descriptors in /proc: of
//! the same user, and of the same process namespace.

use std::os::fd::{AsRawFd, OwnedFd};

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::CUmemFabricHandle;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::memory::{self, FileIdentity, Found};
use crate::session::Answer;

const MAGIC: [u8; 16] = *b"cuvmm-sim fabric";

/// The handle of a file that this process has open.
pub(crate) fn handle_of(number: i32, identity: FileIdentity) -> CUmemFabricHandle {
    let mut data = [0; 64];
    data[..16].copy_from_slice(&MAGIC);
    data[16..20].copy_from_slice(&std::process::id().to_le_bytes());
    data[20..24].copy_from_slice(&number.to_le_bytes());
    data[24..32].copy_from_slice(&identity.0.to_le_bytes());
    data[32..40].copy_from_slice(&identity.1.to_le_bytes());
    CUmemFabricHandle { data }
}

/// What a handle names; 1 if that is nothing any more, or never was.
pub(crate) fn find(handle: &CUmemFabricHandle) -> Answer<Found> {
    let file = open(handle).map_err(|error| match error {
        Errno::MFILE | Errno::NFILE => CUresult::OPERATING_SYSTEM,
        _ => CUresult::INVALID_VALUE,
    })?;
    memory::find(file.as_raw_fd()).map_err(|code| match code {
        CUresult::UNKNOWN => CUresult::INVALID_VALUE,
        code => code,
    })
}

/// Opens the named file anew, with the lock of an exported descriptor.
fn open(handle: &CUmemFabricHandle) -> rustix::io::Result<OwnedFd> {
    let data = &handle.data;
    let word =
        |at: usize| data.get(at..).and_then(|rest| rest.first_chunk::<4>()).map(|word| u32::from_le_bytes(*word));
    let long =
        |at: usize| data.get(at..).and_then(|rest| rest.first_chunk::<8>()).map(|long| u64::from_le_bytes(*long));
    let (Some(process), Some(number), Some(device), Some(inode)) = (word(16), word(20), long(24), long(32)) else {
        return Err(Errno::INVAL);
    };
    if data[..16] != MAGIC {
        return Err(Errno::INVAL);
    }
    // A handle is anybody's bytes: what it names is only looked at until it is known to be a memory file.
    let path = format!("/proc/{process}/fd/{number}");
    let named = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&named)?;
    let is_it = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && (stat.st_dev, stat.st_ino) == (device, inode)
        && u64::try_from(stat.st_size) == Ok(memory::FILE_BYTES);
    if is_it { memory::open_locked(&format!("/proc/self/fd/{}", named.as_raw_fd())) } else { Err(Errno::INVAL) }
}
