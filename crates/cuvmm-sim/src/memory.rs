//! Physical memory: anonymous, or a file of its own that other processes can import.
//!
//! An exportable allocation is a memory file of a constant, huge size, so that the size of what is in it can't be
//! learned from the descriptor; a page at its end says what it is. It is sealed against changes of its size, so no
//! holder can make another one fault. An exported descriptor is a second opening of that file with a shared lock
//! on it: as long as one is open anywhere, or mapped by an importer, the maker can't lock the file for itself, and
//! knows that the memory is still held.
//!
//! Bytes are stored with a mask, so that untouched pages read as the poison without ever being written.
//!
//! # Safety
//! A [`View`] owns its mapping. Its bytes are shared with other threads and processes, whose order is the callers'
//! matter as it is on a device: they are copied through raw pointers, and no reference to them is ever made.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::{CUmemAllocationProp, CUmemLocation, CUmemLocationType, CUuuid};
use nix::libc;
use nix::sys::resource::Resource;
use rustix::fs::{FileType, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::session::Answer;
use crate::space::Taken;

/// The size of every memory file, whatever is in it.
pub(crate) const FILE_BYTES: u64 = 1 << 46;
const HEADER_BYTES: usize = 64;
const HEADER_AT: u64 = FILE_BYTES - 4096;
/// The most that an allocation can have.
pub(crate) const MOST_BYTES: usize = (FILE_BYTES - (1 << 30)) as usize;
const MAGIC: [u8; 16] = *b"cuvmm-sim memory";
const VERSION: u32 = 1;
/// The file system that memory files are of.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
/// How much is copied at once where bytes have to be masked.
const BOUNCE: usize = 64 << 10;

/// The engine's own mapping of an allocation's bytes.
#[derive(Debug)]
pub(crate) struct View {
    pointer: *mut u8,
    bytes: usize,
    _taken: Taken,
}

// SAFETY: the mapping belongs to the process; the pointer is only ever copied through.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<View>();
};

impl View {
    fn anonymous(bytes: usize) -> rustix::io::Result<Self> {
        let taken = Taken::of(bytes as u64).map_err(|_| Errno::NOMEM)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping wherever the kernel likes.
        let pointer = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access(), flags) }?;
        Ok(Self { pointer: pointer.cast(), bytes, _taken: taken })
    }

    fn of_file(file: BorrowedFd<'_>, bytes: usize) -> rustix::io::Result<Self> {
        let taken = Taken::of(bytes as u64).map_err(|_| Errno::NOMEM)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping wherever the kernel likes; the file is sealed, so all of it stays there.
        let pointer = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access(), flags, file, 0) }?;
        Ok(Self { pointer: pointer.cast(), bytes, _taken: taken })
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody else has the pointer any more.
        let _ = unsafe { rustix::mm::munmap(self.pointer.cast(), self.bytes) };
    }
}

fn access() -> ProtFlags {
    ProtFlags::READ | ProtFlags::WRITE
}

/// Which file a memory file is, in any process of the host.
pub(crate) type FileIdentity = (u64, u64);

/// Physical memory. Its bytes live as long as this, or as any process holds its file.
#[derive(Debug)]
pub(crate) struct Memory {
    view: View,
    mask: u8,
    file: Option<Arc<MemoryFile>>,
    identity: Option<FileIdentity>,
    /// What it is, with the location as this process sees it.
    pub(crate) properties: CUmemAllocationProp,
}

/// What an imported descriptor turned out to be.
pub(crate) struct Found {
    pub(crate) identity: FileIdentity,
    file: OwnedFd,
    header: Header,
}

impl Memory {
    pub(crate) fn new(bytes: usize, properties: CUmemAllocationProp, mask: u8) -> rustix::io::Result<Self> {
        let view = View::anonymous(bytes)?;
        Ok(Self { view, mask, file: None, identity: None, properties })
    }

    pub(crate) fn exportable(
        bytes: usize,
        properties: CUmemAllocationProp,
        mask: u8,
        uuid: CUuuid,
    ) -> rustix::io::Result<Self> {
        let compression = properties.alloc_flags.compression_type;
        let header = Header { bytes, mask, compression, uuid, location: properties.location };
        let file = MemoryFile::new(&header)?;
        let view = View::of_file(file.0.as_fd(), bytes)?;
        let identity = Some(identity_of(file.0.as_fd())?);
        Ok(Self { view, mask, file: Some(Arc::new(file)), identity, properties })
    }

    /// Maps what was found. The mapping holds the exported opening of the file, so the descriptor may be closed.
    pub(crate) fn imported(found: &Found, properties: CUmemAllocationProp) -> rustix::io::Result<Self> {
        let view = View::of_file(found.file.as_fd(), found.header.bytes)?;
        Ok(Self { view, mask: found.header.mask, file: None, identity: Some(found.identity), properties })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.view.bytes
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    /// A new descriptor for other processes; none for memory that was not made for it.
    pub(crate) fn export(&self) -> Option<rustix::io::Result<OwnedFd>> {
        self.file.as_ref().map(|file| file.open_again())
    }

    /// The number of its descriptor in this process, if it was made for others.
    pub(crate) fn file_number(&self) -> Option<RawFd> {
        self.file.as_ref().map(|file| file.0.as_raw_fd())
    }

    /// The file, to learn later whether anybody holds the memory.
    pub(crate) fn file(&self) -> Option<Arc<MemoryFile>> {
        self.file.clone()
    }

    /// Checks that `length` bytes at `offset` are inside.
    fn inside(&self, offset: usize, length: usize) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.view.bytes)
    }

    /// Copies bytes out, as far as they are inside.
    ///
    /// # Safety
    /// `length` bytes at `destination` are valid for writes.
    pub(crate) unsafe fn read(&self, offset: usize, destination: *mut u8, length: usize) {
        if !self.inside(offset, length) {
            return;
        }
        // SAFETY: the source is inside the view, and the caller vouches for the destination. They may overlap only if the
        // host was granted the memory, which has no mask.
        unsafe { copy_masked(self.view.pointer.wrapping_add(offset), destination, length, self.mask) };
    }

    /// A copy of bytes, as far as they are inside.
    pub(crate) fn bytes_at(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        // SAFETY: the buffer is ours and has that many bytes.
        unsafe { self.read(offset, bytes.as_mut_ptr(), length) };
        bytes
    }

    /// Copies bytes in, as far as they are inside.
    ///
    /// # Safety
    /// `length` bytes at `source` are valid for reads.
    pub(crate) unsafe fn write(&self, offset: usize, source: *const u8, length: usize) {
        if !self.inside(offset, length) {
            return;
        }
        // SAFETY: the destination is inside the view, and the caller vouches for the source. As to overlap, as above.
        unsafe { copy_masked(source, self.view.pointer.wrapping_add(offset), length, self.mask) };
    }

    /// Copies bytes of `other` in, as far as they are inside both.
    pub(crate) fn copy_from(&self, offset: usize, other: &Self, from: usize, length: usize) {
        if !self.inside(offset, length) || !other.inside(from, length) {
            return;
        }
        let (source, destination) = (other.view.pointer.wrapping_add(from), self.view.pointer.wrapping_add(offset));
        // SAFETY: both are inside their views. They overlap only in one and the same, which has one mask.
        unsafe { copy_masked(source, destination, length, self.mask ^ other.mask) };
    }

    /// Sets bytes to the repeated `pattern`, as far as they are inside.
    pub(crate) fn fill(&self, offset: usize, pattern: &[u8], length: usize) {
        if pattern.is_empty() {
            return;
        }
        let whole = BOUNCE / pattern.len() * pattern.len();
        let bounce = pattern.repeat(whole.min(length).div_ceil(pattern.len()));
        let mut done = 0;
        while done < length {
            let part = (length - done).min(bounce.len());
            // SAFETY: the buffer has that many bytes.
            unsafe { self.write(offset + done, bounce.as_ptr(), part) };
            done += part;
        }
    }
}

/// Copies bytes, and changes each by `mask` on the way.
///
/// # Safety
/// `length` bytes are valid for reads at `source` and for writes at `destination`. They overlap only without a mask.
unsafe fn copy_masked(source: *const u8, destination: *mut u8, length: usize, mask: u8) {
    if mask == 0 {
        // SAFETY: the caller vouches for both, and they may overlap.
        unsafe { std::ptr::copy(source, destination, length) };
        return;
    }
    let mut bounce = vec![0_u8; length.min(BOUNCE)];
    let mut done = 0;
    while done < length {
        let part = (length - done).min(BOUNCE);
        // SAFETY: the part is inside the source, and inside the buffer.
        unsafe { std::ptr::copy_nonoverlapping(source.wrapping_add(done), bounce.as_mut_ptr(), part) };
        change(&mut bounce[..part], mask);
        // SAFETY: the part is inside the buffer, and inside the destination.
        unsafe { std::ptr::copy_nonoverlapping(bounce.as_ptr(), destination.wrapping_add(done), part) };
        done += part;
    }
}

/// Turns stored bytes into seen ones, and back.
fn change(bytes: &mut [u8], mask: u8) {
    let word = u64::from_ne_bytes([mask; 8]);
    let (words, rest) = bytes.as_chunks_mut::<8>();
    for chunk in words {
        *chunk = (u64::from_ne_bytes(*chunk) ^ word).to_ne_bytes();
    }
    for byte in rest {
        *byte ^= mask;
    }
}

/// The file of an exportable allocation.
#[derive(Debug)]
pub(crate) struct MemoryFile(OwnedFd);

impl MemoryFile {
    fn new(header: &Header) -> rustix::io::Result<Self> {
        // A file that is made larger than the process may have files ends the process.
        if nix::sys::resource::getrlimit(Resource::RLIMIT_FSIZE).is_ok_and(|(limit, _)| limit < FILE_BYTES) {
            return Err(Errno::FBIG);
        }
        let file = rustix::fs::memfd_create("cuvmm-sim", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, FILE_BYTES)?;
        rustix::io::pwrite(&file, &header.to_bytes(), HEADER_AT)?;
        rustix::fs::fcntl_add_seals(&file, seals())?;
        Ok(Self(file))
    }

    /// An empty file that stands for memory which its openings hold.
    pub(crate) fn empty() -> rustix::io::Result<Self> {
        let file = rustix::fs::memfd_create("cuvmm-sim dma-buf", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::fcntl_add_seals(&file, seals())?;
        Ok(Self(file))
    }

    /// A second opening of the file, which says by a shared lock that it is there. Never number 0, which importers
    /// would read as a null pointer.
    pub(crate) fn open_again(&self) -> rustix::io::Result<OwnedFd> {
        let opened = match open_locked(&format!("/proc/self/fd/{}", self.0.as_raw_fd())) {
            Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error),
            Ok(opened) => opened,
            // Without /proc the memory is shared as well; only its accounting then takes it for released.
            Err(_) => rustix::io::fcntl_dupfd_cloexec(&self.0, 1)?,
        };
        if opened.as_raw_fd() == 0 { rustix::io::fcntl_dupfd_cloexec(&opened, 1) } else { Ok(opened) }
    }

    /// Whether an exported descriptor, or an importer's mapping, holds the memory anywhere on this host.
    pub(crate) fn is_held(&self) -> bool {
        match rustix::fs::flock(&self.0, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
                false
            }
            Err(_) => true,
        }
    }
}

/// Opens a memory file, with the lock that says so.
pub(crate) fn open_locked(path: &str) -> rustix::io::Result<OwnedFd> {
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::flock(&opened, FlockOperation::NonBlockingLockShared)?;
    Ok(opened)
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// Whether a file is open in this process under a number.
pub(crate) fn is_open(number: RawFd, identity: FileIdentity) -> bool {
    let found = rustix::fs::stat(format!("/proc/self/fd/{number}"));
    found.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == identity)
}

pub(crate) fn identity_of(file: BorrowedFd<'_>) -> rustix::io::Result<FileIdentity> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Which file is open as `number`, if it can be a memory file: asked without a descriptor more.
pub(crate) fn identity_by_number(number: i32) -> Answer<FileIdentity> {
    if !sealed(number).unwrap_or(false) {
        return Err(CUresult::UNKNOWN);
    }
    let mut found = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: it takes a number, fails where nothing is open, and writes to a local.
    if unsafe { libc::fstat(number, found.as_mut_ptr()) } != 0 {
        return Err(CUresult::UNKNOWN);
    }
    // SAFETY: it is plain data, zero before it was written.
    let found = unsafe { found.assume_init() };
    Ok((found.st_dev, found.st_ino))
}

/// Looks whether `number` is a descriptor that a simulated driver exported. It is neither consumed nor closed.
pub(crate) fn find(number: i32) -> Answer<Found> {
    let found = (|| {
        if !sealed(number)? {
            return Err(Errno::INVAL);
        }
        let file = duplicate(number)?;
        // Again, as the number may be another file's since.
        if !rustix::fs::fcntl_get_seals(&file)?.contains(seals()) {
            return Err(Errno::INVAL);
        }
        let stat = rustix::fs::fstat(&file)?;
        let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && u64::try_from(stat.st_size) == Ok(FILE_BYTES)
            // Of huge pages there may be none left, which ends who touches one.
            && rustix::fs::fstatfs(&file)?.f_type == TMPFS;
        if !is_ours {
            return Err(Errno::INVAL);
        }
        let mut bytes = [0; HEADER_BYTES];
        let read = rustix::io::pread(&file, &mut bytes, HEADER_AT)?;
        let header = if read == HEADER_BYTES { Header::from_bytes(&bytes) } else { None };
        let header = header.ok_or(Errno::INVAL)?;
        Ok(Found { identity: (stat.st_dev, stat.st_ino), file, header })
    })();
    found.map_err(|error: Errno| match error {
        Errno::MFILE | Errno::NFILE => CUresult::OPERATING_SYSTEM,
        _ => CUresult::UNKNOWN,
    })
}

/// Whether `number` is a memory file's that can't change its size. No other file has seals, so none of a peer's,
/// which could make the caller wait, is asked anything else.
fn sealed(number: i32) -> rustix::io::Result<bool> {
    // SAFETY: it takes a number, and fails where nothing is open; nothing is written.
    let found = unsafe { libc::fcntl(number, libc::F_GET_SEALS) };
    let found = u32::try_from(found).map_err(|_| last_error())?;
    Ok(SealFlags::from_bits_retain(found).contains(seals()))
}

/// A descriptor of ours for the file that is open as `number`.
fn duplicate(number: i32) -> rustix::io::Result<OwnedFd> {
    // SAFETY: it takes a number, and fails where nothing is open; the third argument is a C int.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(match last_error() {
            // What it answers where no number is left that it may give.
            Errno::INVAL => Errno::MFILE,
            error => error,
        });
    }
    // SAFETY: it was opened just now, and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::BADF)
}

impl Found {
    pub(crate) fn uuid(&self) -> CUuuid {
        self.header.uuid
    }

    pub(crate) fn location(&self) -> CUmemLocation {
        self.header.location
    }

    /// How it is compressed.
    pub(crate) fn compression(&self) -> u8 {
        self.header.compression
    }
}

/// What the page at the end of a memory file says. Whoever holds the file can change it, so it is checked.
struct Header {
    bytes: usize,
    mask: u8,
    compression: u8,
    uuid: CUuuid,
    location: CUmemLocation,
}

impl Header {
    fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..20].copy_from_slice(&VERSION.to_le_bytes());
        bytes[20] = self.mask;
        bytes[21] = self.compression;
        bytes[24..32].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        bytes[32..48].copy_from_slice(&self.uuid.bytes);
        bytes[48..52].copy_from_slice(&self.location.location_type.0.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.location.id.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let size = u64::from_le_bytes(*bytes.get(24..)?.first_chunk()?);
        let size = usize::try_from(size).ok()?;
        if bytes[..16] != MAGIC || word(16)? != VERSION || size == 0 || size > MOST_BYTES || !size.is_multiple_of(4096)
        {
            return None;
        }
        let location = CUmemLocation { location_type: CUmemLocationType(word(48)?), id: word(52)?.cast_signed() };
        if !matches!(location.location_type, CUmemLocationType::DEVICE | CUmemLocationType::HOST_NUMA) {
            return None;
        }
        let uuid = CUuuid { bytes: *bytes.get(32..)?.first_chunk()? };
        Some(Self { bytes: size, mask: bytes[20], compression: bytes[21], uuid, location })
    }
}
