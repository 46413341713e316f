//! What a device can do: told by attribute where that is reliable, probed where it is not.
//!
//! # Safety
//! Every handle used is one that the probe itself just made, and is given back once.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::stranded::StrandedKind;
use crate::sys::*;

/// What [`Device::probe`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Memory of that kind was made, exported, imported and given back.
    Available,
    /// It can't be had.
    Refused {
        /// The step that failed; in a forked child, where none is made, the one that makes memory.
        call: Call,
        /// What it failed with.
        error: Error,
    },
}

impl Probe {
    /// Whether such memory can be had.
    pub fn is_available(&self) -> bool {
        *self == Self::Available
    }
}

/// What an open file is, as the system tells it without looking inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HandleFile {
    /// The bits of `st_mode` that tell the type of a file (`S_IFMT`): `0o020000` for a character device.
    pub file_type: u32,
    /// `st_rdev`: the number of the device that it is a node of; 0 where it is none.
    pub device: u64,
}

/// `S_IFMT`.
const FILE_TYPE: u32 = 0o170_000;

/// What was last found out of one kind, once it was asked for.
type Found = Arc<Mutex<Option<Probe>>>;

/// The probes of one device. Each kind has its own lock, so that nobody waits for a probe of another kind.
#[derive(Default)]
pub(crate) struct Probes {
    kinds: Mutex<Vec<(CUmemAllocationHandleType, Found)>>,
}

impl Probes {
    fn of(&self, kind: CUmemAllocationHandleType) -> Found {
        let mut kinds = lock(&self.kinds);
        if let Some((_, known)) = kinds.iter().find(|(known, _)| *known == kind) {
            return Arc::clone(known);
        }
        let probe = Arc::default();
        kinds.push((kind, Arc::clone(&probe)));
        probe
    }
}

/// What a lock guards here is whole at every moment, also where a thread panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Whether the virtual memory calls work on it.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn supports_virtual_memory(&self) -> Result<bool, Error> {
        self.has(CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    }

    /// Whether GPUDirect RDMA reaches memory that was made with the flag for it.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn supports_rdma(&self) -> Result<bool, Error> {
        self.has(CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
    }

    /// Whether compressible memory can be made.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn supports_compression(&self) -> Result<bool, Error> {
        self.has(CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED)
    }

    /// Whether ranges of its memory can be had as dma-bufs.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn supports_dma_buf(&self) -> Result<bool, Error> {
        self.has(CUdevice_attribute::DMA_BUF_SUPPORTED)
    }

    /// Whether memory that can be exported as every kind in `kinds` can be had on this device, found out by making,
    /// exporting, importing and releasing the least there can be of it.
    ///
    /// Attributes promise handle kinds that the machine then refuses (fabric handles without an IMEX channel, file
    /// descriptors on WSL), so this doesn't read them. The first call for a kind probes, and later ones are told
    /// what it found; a kind that is never asked for is never probed. After a failure that says nothing of the kind
    /// (no memory left, no descriptor left, a driver that answers nothing at all), the next call probes again. In a forked
    /// child every kind is refused with [`Error::Forked`].
    pub fn probe(&self, kinds: CUmemAllocationHandleType) -> Probe {
        let driver = self.driver();
        // In a forked child a lock may be held by a thread that is not there.
        if let Err(error) = driver.require_own_process() {
            return told(Err(error));
        }
        let Some(facts) = driver.facts(self.ordinal()) else { return told(attempt(self, kinds)) };
        let known = facts.probes.of(kinds);
        let mut known = lock(&known);
        if let Some(probe) = known.as_ref().filter(|probe| is_verdict(probe)) {
            return probe.clone();
        }
        known.insert(told(attempt(self, kinds))).clone()
    }

    /// What the last [`probe`](Self::probe) of these kinds found; none before the first, nor in a forked child. Makes no
    /// call.
    pub fn probed(&self, kinds: CUmemAllocationHandleType) -> Option<Probe> {
        let driver = self.driver();
        let facts = driver.facts(self.ordinal()).filter(|_| !driver.is_forked())?;
        let known = facts.probes.of(kinds);
        let known = lock(&known);
        known.clone()
    }

    /// What kind of file this device's POSIX file descriptors are, as a [`probe`](Self::probe) that exported one saw
    /// it; none before. Makes no call.
    ///
    /// It tells a descriptor that may be a handle from one that is something else, before the driver is given it.
    pub fn posix_fd_file(&self) -> Option<HandleFile> {
        self.driver().facts(self.ordinal())?.posix_fd_file.get().copied()
    }

    /// Keeps what an exported descriptor is, where the system says it.
    fn learn_posix_fd_file(&self, fd: OwnedFd) {
        let (Some(facts), Ok(known)) = (self.driver().facts(self.ordinal()), File::from(fd).metadata()) else { return };
        let file = HandleFile { file_type: known.mode() & FILE_TYPE, device: known.rdev() };
        // The handles of one device are all alike.
        facts.posix_fd_file.get_or_init(|| file);
    }

    fn has(&self, attribute: CUdevice_attribute) -> Result<bool, Error> {
        Ok(self.attribute(attribute)?.is_some_and(|value| value != 0))
    }
}

/// What a probe found, of how it went.
fn told(result: Result<(), Error>) -> Probe {
    match result {
        Ok(()) => Probe::Available,
        Err(error) => Probe::Refused { call: error.call().unwrap_or(Call::cuMemCreate), error },
    }
}

/// Whether it is about the kind. The granularity is told for any kind, so where it is not the driver answers
/// nothing here; and what is short now may not be later.
fn is_verdict(probe: &Probe) -> bool {
    match probe {
        Probe::Available => true,
        Probe::Refused { call, error } => *call != Call::cuMemGetAllocationGranularity && !error.is_shortage(),
    }
}

/// Makes memory of these kinds, and exports and imports it as each of them. All is given back whatever fails.
fn attempt(device: &Device, kinds: CUmemAllocationHandleType) -> Result<(), Error> {
    let driver = device.driver();
    let known = CUmemAllocationHandleType(
        CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR.0 | CUmemAllocationHandleType::FABRIC.0,
    );
    if !known.contains(kinds) {
        let reason = "how handles of this kind are written is not known";
        return Err(Error::InvalidArgument { call: Call::cuMemExportToShareableHandle, reason });
    }
    let properties = CUmemAllocationProp::pinned(device.location(), kinds);
    let size = driver.mem_get_allocation_granularity(&properties, CUmemAllocationGranularity_flags::MINIMUM)?;
    let made = Reference { driver, handle: driver.mem_create(size, &properties)? };
    if kinds.contains(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR) {
        // SAFETY: the handle is a reference of this driver that is given back further down.
        let fd = unsafe { driver.mem_export_posix_fd(made.handle) }?;
        let imported = driver.mem_import_posix_fd(fd.as_fd());
        device.learn_posix_fd_file(fd);
        Reference { driver, handle: imported? }.release()?;
    }
    if kinds.contains(CUmemAllocationHandleType::FABRIC) {
        // SAFETY: as above.
        let shared = unsafe { driver.mem_export_fabric(made.handle) }?;
        // SAFETY: the bytes are those that the export wrote.
        let handle = unsafe { driver.mem_import_fabric(&shared) }?;
        Reference { driver, handle }.release()?;
    }
    made.release()
}

/// A reference to an allocation that only the probe has.
struct Reference<'a> {
    driver: &'a Driver,
    handle: CUmemGenericAllocationHandle,
}

impl Reference<'_> {
    fn release(self) -> Result<(), Error> {
        let this = std::mem::ManuallyDrop::new(self);
        this.give_back()
    }

    fn give_back(&self) -> Result<(), Error> {
        // SAFETY: the reference is this value's own, and both callers give the value up.
        let result = unsafe { self.driver.mem_release(self.handle) };
        result.inspect_err(|error| {
            self.driver.strand(StrandedKind::Allocation, error, "memory of a probe was not released")
        })
    }
}

impl Drop for Reference<'_> {
    fn drop(&mut self) {
        // A failure was counted and reported.
        let _ = self.give_back();
    }
}
