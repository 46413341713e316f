//! [`FileKind`]: what kind of file a driver's exported handles are, so that nothing else reaches the driver.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use cuvmm_driver::Device;
use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm_handles::Allocation;
use cuvmm_resource::VirtualMemoryResource;
use rustix::fs::{AtFlags, FileType, StatxFlags, fstat, major, minor, statx};
use rustix::io::Errno;

use crate::error::Error;

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
        let file_type = FileType::from_raw_mode(mode);
        let is_node = matches!(file_type, FileType::CharacterDevice | FileType::BlockDevice);
        Ok(Self { file_type, device: if is_node { device } else { (0, 0) } })
    }

    /// The kind of `device`'s own handles. The first time, one is made and looked at.
    fn of_handles(resource: &VirtualMemoryResource) -> Result<Self, Error> {
        let key = Key::of(resource.device());
        match known(|list| list.iter().find(|(known, _)| *known == key).map(|(_, kind)| *kind)) {
            Some(kind) => Ok(kind),
            None => Self::learn(resource, key),
        }
    }

    fn learn(resource: &VirtualMemoryResource, key: Key) -> Result<Self, Error> {
        let device = resource.device();
        let kinds = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let properties = CUmemAllocationProp::pinned(device.location(), kinds);
        let size = resource.granularity().round_up(1)?;
        let allocation = Allocation::create(device.driver(), size, &properties)?;
        let kind = Self::of(allocation.export_posix_fd()?.as_fd())?;
        allocation.close()?;
        known(|list| {
            list.retain(|(known, _)| *known != key);
            list.truncate(MOST_KNOWN - 1);
            list.insert(0, (key, kind));
        });
        Ok(kind)
    }

    /// Refuses what can't be a handle of this driver's.
    ///
    /// # Errors
    /// [`Error::WrongFile`]; what the driver answers when it is asked for a handle of its own.
    pub(crate) fn check<'a>(
        resource: &VirtualMemoryResource,
        handles: impl IntoIterator<Item = (usize, BorrowedFd<'a>)>,
    ) -> Result<(), Error> {
        let mut expected = Self::of_handles(resource)?;
        let mut is_fresh = false;
        for (chunk, handle) in handles {
            let found = Self::of(handle)?;
            if found != expected && !is_fresh {
                // What is known may be of a driver that lived at this address before.
                expected = Self::learn(resource, Key::of(resource.device()))?;
                is_fresh = true;
            }
            if found != expected {
                return Err(Error::WrongFile { chunk, found, expected });
            }
        }
        Ok(())
    }
}

/// A device by where its driver lives: a clone of the driver kept here would keep it alive for ever.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    driver: usize,
    ordinal: i32,
}

impl Key {
    fn of(device: &Device) -> Self {
        Self { driver: std::ptr::from_ref(device.driver().raw()).addr(), ordinal: device.ordinal() }
    }
}

/// How many devices are remembered: more than a process has, but for tests that make a driver each.
const MOST_KNOWN: usize = 64;

fn known<T>(use_it: impl FnOnce(&mut Vec<(Key, FileKind)>) -> T) -> T {
    static KNOWN: Mutex<Vec<(Key, FileKind)>> = Mutex::new(Vec::new());
    use_it(&mut KNOWN.lock().unwrap_or_else(PoisonError::into_inner))
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
