//! [`FileKind`]: what kind of file a driver's exported handles are, so that nothing else reaches the driver.

use std::fmt;
use std::os::fd::BorrowedFd;

use cuvmm_driver::sys::CUmemAllocationHandleType;
use cuvmm_driver::{Device, HandleFile, Probe};
use rustix::fs::{AtFlags, FileType, SealFlags, StatxFlags, fcntl_get_seals, fstat, major, minor, statx};
use rustix::io::Errno;

use crate::error::Error;

/// 16 MiB, in the blocks of 512 bytes that files are counted in.
const SMALL_BLOCKS: i64 = 16 << 11;

/// The type of a file, and of a device node its number: `/dev/nvidiactl`, say, whatever its path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FileKind {
    file_type: FileType,
    /// Major and minor number; zeros unless it is a device node.
    device: (u32, u32),
}

impl FileKind {
    /// The kind of an open file.
    pub(crate) fn of(fd: BorrowedFd<'_>) -> Result<Self, Error> {
        // A peer may send a file of a file system that it serves itself, and would be asked by a plain fstat.
        let known = statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        let (mode, device) = match known {
            Ok(known) => (known.stx_mode.into(), (known.stx_rdev_major, known.stx_rdev_minor)),
            // Older kernels don't have the call, and some sandboxes forbid it.
            Err(Errno::NOSYS | Errno::PERM) => {
                let known = fstat(fd).map_err(Error::os("ask what a handle is"))?;
                (known.st_mode, (major(known.st_rdev), minor(known.st_rdev)))
            }
            Err(error) => return Err(Error::os("ask what a handle is")(error)),
        };
        Ok(Self::new(mode, device))
    }

    fn new(mode: u32, device: (u32, u32)) -> Self {
        let file_type = FileType::from_raw_mode(mode);
        let is_node = matches!(file_type, FileType::CharacterDevice | FileType::BlockDevice);
        Self { file_type, device: if is_node { device } else { (0, 0) } }
    }

    /// The kind of `device`'s own handles, as its probe saw them: asked for before the first import, and nothing is
    /// made after that, whatever a peer sends. Where there was no memory or no open file left for the probe, the kind of
    /// another device's: a driver has one file for the handles of all. None where no probe of this process had any.
    fn of_handles(device: &Device) -> Result<Option<Self>, Error> {
        if let Some(file) = device.posix_fd_file() {
            return Ok(Some(file.into()));
        }
        let kinds = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let found = device.probed(kinds).filter(lacked_something).unwrap_or_else(|| device.probe(kinds));
        match found {
            Probe::Refused { error, .. } if !error.is_shortage() => Err(error.into()),
            _ => {
                let of_any = || device.driver().devices().iter().find_map(Device::posix_fd_file);
                Ok(device.posix_fd_file().or_else(of_any).map(Self::from))
            }
        }
    }

    /// Whether an open file of this kind may be a handle of a driver whose own handles were never seen: a character
    /// device, or a regular file that nobody can shorten (`F_SEAL_SHRINK`). No socket, pipe or directory is one, and
    /// no file on a disk or in a user's own file system.
    fn may_be_handle(self, file: BorrowedFd<'_>) -> bool {
        match self.file_type {
            FileType::CharacterDevice => true,
            FileType::RegularFile => fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)),
            _ => false,
        }
    }

    /// Whether closing it alone keeps nobody waiting: device nodes, and files that live in memory, which alone have seals,
    /// and have not so much of it that freeing it takes long.
    pub(crate) fn closes_at_once(file: BorrowedFd<'_>) -> bool {
        if fcntl_get_seals(file).is_ok() {
            return fstat(file).is_ok_and(|known| known.st_blocks <= SMALL_BLOCKS);
        }
        Self::of(file).is_ok_and(|kind| kind.file_type == FileType::CharacterDevice)
    }

    /// Refuses what can't be a handle of `device`'s driver. No handles need no call.
    ///
    /// # Errors
    /// [`Error::WrongFile`]; what the driver answers when its own handles are looked at for the first time.
    pub(crate) fn check<'a>(
        device: &Device,
        handles: impl ExactSizeIterator<Item = (usize, BorrowedFd<'a>)>,
    ) -> Result<(), Error> {
        if handles.len() == 0 {
            return Ok(());
        }
        let expected = Self::of_handles(device)?;
        for (chunk, handle) in handles {
            let found = Self::of(handle)?;
            if !expected.map_or_else(|| found.may_be_handle(handle), |expected| found == expected) {
                return Err(Error::WrongFile { chunk, found, expected });
            }
        }
        Ok(())
    }
}

/// Whether a probe ended for want of something that may be there later.
fn lacked_something(probe: &Probe) -> bool {
    matches!(probe, Probe::Refused { error, .. } if error.is_shortage())
}

impl From<HandleFile> for FileKind {
    fn from(file: HandleFile) -> Self {
        Self::new(file.file_type, (major(file.device), minor(file.device)))
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.file_type {
            FileType::RegularFile => "a regular file",
            FileType::Directory => "a directory",
            FileType::Symlink => "a symbolic link",
            FileType::Fifo => "a pipe",
            FileType::Socket => "a socket",
            FileType::CharacterDevice => return write!(f, "character device {}:{}", self.device.0, self.device.1),
            FileType::BlockDevice => return write!(f, "block device {}:{}", self.device.0, self.device.1),
            FileType::Unknown => "a file of no known type",
        };
        f.write_str(name)
    }
}

impl fmt::Debug for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileKind({self})")
    }
}
