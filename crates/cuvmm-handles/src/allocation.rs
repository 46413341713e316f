//! [`Allocation`]: one reference to physical memory.
//!
//! # Safety
//! The handle field is a live reference of the driver field until the one release, which takes the value apart.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use cuvmm_driver::sys::{
    CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationPropFlags, CUmemFabricHandle,
    CUmemGenericAllocationHandle,
};
use cuvmm_driver::{CUresult, Driver, RetainedReference, StrandedKind};

use crate::error::Error;
use crate::size::{GranularSize, Granularity};
use crate::sync::Arc;
use crate::usage::{Usage, strand};

/// Physical memory: one reference to it, released when this is dropped. The memory itself goes when its last
/// reference, mapping and exported handle are gone, in whatever process.
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::*;
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let driver = simulator.driver()?;
/// # let location = driver.device(0)?.location();
/// let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
/// let size = Granularity::minimum(&driver, &properties)?.round_up(3 << 20)?;
/// let memory = Allocation::create(&driver, size, &properties)?;
/// assert_eq!(memory.size(), 4 << 20);
/// memory.close()?;
/// assert_eq!(simulator.physical_bytes(0), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it is undone when dropped"]
pub struct Allocation {
    driver: Driver,
    /// Invariant: a live reference that this value alone gives back.
    handle: CUmemGenericAllocationHandle,
    size: GranularSize,
    origin: Origin,
    flags: Option<CUmemAllocationPropFlags>,
    usage: Option<Arc<Usage>>,
    /// Whether somebody may have it, or reach it, whom nobody here can tell of.
    exposed: AtomicBool,
    /// The account of one that was retained. It ends where the driver took the reference back, and nowhere else.
    retained: Option<ManuallyDrop<RetainedReference>>,
    released: bool,
}

/// Where a reference comes from.
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::*;
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let driver = simulator.driver()?;
/// # let location = driver.device(0)?.location();
/// let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
/// let properties = CUmemAllocationProp::pinned(location, kind);
/// let size = Granularity::minimum(&driver, &properties)?.round_up(1)?;
/// let memory = Allocation::create(&driver, size, &properties)?;
/// assert_eq!(memory.origin(), Origin::Created(kind));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// It was made here, for these kinds of handle.
    Created(CUmemAllocationHandleType),
    /// It was imported from a handle that some process exported.
    Imported,
    /// It was retained from a mapping of somebody else's.
    Retained,
}

/// Whether memory of the virtual memory calls is mapped at `address`, whoever mapped it: not so for addresses that are
/// free or merely reserved, nor for ordinary memory. It only asks, by taking a reference to the memory
/// (`cuMemRetainAllocationHandle`) and giving it back. The answer may be out of date by the time that it is read.
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::*;
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let driver = simulator.driver()?;
/// # let location = driver.device(0)?.location();
/// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
/// # let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
/// # let memory = Arc::new(Allocation::create(&driver, size, &properties)?);
/// let range = Arc::new(Reservation::reserve(&driver, size, 0)?);
/// assert!(!is_vmm(&driver, range.address())?);
/// let mapping = Mapping::map(&range, 0, memory, Arc::new([]))?;
/// assert!(is_vmm(&driver, mapping.address())?);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Unsupported`](cuvmm_driver::Error::Unsupported) before CUDA 11.0; what the driver answers, but for a retain that
/// answers 1, which is how it says no.
#[doc(alias = "cuMemRetainAllocationHandle")]
pub fn is_vmm(driver: &Driver, address: CUdeviceptr) -> Result<bool, Error> {
    // SAFETY: the memory is not used, and shared only until the reference goes below: its owner can unmap and release it
    // meanwhile as ever.
    let handle = match unsafe { driver.mem_retain_allocation_handle(address) } {
        Ok(handle) => handle,
        Err(error) if error.code() == Some(CUresult::INVALID_VALUE) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    // SAFETY: it is the reference of just now.
    unsafe { driver.mem_release(handle) }
        .inspect_err(|error| driver.strand(StrandedKind::Allocation, error, "memory was not released"))?;
    Ok(true)
}

impl Allocation {
    /// Makes `size` bytes of memory (`cuMemCreate`). What they hold is undefined.
    ///
    /// # Errors
    /// [`Error::NotGranular`] for zero, [`Forked`](cuvmm_driver::Error::Forked); what the driver answers.
    #[doc(alias = "cuMemCreate")]
    pub fn create(driver: &Driver, size: GranularSize, properties: &CUmemAllocationProp) -> Result<Self, Error> {
        if size.is_zero() {
            return Err(Error::NotGranular { bytes: 0, granularity: size.granularity().bytes() });
        }
        let bytes = size.bytes();
        let failed = |error| Error::of_call(error, |error| Error::Create { bytes, error });
        let handle = driver.mem_create(bytes, properties).map_err(failed)?;
        let origin = Origin::Created(properties.requested_handle_types);
        let mut memory = Self::own(driver, handle, size, origin);
        memory.flags = Some(properties.alloc_flags);
        Ok(memory)
    }

    /// Takes a reference to the memory that `fd` names (`cuMemImportFromShareableHandle`). The descriptor may be
    /// closed afterwards. `size` is what the exporter says: only mapping it proves it.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
    /// # let properties = CUmemAllocationProp::pinned(location, kind);
    /// # let size = Granularity::minimum(&driver, &properties)?.round_up(1)?;
    /// # let memory = Allocation::create(&driver, size, &properties)?;
    /// use std::os::fd::AsFd;
    ///
    /// let descriptor = memory.export_posix_fd()?; // as a rule to another process, over a socket
    /// drop(memory);
    /// let imported = Allocation::import_posix_fd(&driver, descriptor.as_fd(), size)?;
    /// assert_eq!(imported.origin(), Origin::Imported);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotGranular`] for zero; what the driver answers.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_posix_fd(driver: &Driver, fd: BorrowedFd<'_>, size: GranularSize) -> Result<Self, Error> {
        if size.is_zero() {
            return Err(Error::NotGranular { bytes: 0, granularity: size.granularity().bytes() });
        }
        let handle = driver.mem_import_posix_fd(fd)?;
        Ok(Self::own(driver, handle, size, Origin::Imported))
    }

    /// Takes a reference to the memory that a fabric handle names (`cuMemImportFromShareableHandle`), of this host or
    /// another. It must exist by then: the handle keeps nothing alive, and this reference does. `size` is what the
    /// exporter says: only mapping it proves it.
    ///
    /// The bytes may be a peer's, and so anything.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200().with_imex());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::FABRIC);
    /// # let size = Granularity::minimum(&driver, &properties)?.round_up(1)?;
    /// # let memory = Allocation::create(&driver, size, &properties)?;
    /// let handle = memory.export_fabric()?; // as a rule to another host, over its network
    /// let imported = Allocation::import_fabric(&driver, &handle, size)?;
    /// drop(memory);
    /// assert_eq!(imported.origin(), Origin::Imported);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotGranular`] for zero; what the driver answers, as for a handle whose memory is gone, and without an
    /// IMEX channel that the exporter has too.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_fabric(driver: &Driver, handle: &CUmemFabricHandle, size: GranularSize) -> Result<Self, Error> {
        if size.is_zero() {
            return Err(Error::NotGranular { bytes: 0, granularity: size.granularity().bytes() });
        }
        // SAFETY: the bytes came as a fabric handle. Nobody can tell beforehand whether an export wrote them, and
        // nobody but the driver has to: they are data, no pointer and no number of a reference of ours, and the call is
        // there to take them from processes and hosts that the driver can't trust either. It looks up what they name
        // among what the process's IMEX channel may reach, and its manual answers what is not there with an error.
        let handle = unsafe { driver.mem_import_fabric(handle) }?;
        Ok(Self::own(driver, handle, size, Origin::Imported))
    }

    /// Takes a reference to the memory mapped at `address` (`cuMemRetainAllocationHandle`).
    ///
    /// # Safety
    /// The mapping is the caller's to share, and `size` is the allocation's whole size.
    ///
    /// # Errors
    /// What the driver answers: 1 where no virtual memory is mapped.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub unsafe fn retain(driver: &Driver, address: CUdeviceptr, size: GranularSize) -> Result<Self, Error> {
        // SAFETY: the caller may share the mapping there.
        let handle = unsafe { driver.mem_retain_allocation_handle(address) }?;
        // The mapping is there until this returns: so whoever unmaps it knows of the reference.
        let retained = driver.retained().add(handle);
        let mut memory = Self::own(driver, handle, size, Origin::Retained);
        memory.retained = Some(ManuallyDrop::new(retained));
        Ok(memory)
    }

    fn own(driver: &Driver, handle: CUmemGenericAllocationHandle, size: GranularSize, origin: Origin) -> Self {
        let (driver, exposed) = (driver.clone(), AtomicBool::new(false));
        Self { driver, handle, size, origin, flags: None, usage: None, exposed, retained: None, released: false }
    }

    /// Counts it in `usage` until it is released, and what is exported of it: no longer where it was counted before.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    /// let size = Granularity::minimum(&driver, &properties)?.round_up(2 << 20)?;
    /// let usage = Arc::<Usage>::default();
    /// let memory = Allocation::create(&driver, size, &properties)?.counted(&usage);
    /// assert_eq!(usage.created().now, 2 << 20);
    /// memory.close()?;
    /// assert_eq!(usage.created().now, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn counted(mut self, usage: &Arc<Usage>) -> Self {
        if let Some(former) = self.usage.replace(Arc::clone(usage)) {
            former.held(self.origin).subtract(self.size());
        }
        usage.held(self.origin).add(self.size());
        self
    }

    /// The driver that it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// The driver's own name of it, for raw calls; meaningless in another process.
    pub fn handle(&self) -> CUmemGenericAllocationHandle {
        self.handle
    }

    /// Its size in bytes; for imported memory what the exporter said.
    pub fn size(&self) -> usize {
        self.size.bytes()
    }

    /// What its size, and the addresses that it is mapped at, are multiples of.
    pub fn granularity(&self) -> Granularity {
        self.size.granularity()
    }

    /// Where this reference comes from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The flags that it was made with, as they were asked for: compression, RDMA and usage. None for memory that was
    /// imported or retained. Whether they could be had, its [`properties`](Self::properties) say.
    pub fn flags(&self) -> Option<CUmemAllocationPropFlags> {
        self.flags
    }

    /// Whether nobody else is known to have the memory, or to reach it once it is unmapped: it was made here, no export of it
    /// was ever attempted, dma-bufs included, each mapping of it that went was undone, and there is no reference to it that
    /// was [retained](Self::retain) by address. Makes no call. What raw calls did with its [handle](Self::handle) is not
    /// known.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use cuvmm_driver::sys::*;
    /// # use cuvmm_handles::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let driver = simulator.driver()?;
    /// # let location = driver.device(0)?.location();
    /// # let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
    /// # let properties = CUmemAllocationProp::pinned(location, kind);
    /// # let size = Granularity::minimum(&driver, &properties)?.round_up(1)?;
    /// let memory = Allocation::create(&driver, size, &properties)?;
    /// assert!(memory.is_private());
    /// drop(memory.export_posix_fd()?);
    /// assert!(!memory.is_private()); // whoever had the descriptor may have imported it
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_private(&self) -> bool {
        let is_made_here = matches!(self.origin, Origin::Created(_)) && !self.driver.is_forked();
        is_made_here && !self.exposed.load(Ordering::Acquire) && !self.driver.retained().contains(self.handle)
    }

    /// From now on somebody may have it, or reach it, whom nobody here can tell of.
    pub(crate) fn expose(&self) {
        self.exposed.store(true, Ordering::Release);
    }

    /// What the driver says it is (`cuMemGetAllocationPropertiesFromHandle`). For imported memory the handle types
    /// read 0, and a location id of -2 means that its device is not visible here.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    pub fn properties(&self) -> Result<CUmemAllocationProp, Error> {
        // SAFETY: the handle is alive by the field's invariant.
        Ok(unsafe { self.driver.mem_get_allocation_properties(self.handle) }?)
    }

    /// Whether an export as `wanted` is possible at all: [`export_posix_fd`](Self::export_posix_fd),
    /// [`export_fabric`](Self::export_fabric). Makes no call.
    ///
    /// # Errors
    /// [`Error::Imported`]; [`Error::NotExportable`].
    pub fn check_exportable(&self, wanted: CUmemAllocationHandleType) -> Result<(), Error> {
        match self.origin {
            Origin::Created(has) if has.contains(wanted) && wanted != CUmemAllocationHandleType::NONE => Ok(()),
            Origin::Created(has) => Err(Error::NotExportable { has, wanted }),
            Origin::Imported => Err(Error::Imported),
            Origin::Retained => Err(Error::NotExportable { has: CUmemAllocationHandleType::NONE, wanted }),
        }
    }

    /// A file descriptor that names the memory in any process and pins it while it is open
    /// (`cuMemExportToShareableHandle`). It is close-on-exec and never number 0, which no driver could import.
    ///
    /// # Errors
    /// [`Error::Imported`], [`Error::NotExportable`]; 304 at the limit of open files.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_posix_fd(&self) -> Result<OwnedFd, Error> {
        self.check_exportable(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR)?;
        self.expose();
        // SAFETY: the handle is alive by the field's invariant.
        let mut fd = unsafe { self.driver.mem_export_posix_fd(self.handle) }?;
        if fd.as_raw_fd() == 0 {
            fd = fd.try_clone().map_err(|error| Error::Duplicate { errno: error.raw_os_error().unwrap_or(0) })?;
        }
        self.count_export();
        Ok(fd)
    }

    /// The bytes that name the memory on every host of its fabric (`cuMemExportToShareableHandle`). They pin nothing: the
    /// memory must be alive here until whoever gets them has imported it.
    ///
    /// # Errors
    /// [`Error::Imported`], [`Error::NotExportable`]; what the driver answers.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_fabric(&self) -> Result<CUmemFabricHandle, Error> {
        self.check_exportable(CUmemAllocationHandleType::FABRIC)?;
        self.expose();
        // SAFETY: the handle is alive by the field's invariant.
        let handle = unsafe { self.driver.mem_export_fabric(self.handle) }?;
        self.count_export();
        Ok(handle)
    }

    fn count_export(&self) {
        if let Some(usage) = &self.usage {
            usage.add_exported();
        }
    }

    /// Gives the reference back, as dropping it does, and says how that went. After a failure the reference is
    /// stranded.
    ///
    /// # Errors
    /// What `cuMemRelease` answers.
    pub fn close(mut self) -> Result<(), Error> {
        self.release()
    }

    fn release(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.released, true) || self.driver.is_forked() {
            return Ok(());
        }
        // SAFETY: the reference is alive by the field's invariant, and `released` makes this the only release.
        if let Err(error) = unsafe { self.driver.mem_release(self.handle) } {
            strand(&self.driver, self.usage.as_deref(), StrandedKind::Allocation, &error, "memory was not released");
            return Err(error.into());
        }
        if !*self.exposed.get_mut()
            && let Some(retained) = self.retained.take()
        {
            drop(ManuallyDrop::into_inner(retained));
        }
        if let Some(usage) = &self.usage {
            usage.held(self.origin).subtract(self.size());
        }
        Ok(())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A failure was counted and reported by `release`.
        let _ = self.release();
    }
}
